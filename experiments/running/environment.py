"""Where a run was made: versions, commit, host, of each attempt at it."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dropblock_hooks

PACKAGES = ("torch", "timm", "torchvision", "lightning", "numpy")
COMMIT = "DROPBLOCK_HOOKS_COMMIT"  # tells a copy of the code, as on a cluster, what it is of


def environment(launch: str | None) -> dict[str, Any]:
    """What `environment.json` says of an attempt at a run that begins now.

    Its `attempt` has all of it, too: a run may go on elsewhere, with other versions.
    """
    made = {
        "versions": _versions(),
        **commit(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "started": now(),
    }
    return {**made, "attempt": {**made, "pid": os.getpid(), "launch": launch}}


@cache
def _versions() -> dict[str, str]:
    found = {"dropblock-hooks": dropblock_hooks.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


@cache
def commit() -> dict[str, Any]:
    """The commit of this code, and whether it was changed since; "unknown" if it is no checkout."""
    root = Path(__file__).resolve().parents[2]
    unknown = {"commit": "unknown", "dirty": None}
    if not (root / ".git").exists():  # a copy, as on a cluster's workers
        return dict(json.loads(os.environ.get(COMMIT, "null")) or unknown)
    try:
        head, changes = (
            subprocess.run(
                ["git", *command], cwd=root, capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.SubprocessError):
        return unknown
    return {"commit": head, "dirty": bool(changes)}


def now() -> str:
    """The time, as text, of the same zone everywhere."""
    return datetime.now(UTC).isoformat(timespec="seconds")
