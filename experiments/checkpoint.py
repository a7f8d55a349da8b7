"""The state of a run at the end of an epoch, in one file that is replaced as a whole."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new one, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def save(folder: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()  # given a path, torch.save reports a full disk as a RuntimeError
    torch.save(state, content)
    write_whole(folder / "checkpoint.pt", content.getvalue())


def load(folder: Path) -> dict[str, Any] | None:
    """Return the checkpoint of a folder; None if the folder has no checkpoint.

    Raises:
        ValueError: if the file can't be read.
    """
    path = folder / "checkpoint.pt"
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling may raise any error
        raise ValueError(f"{path} can't be read: {error}. Delete it to begin anew") from error
    return state
