"""One run to a GPU: the workers of a host share its GPUs by locks."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from experiments.config import Config


@contextmanager
def own_gpu(config: Config, stop: Callable[[], bool]) -> Iterator[int | None]:
    """The index of a GPU that no other run on this host has; waited for if all are taken.

    None where the config asks for none, where there is none, or when `stop` says so.

    Args:
        config: a resolved config.
        stop: asked while waiting.
    """
    locks = _locks() if config.accelerator == "cuda" else []
    index = _take(locks, stop)
    try:
        yield index
    finally:
        if index is not None:
            locks[index].release()


def _locks() -> list[FileLock]:
    user = getattr(os, "getuid", lambda: "")()  # whose files others may not open
    folder = Path(tempfile.gettempdir())
    names = [_name(index) for index in range(torch.cuda.device_count())]
    files = [folder / f"dropblock-hooks-{user}-{name}.lock" for name in names]
    return [FileLock(file, fallback_to_soft=False) for file in files]


def _name(index: int) -> str:
    """The same in processes that see other parts of the host's GPUs."""
    return str(torch.cuda.get_device_properties(index).uuid)


def _take(locks: list[FileLock], stop: Callable[[], bool]) -> int | None:
    while locks and not stop():
        for index, lock in enumerate(locks):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            return index
        time.sleep(0.5)
    return None
