"""Checkpoints: one file, written whole, signed with a digest of all its bytes."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.fabric import Fabric

from experiments.config import LATER, Config, in_order
from experiments.files import fault, flush, free_name, sign_zip
from experiments.processes import gather

# A run goes on with another number of processes, though not with the same masks.
MAY_DIFFER = ("accelerator", "devices", "num_nodes", "strategy")


class Resumable(Protocol):
    """A run as its checkpoint sees it; `modules` are restored in place, the rest is handed back."""

    config: Config
    fabric: Fabric

    def modules(self) -> dict[str, Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class CheckpointDamaged(ValueError):
    """A checkpoint that can't be read, or is not what was written."""


class AnotherRun(ValueError):
    """A checkpoint of another config."""


def save(run: Resumable, path: Path) -> None:
    """Write one checkpoint for all processes; each of them has to call this."""
    fabric = run.fabric
    state = {**run.modules(), "config": asdict(run.config), **run.state_dict()}
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


def restore(run: Resumable, path: Path) -> None:
    """Bring a run to where its checkpoint was written, if there is one; the folder is made.

    Raises:
        CheckpointDamaged: if a bit of the file was changed, or it is no checkpoint of this program.
        AnotherRun: if it is of another run.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    problem = next(filter(None, gather(run.fabric, fault(path))), None)
    if problem is not None:  # all processes say so, whichever of them has read it
        raise CheckpointDamaged(_unreadable(path, problem))
    try:
        plain = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _check_same(path, plain["config"], run.config)
        run.load_state_dict(run.fabric.load(path, run.modules()))
    except (OSError, MemoryError, AnotherRun):
        raise
    except Exception as error:  # whatever unpickling damaged bytes, or other weights, raises
        raise CheckpointDamaged(_unreadable(path, repr(error))) from error


def read_weights(path: Path, config: Config) -> dict[str, torch.Tensor]:
    """The weights that a finished run was tested with: the last ones, or their average.

    Raises:
        CheckpointDamaged: if a bit of the file was changed, or it is no checkpoint of this program.
        AnotherRun: if it is of another run.
        ValueError: if the run has not ended there.
        OSError: if it can't be read.
    """
    if (problem := fault(path)) is not None:
        raise CheckpointDamaged(_unreadable(path, problem))
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        done, weights = state["epoch"], state.get("average", state["model"])
        _check_same(path, state["config"], config)
    except (OSError, MemoryError, AnotherRun):
        raise
    except Exception as error:  # whatever unpickling other bytes raises
        raise CheckpointDamaged(_unreadable(path, repr(error))) from error
    if done != config.epochs:
        raise ValueError(f"{path} is of epoch {done} of {config.epochs}: the run has not ended")
    return dict(weights)


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


def _moved(saved: dict[str, Any], given: dict[str, Any], name: str) -> bool:
    """Whether two values are the same but for a folder's path."""
    kinds = [str(config.get(name)).partition(":")[0] for config in (saved, given)]
    return name == "data" and kinds[0] == kinds[1]


def _check_same(path: Path, saved: dict[str, Any], config: Config) -> None:
    given = asdict(config)
    saved, given = ({**LATER, **c, "spec": in_order(c.get("spec"))} for c in (saved, given))
    differences = [
        f"{name} is {saved.get(name)!r} there, and {value!r} here"
        for name, value in given.items()
        if name not in MAY_DIFFER and saved.get(name) != value and not _moved(saved, given, name)
    ]
    if differences:
        raise AnotherRun(f"{path} is of another run: {'; '.join(differences)}")
