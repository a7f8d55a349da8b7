"""Checkpoints: one file, written whole, signed with a digest of all its bytes."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric
from torch import nn

from experiments.config import Config, Epoch, in_order
from experiments.data import derive_seed
from experiments.files import fault, flush, free_name, sign_zip, write_atomically

if TYPE_CHECKING:
    from experiments.train import Training

# A run goes on with another number of processes, though not with the same masks.
MAY_DIFFER = ("accelerator", "devices", "num_nodes", "strategy")


__all__ = [
    "AnotherRun",
    "CheckpointDamaged",
    "gather",
    "restore",
    "save",
    "set_aside_if_damaged",
    "share_buffers",
    "write_atomically",
]


class CheckpointDamaged(ValueError):
    """A checkpoint that can't be read, or is not what was written."""


class AnotherRun(ValueError):
    """A checkpoint of another config."""


def save(training: Training, path: Path) -> None:
    """Write one checkpoint for all processes; each of them has to call this."""
    fabric = training.fabric
    state = {
        **_modules(training),
        "config": asdict(training.config),
        "epoch": training.epoch,
        "batch": training.batch,
        "epochs": [asdict(epoch) for epoch in training.epochs],
        "rate": training.rate.state_dict(),
        "precision": fabric.strategy.precision.state_dict(),
        "seconds": training.seconds,
        "memory": training.memory,
        "processes": gather(fabric, _own(training)),
    }
    part = path.with_name(f".{path.name}.part")
    try:
        fabric.save(part, state)  # gathers what is spread; the first process writes
        if fabric.is_global_zero:
            sign_zip(part)
            flush(part)
            os.replace(part, path)
            flush(path.parent)
    except BaseException:
        if fabric.is_global_zero:
            part.unlink(missing_ok=True)
        raise
    fabric.barrier()


def restore(training: Training, path: Path) -> None:
    """Bring a run to where its checkpoint was written, if there is one; the folder is made.

    Raises:
        CheckpointDamaged: if a bit of the file was changed, or it is no checkpoint of this program.
        AnotherRun: if it is of another run.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    problem = next(filter(None, gather(training.fabric, fault(path))), None)
    if problem is not None:  # all processes say so, whichever of them has read it
        raise CheckpointDamaged(_unreadable(path, problem))
    try:
        plain = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _check_same(path, plain["config"], training.config)
        state = training.fabric.load(path, _modules(training))
        _take(training, state)
    except (OSError, MemoryError, AnotherRun):
        raise
    except Exception as error:  # whatever unpickling damaged bytes, or other weights, raises
        raise CheckpointDamaged(_unreadable(path, repr(error))) from error


def set_aside_if_damaged(path: Path) -> str | None:
    """Rename a checkpoint that is not as it was written, and say so in a line; None if it is right.

    Raises:
        OSError: if it can't be read or renamed.
    """
    problem = fault(path) if path.exists() else None
    if problem is None:
        return None
    aside = free_name(path)
    os.replace(path, aside)
    flush(path.parent)
    return f"{_unreadable(path, problem)}; set aside as {aside}, the run begins anew"


def _unreadable(path: Path, problem: str) -> str:
    return f"{path} can't be read as a checkpoint: {problem}"


def gather(fabric: Fabric, own: Any) -> list[Any]:
    """What each process gives, in the order of their ranks."""
    if fabric.world_size == 1:
        return [own]
    found: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(found, own)
    return found


def share_buffers(fabric: Fabric, model: nn.Module) -> None:
    """Give all processes the first one's buffers: those are in the checkpoint."""
    if fabric.world_size > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)


def _modules(training: Training) -> dict[str, Any]:
    """What is restored in place."""
    average = {} if training.average is None else {"average": training.average.module}
    return {"model": training.model, "optimizer": training.optimizer, **average}


def _own(training: Training) -> dict[str, Any]:
    """What each process has for itself."""
    device = training.fabric.device
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device).cpu() if device.type == "cuda" else None,
        "targets": training.targets.state_dict(),
        "attached": training.attached.state_dict() if training.attached else None,
        "totals": asdict(training.totals),
    }


def _take(training: Training, state: dict[str, Any]) -> None:
    fabric, processes = training.fabric, state["processes"]
    training.epoch, training.batch = state["epoch"], state["batch"]
    training.epochs = [Epoch(**epoch) for epoch in state["epochs"]]
    training.rate.load_state_dict(state["rate"])
    fabric.strategy.precision.load_state_dict(state["precision"])
    training.seconds, training.memory = state["seconds"], state["memory"]
    same = len(processes) == fabric.world_size
    own = processes[fabric.global_rank if same else 0]
    training.totals = type(training.totals)(**own["totals"])
    if training.attached:
        training.attached.load_state_dict(own["attached"])
    if not same:  # other processes can't draw the same masks: they begin anew from here
        place = f"masks/{fabric.global_rank}/{training.epoch}/{training.batch}"
        torch.manual_seed(derive_seed(training.config.seed, place, training.config.replica))
        return
    training.targets.load_state_dict(own["targets"])
    torch.set_rng_state(own["torch"])
    if own["cuda"] is not None:
        torch.cuda.set_rng_state(own["cuda"], fabric.device)


def _moved(saved: dict[str, Any], given: dict[str, Any], name: str) -> bool:
    """Whether two values are the same but for a folder's path."""
    kinds = [str(config.get(name)).partition(":")[0] for config in (saved, given)]
    return name == "data" and kinds[0] == kinds[1]


def _check_same(path: Path, saved: dict[str, Any], config: Config) -> None:
    given = asdict(config)
    saved, given = ({**c, "spec": in_order(c.get("spec"))} for c in (saved, given))
    differences = [
        f"{name} is {saved.get(name)!r} there, and {value!r} here"
        for name, value in given.items()
        if name not in MAY_DIFFER and saved.get(name) != value and not _moved(saved, given, name)
    ]
    if differences:
        raise AnotherRun(f"{path} is of another run: {'; '.join(differences)}")
