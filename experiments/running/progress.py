"""What a launch shows while it works, read from the run directories, where all hosts write."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.running.directories import read_error, read_mapping


@dataclass
class Shown:
    """One run as the progress knows it.

    Args:
        label: condition and seed.
        directory: of the run.
        epochs: that it takes.
        failure: `id` of a failure that is known and tried again.
        done: epochs that are finished.
        ended: whether the run is.
    """

    label: str
    directory: Path
    epochs: int
    failure: str | None = None
    done: int = 0
    ended: bool = False
    _size: int = -1

    def look(self) -> str | None:
        """Count the epochs; what there is to tell, if the run has ended."""
        if self.ended:
            return None
        if (self.directory / "done.json").exists():
            self.ended, self.done = True, self.epochs
            status = read_mapping(self.directory / "result.json").get("status")
            return "finished" if status == "finished" else "diverged: its loss was not finite"
        error = read_error(self.directory)
        if error is not None and error.get("id") != self.failure:
            self.ended = True
            return f"failed: {error.get('type')}: {error.get('message')}"
        self._count()
        return None

    def _count(self) -> None:
        try:
            path = self.directory / "metrics.jsonl"
            if (size := path.stat().st_size) != self._size:
                self._size = size
                self.done = min(path.read_bytes().count(b"\n"), self.epochs)
        except OSError:
            self.done = 0  # not begun, or set aside


@contextmanager
def shown(runs: Sequence[Shown], console: Console | None = None) -> Iterator[Progress]:
    """Show a bar on standard error: runs that have ended, and the time left."""
    console = console or Console(stderr=True)
    for run in runs:
        run.look()
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        speed_estimate_period=120,
        disable=not console.is_terminal,
    )
    epochs = sum(run.epochs for run in runs)
    task = progress.add_task(_title(runs), total=epochs, completed=sum(run.done for run in runs))
    over = threading.Event()

    def watch() -> None:
        told = _damaged(runs)
        while True:
            last = over.wait(0.5)
            for run in runs:
                news = run.look()
                if news is not None and (news != "finished" or not console.is_terminal):
                    count = f"{sum(run.ended for run in runs)}/{len(runs)}"
                    progress.console.print(
                        f"{count} {run.label}: {news}",
                        markup=False,
                        highlight=False,
                        soft_wrap=True,
                    )
            for aside in sorted(_damaged(runs) - told):
                told.add(aside)
                progress.console.print(_why(aside), markup=False, highlight=False, soft_wrap=True)
            progress.update(task, description=_title(runs), completed=sum(r.done for r in runs))
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


def _title(runs: Sequence[Shown]) -> str:
    return f"{sum(run.ended for run in runs)} of {len(runs)} runs"


def _damaged(runs: Sequence[Shown]) -> set[Path]:
    names = {run.directory.name for run in runs}
    return {
        path
        for parent in {run.directory.parent for run in runs}
        for path in parent.glob("*.damaged-*")
        if path.name.partition(".")[0] in names and (path / "damage.txt").exists()
    }


def _why(aside: Path) -> str:
    reason = (aside / "damage.txt").read_text(encoding="utf-8").strip()
    return f"damaged: {aside.name.partition('.')[0]}: {reason}; set aside as {aside}, run again"
