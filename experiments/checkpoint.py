"""Files that are there whole or not at all, and checkpoints among them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric
from torch import nn

from experiments.config import Config, Epoch, in_order
from experiments.data import derive_seed

if TYPE_CHECKING:
    from experiments.train import Training

# A run goes on with another number of processes, though not with the same masks.
MAY_DIFFER = ("accelerator", "devices", "num_nodes", "strategy")


class CheckpointDamaged(ValueError):
    """A checkpoint that can't be read."""


class AnotherRun(ValueError):
    """A checkpoint of another config."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make a file beside `path`, and put it in the place of `path` when it is whole.

    What was there stays there if anything fails; a crash leaves either file, never a half of one.

    Example:
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp()) / "note.txt"
        >>> write_atomically(path, lambda part: part.write_text("all of it"))
        >>> path.read_text()
        'all of it'
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        flush(part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    flush(path.parent)


def flush(path: Path) -> None:
    """Have the operating system write a file, or a folder's entries, to the disk."""
    # some file systems, and Windows, have no such thing for folders
    with suppress(OSError) if path.is_dir() else nullcontext():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
        CheckpointDamaged: if the file is not a checkpoint of this program.
        ValueError: if it is of another run.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    try:
        plain = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _check_same(path, plain["config"], training.config)
        state = training.fabric.load(path, _modules(training))
        _take(training, state)
    except (OSError, MemoryError, AnotherRun):
        raise
    except Exception as error:  # whatever unpickling damaged bytes, or other weights, raises
        raise CheckpointDamaged(f"{path} can't be read as a checkpoint: {error!r}") from error


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
