"""The folder of a run: claimed, begun, finished or failed.

| file | content |
| --- | --- |
| run.json | the fields of the run |
| lock | held by the process that works on the run; the system frees it when the process dies |
| attempts.jsonl | one line for each begin: when, where, with which versions |
| checkpoint.pt | the state at the end of the last epoch |
| result.json | the result of the run, written last |
| error.txt | the reason why the run failed |
"""

from __future__ import annotations

import datetime
import json
import platform
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock, Timeout

import dropblock_hooks
from experiments.checkpoint import write_whole
from experiments.config import Run, run_hash
from experiments.study import Study
from experiments.train import Result

DEATHS = 3  # begins of a run without a new epoch, after which it has failed
Status = Literal["finished", "diverged", "failed", "open"]


class RunFolder:
    """The folder of a run in a pool: POOL/HASH.

    Args:
        pool: folder of all runs, which studies share.
        run: the run.
    """

    def __init__(self, pool: Path, run: Run) -> None:
        self.run = run
        self.hash = run_hash(run)
        self.path = pool / self.hash
        self._result: Result | None = None

    @property
    def status(self) -> Status:
        """The state of the run. A failed run is open again after `forget_failure`."""
        result = self.result()
        if result is not None:
            return result.status  # type: ignore[return-value]
        return "failed" if (self.path / "error.txt").exists() else "open"

    def result(self) -> Result | None:
        """Return the result; None before the run is finished. A result is final, and read once.

        Raises:
            ValueError: if the file of the result can't be read.
        """
        if self._result is not None:
            return self._result

        path = self.path / "result.json"
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            self._result = Result(**fields)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} can't be read: {error}") from error
        return self._result

    def error(self) -> str:
        """Return the first line of the reason why the run failed."""
        lines = _lines_of(self.path / "error.txt")
        return lines[0] if lines else ""

    def attempts(self) -> list[dict[str, Any]]:
        """Return the notes of each begin. A full disk may have cut off some lines."""
        notes = []
        for line in _lines_of(self.path / "attempts.jsonl"):
            if line.endswith("}"):
                begin = line.rindex("{")
                notes.append(json.loads(line[begin:]))
        return notes

    @contextmanager
    def claim(self) -> Iterator[bool]:
        """Hold the lock of the run; false if another process has it.

        Raises:
            RuntimeError: if the file system has no locks.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / "lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            yield False
            return
        except NotImplementedError as error:
            raise RuntimeError(
                f"{self.path}: this file system has no locks: use one --out folder for each "
                "machine, and share the work with --seeds"
            ) from error
        try:
            yield True
        finally:
            lock.release()

    def begin(self) -> bool:
        """Note a begin; return false if the process died in each of the last begins.

        The lock must be held.
        """
        epochs = len(_lines_of(self.path / "metrics.jsonl"))
        last_begins = [note["epochs"] for note in self.attempts()[-DEATHS:]]
        if len(last_begins) == DEATHS and set(last_begins) == {epochs}:
            self.fail(RuntimeError(f"the process died {DEATHS} times without a new epoch"))
            return False

        path = self.path / "run.json"
        if not path.exists():
            plain = json.dumps(self.run.model_dump(), indent=1, default=str)
            write_whole(path, plain.encode())

        now = datetime.datetime.now(datetime.UTC)
        note = {
            "epochs": epochs,
            "began": now.isoformat(timespec="seconds"),
            "host": platform.node(),
            **versions(self.run),
        }
        _append(self.path / "attempts.jsonl", note)
        return True

    def note_epoch(self, row: dict[str, Any]) -> None:
        """Add the numbers of an epoch to metrics.jsonl."""
        _append(self.path / "metrics.jsonl", row)

    def finish(self, result: Result) -> None:
        """Write the result. The run is finished with it."""
        text = json.dumps(asdict(result), indent=1)
        write_whole(self.path / "result.json", text.encode())

    def fail(self, error: Exception) -> None:
        """Note why the run failed; the first line is the message."""
        message = f"{type(error).__name__}: {error}"
        first_line = " ".join(message.split())
        details = "".join(traceback.format_exception(error))
        write_whole(self.path / "error.txt", f"{first_line}\n\n{details}".encode())

    def forget_failure(self) -> None:
        """Open a failed run again. It goes on from its checkpoint."""
        with self.claim() as mine:
            if mine and self.status in ("failed", "open"):
                for name in ("error.txt", "attempts.jsonl"):
                    (self.path / name).unlink(missing_ok=True)


def _lines_of(path: Path) -> list[str]:
    """Return the lines of a file; none if there is no such file."""
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8").splitlines()


def _append(path: Path, fields: dict[str, Any]) -> None:
    """Add a line of JSON to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


def folders_of(study: Study, pool: Path) -> list[tuple[str, RunFolder]]:
    """Return the folders of all runs of a study, with the names of their conditions."""
    return [(name, RunFolder(pool, run)) for name, run in study.runs()]


def versions(run: Run) -> dict[str, str]:
    """Return the versions that decide results, and the device of a run."""
    device: str = run.accelerator
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "torch": version("torch"),
        "torchvision": version("torchvision"),
        "timm": version("timm"),
        "dropblock_hooks": dropblock_hooks.__version__,
        "device": device,
    }
