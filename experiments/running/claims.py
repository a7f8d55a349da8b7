"""Claims: of all processes on all hosts, one at a time works on a run.

A *lock* is the operating system's (`flock`): it is gone when its process is. A *lease*, for shared
directories whose locks don't hold, is a file that its holder touches every few seconds; who sees
it untouched for `LEASE_SECONDS` takes it over. The former holder, if it was only asleep, learns
of that at its next `check`, and writes nothing more.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from filelock import FileLock, SoftFileLease, Timeout

from experiments.files import among_writers

Kind = Literal["lock", "lease"]
LEASE_SECONDS = 30.0
# what flock answers on file systems (or mounts) that have no locks
_REFUSALS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


class ClaimLost(Exception):
    """The claim is another's by now, or its directory was taken away."""


class Claim:
    """The claim to one run's directory, held by at most one process.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as directory:
        ...     one, other = Claim(Path(directory)), Claim(Path(directory))
        ...     one.acquire(), other.acquire()
        (True, False)

    Args:
        directory: of the run.
        kind: lock or lease; all who may claim the directory must use the same.
        seconds: after which a lease that nobody touched is taken over; the same for all, too.
    """

    def __init__(self, directory: Path, kind: Kind = "lock", seconds: float = LEASE_SECONDS):
        self._path = directory / kind
        self._inode: int | None = None
        self._file: FileLock | SoftFileLease
        if kind == "lock":
            self._file = FileLock(self._path, fallback_to_soft=False)
        else:
            self._file = SoftFileLease(
                self._path, lease_duration=seconds, heartbeat_interval=seconds / 6
            )

    def acquire(self, wait: float = 0.0, unless: Callable[[], bool] | None = None) -> bool:
        """Whether the claim is this process's now.

        Args:
            wait: seconds to wait while another has it.
            unless: asked while waiting; True ends it.
        """
        try:
            self._file.acquire(timeout=wait, poll_interval=0.25, cancel_check=unless)
        except Timeout:
            return False
        self._inode = os.stat(self._path).st_ino
        return True

    def check(self) -> None:
        """Raise ClaimLost if the claim is no longer this process's."""
        if self._named() or (time.sleep(0.3), self._named())[1]:
            return  # who examines a lease moves it aside for a moment: one miss is none
        raise ClaimLost(f"{self._path} is no longer this process's")

    def _named(self) -> bool:
        try:
            return os.stat(self._path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give the claim back; nothing happens if it was lost."""
        self._file.release()


def locks_hold(directory: Path) -> bool:
    """Whether the directory's file system grants the operating system's locks."""
    probe = directory / f".probe.{os.getpid()}.part"
    try:
        with FileLock(probe, fallback_to_soft=False, timeout=10):
            return True
    except Timeout:
        return True
    except NotImplementedError:
        return False
    except OSError as error:
        if error.errno in _REFUSALS:
            return False
        raise
    finally:
        probe.unlink(missing_ok=True)


def agree(directory: Path, asked: Kind | None) -> Kind:
    """The kind of claim that all launches into a directory use: the one its first launch chose.

    Args:
        directory: of the study; its file `claims` holds the choice.
        asked: None for whatever was chosen, or the lock if that is granted, else the lease.

    Raises:
        ValueError: if launches before this one used the other kind.
    """
    file = directory / "claims"
    if not file.exists():
        with among_writers(directory, ".claims.*.part", ".probe.*.part"):
            _choose(file, asked)
    chosen = file.read_text(encoding="utf-8").strip()
    if chosen not in ("lock", "lease"):
        raise ValueError(f"{file} must hold 'lock' or 'lease', got {chosen!r}")
    if asked not in (None, chosen):
        raise ValueError(
            f"claim must be {chosen!r}, which other launches into {directory} use, got {asked!r}"
            f"; when none is under way, remove {file} to choose again"
        )
    return "lock" if chosen == "lock" else "lease"


def _choose(file: Path, asked: Kind | None) -> None:
    """Write down a kind of claim, unless another launch is faster."""
    choice = asked or ("lock" if locks_hold(file.parent) else "lease")
    draft = file.with_name(f".claims.{os.getpid()}.{time.monotonic_ns()}.part")
    draft.write_text(f"{choice}\n", encoding="utf-8")
    try:
        os.link(draft, file)  # whole or not at all, and only the first
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        os.replace(draft, file)
    finally:
        draft.unlink(missing_ok=True)
