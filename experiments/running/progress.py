"""What a launch shows while it works, read from the run directories, where all hosts write."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from experiments.running.directories import read_environment
from experiments.running.outcomes import look

MOST = 16  # runs that have a line of their own; the others are counted


@dataclass
class Shown:
    """One run as the progress knows it.

    Args:
        label: condition and seed.
        directory: of the run, named by its hash.
        epochs: that it takes.
        failure: `id` of a failure that is known and tried again.
        done: epochs that are finished.
        loss: of the last of them; None if there is none.
        validation: its accuracy on the validation images, likewise.
        test: its accuracy on the clean test images, likewise.
        attempt: the last one at the run, if one was begun, or went on, since the first look.
        ended: whether the run is.
    """

    label: str
    directory: Path
    epochs: int
    failure: str | None = None
    done: int = 0
    loss: float | None = None
    validation: float | None = None
    test: float | None = None
    attempt: dict[str, Any] | None = None
    ended: bool = False
    _seen: dict[str, tuple[int, int] | None] = field(default_factory=dict)

    def look(self) -> str | None:
        """Count the epochs; what there is to tell, if the run has ended."""
        if self.ended:
            return None
        first = not self._seen
        begun, grown = self._changed("environment.json"), self._changed("metrics.jsonl")
        found = look(self.directory)
        if found.damaged:  # who has the claim sets it aside, and runs it again
            self.done, self.loss, self.validation, self.test = 0, None, None, None
            return None
        if found.is_final(self.failure):
            self.ended = True
            self.done = self.epochs if found.result else self.done
            more = {"diverged": ": its loss was not finite", "failed": f": {found.error}"}
            return found.status + more.get(found.status, "")
        if grown:
            self._count()
        if (begun or grown) and not first:
            self.attempt = next(
                reversed(read_environment(self.directory).get("attempts", [])), None
            )
        return None

    def _changed(self, name: str) -> bool:
        """Whether a file is another than at the last look."""
        try:
            stat = (self.directory / name).stat()
            now = (stat.st_size, stat.st_mtime_ns)
        except OSError:
            now = None  # not begun, or set aside
        changed = now != self._seen.get(name)
        self._seen[name] = now
        return changed

    def _count(self) -> None:
        """Read how many epochs there are, and the last one's loss."""
        try:
            lines = (self.directory / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
            self.done = min(len(lines), self.epochs)
            last = json.loads(lines[-1]) if lines else {}
            self.loss = float(last["loss"]) if lines else None
            self.validation, self.test = last.get("validation"), last.get("test")
        except (OSError, ValueError, TypeError, KeyError):
            self.done, self.loss, self.validation, self.test = 0, None, None, None


def running(runs: Sequence[Shown]) -> list[Shown]:
    """Those that are worked on, as far as can be seen: a process has one run at a time."""
    last: dict[tuple[object, object], Shown] = {}
    for run in runs:
        if run.attempt is not None:
            process = (run.attempt.get("host"), run.attempt.get("pid"))
            other = last.get(process)
            if other is None or _began(other) <= _began(run):
                last[process] = run
    return [run for run in runs if run in last.values() and not run.ended and _lives(run)]


def _began(run: Shown) -> str:
    return str((run.attempt or {}).get("started"))


def _lives(run: Shown) -> bool:
    """Whether the process that works on a run is there, if it is on this host."""
    attempt = run.attempt or {}
    pid = attempt.get("pid")
    if attempt.get("host") != socket.gethostname() or not isinstance(pid, int):
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def shown(runs: Sequence[Shown], console: Console | None = None) -> Iterator[Progress]:
    """Show bars on standard error: of all runs, and of each that is worked on.

    Each has the time passed and left, and a run its epochs and the loss of the last one.
    """
    console = console or Console(stderr=True)
    for run in runs:
        with suppress(OSError):  # the launch tells what can't be read
            run.look()
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("passed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        speed_estimate_period=120,
        disable=not console.is_terminal,
    )
    bars = _Bars(progress, runs)
    over = threading.Event()

    def watch() -> None:
        told = _damaged(runs)
        while True:
            last = over.wait(0.5)
            for run in runs:
                try:
                    news = run.look()
                except OSError:  # what can't be read now is looked at again; the launch tells it
                    continue
                if news is not None and (news != "finished" or not console.is_terminal):
                    count = f"{sum(run.ended for run in runs)}/{len(runs)}"
                    _tell(progress, f"{count} {run.label}: {news}")
            for aside in sorted(_damaged(runs) - told):
                told.add(aside)
                _tell(progress, _why(aside, runs))
            bars.update(last)
            if last:
                return

    thread = threading.Thread(target=watch, daemon=True)
    with progress:
        thread.start()
        try:
            yield progress
        finally:
            over.set()
            thread.join()


class _Bars:
    """One bar of all runs, and one of each that is worked on."""

    def __init__(self, progress: Progress, runs: Sequence[Shown]) -> None:
        self._progress, self._runs = progress, runs
        epochs, done = sum(run.epochs for run in runs), sum(run.done for run in runs)
        self._all = progress.add_task(_title(runs, []), total=epochs, completed=done)
        self._own: dict[Path, TaskID] = {}

    def update(self, last: bool) -> None:
        now = running(self._runs)
        self._progress.update(
            self._all,
            description=_title(self._runs, [] if last else now),
            completed=sum(run.done for run in self._runs),
        )
        shown = {} if last else {run.directory: run for run in now[:MOST]}
        for path in self._own.keys() - shown.keys():
            self._progress.remove_task(self._own.pop(path))
        for path, run in shown.items():
            if path not in self._own:
                self._own[path] = self._progress.add_task("", total=run.epochs, completed=run.done)
            text = describe_run(run)
            self._progress.update(self._own[path], description=text, completed=run.done)


def describe_run(run: Shown) -> str:
    """A run that is worked on, in words.

    Example:
        >>> describe_run(Shown("none, seed 1", Path("run"), epochs=40, done=3, loss=1.5))
        '  none, seed 1: epoch 3/40, loss 1.500'
    """
    return f"  {run.label}: {epoch_line(run.done, run.epochs, run.loss, run.validation, run.test)}"


def epoch_line(
    done: int, epochs: int, loss: float | None, validation: float | None, test: float | None
) -> str:
    """How far a run is, and what it scored, as far as that is known.

    Example:
        >>> epoch_line(3, 40, 1.5, 0.8125, None)
        'epoch 3/40, loss 1.500, validation 81.25 %'
    """
    text = f"epoch {done}/{epochs}"
    text += "" if loss is None else f", loss {loss:.3f}"
    text += "" if validation is None else f", validation {100 * validation:.2f} %"
    return text + ("" if test is None else f", test {100 * test:.2f} %")


def _title(runs: Sequence[Shown], now: Sequence[Shown]) -> str:
    text = f"{sum(run.ended for run in runs)} of {len(runs)} runs"
    return f"{text}, {len(now)} under way" if now else text


def _tell(progress: Progress, text: str) -> None:
    progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _damaged(runs: Sequence[Shown]) -> set[Path]:
    names = {run.directory.name for run in runs}
    return {
        path
        for parent in {run.directory.parent for run in runs}
        for path in parent.glob("*.damaged-*")
        if path.name.partition(".")[0] in names and (path / "damage.txt").exists()
    }


def _why(aside: Path, runs: Sequence[Shown]) -> str:
    name = aside.name.partition(".")[0]
    label = next(run.label for run in runs if run.directory.name == name)
    reason = (aside / "damage.txt").read_text(encoding="utf-8").strip()
    return f"damaged: {name}: {reason}; set aside as {aside}, run again ({label})"
