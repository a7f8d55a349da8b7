"""Files that are there whole or not at all, and that tell when they were changed.

Nothing here imports torch: the commands answer `--help` without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

_MARK = b"sha256:"
_NOTE = len(_MARK) + 64
_ZIP_END = b"PK\x05\x06"  # and 18 more bytes, of which the last two are the comment's length


def reason(error: Exception) -> str:
    """What an error says to a user, without the number that the system gives it.

    Example:
        >>> reason(FileNotFoundError(2, "No such file or directory", "study.yaml"))
        'study.yaml: No such file or directory'
    """
    if not isinstance(error, OSError) or not isinstance(error.errno, int):
        return str(error)
    names = [name for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    where, told = " -> ".join(map(os.fsdecode, names)), error.strerror or str(error)
    return f"{where}: {told}" if where else told


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


def is_draft(name: str) -> bool:
    """Whether a file of this name is one that `write_atomically` had not finished."""
    return name.startswith(".") and name.endswith(".part")


@contextmanager
def draft_folder(folder: Path) -> Iterator[Path]:
    """A new folder `.new-…` in a folder, gone in the end; those of writers that were killed, too.

    Example:
        >>> home = Path(tempfile.mkdtemp())
        >>> (home / ".new-left").mkdir()
        >>> with draft_folder(home) as new:
        ...     new.parent == home, (home / ".new-left").exists()
        (True, False)
    """
    with (
        among_writers(folder, ".new-*"),
        tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as name,
    ):
        yield Path(name)


@contextmanager
def among_writers(folder: Path, *drafts: str) -> Iterator[None]:
    """While something is written in a folder: first, who is alone there clears up.

    All who write such drafts hold a shared lock of the operating system on the folder. Who can
    have it alone knows that the drafts that are there have no writer any more. Where there are
    no such locks, nothing is cleared up.

    Args:
        folder: that exists.
        drafts: globs of the names of drafts.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # another writes there, or the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in [path for draft in drafts for path in folder.glob(draft)]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def free_name(path: Path) -> Path:
    """The path of damage that is set aside: `path` with `.damaged-` and the first free number."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return aside


def sign_zip(path: Path) -> None:
    """Write a digest of all of a zip file into the zip file's comment, which readers skip.

    Example:
        >>> import zipfile
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp()) / "a.zip"
        >>> with zipfile.ZipFile(path, "w") as file:
        ...     file.writestr("a", "text")
        >>> fault(path)
        'it ends without a digest'
        >>> sign_zip(path)
        >>> fault(path), zipfile.ZipFile(path).testzip()
        (None, None)

    Raises:
        ValueError: if it is no zip file, or has a comment.
    """
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 22))
        end = file.read()
        if not end.startswith(_ZIP_END) or end[-2:] != b"\0\0":
            raise ValueError(f"{path} must end as a zip file without a comment does")
        file.seek(size - 2)
        file.write(_NOTE.to_bytes(2, "little"))
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # leaves the file at its end
        file.write(_MARK + digest.encode())


def fault(path: Path) -> str | None:
    """What is wrong with a signed file, in words; None if each bit is as it was when signed.

    Raises:
        OSError: if it can't be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        left = file.seek(0, os.SEEK_END) - _NOTE
        file.seek(0)
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
        note = file.read(_NOTE + 1)
    if left < 0 or not note.startswith(_MARK) or len(note) != _NOTE:
        return "it ends without a digest"
    if note[len(_MARK) :] != digest.hexdigest().encode():
        return "its digest does not match: bits of it were changed"
    return None


def record_digest(record: Mapping[str, Any]) -> str:
    """A digest of plain data, but for their own `sha256`; equal after a way through JSON.

    Example:
        >>> record_digest({"a": (1, 2)}) == record_digest({"a": [1, 2], "sha256": "0"})
        True
    """
    rest = {name: value for name, value in record.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest).encode()).hexdigest()
