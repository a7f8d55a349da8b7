"""Being asked to stop: by a signal, by the launcher's stop file, or by the launcher's death.

A launcher that gets SIGTERM, SIGUSR1 (SLURM's warnings) or Ctrl-C leaves a file in the study's
directory; its workers, on whatever host, look for it once a second, write their checkpoints, and
end. The file bears the launch's name: one left behind stops nobody else.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
)


class Caught:
    """Which signal was caught first, if any."""

    number: int | None = None

    @property
    def exit_code(self) -> int | None:
        """130 for Ctrl-C, 75 ("try again later") for the others; None if there was none."""
        if self.number is None:
            return None
        return 130 if self.number == signal.SIGINT else 75


_active: Caught | None = None


@contextmanager
def caught(stop_file: Path | None = None) -> Iterator[Caught]:
    """Catch the signals that ask to stop; a second Ctrl-C is a KeyboardInterrupt.

    Args:
        stop_file: made when one comes.
    """
    global _active
    if _active is not None:  # a worker that is its own launcher
        yield _active
        return
    found = Caught()

    def catch(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and found.number is not None:
            raise KeyboardInterrupt
        found.number = found.number or number
        if stop_file is not None:
            touch(stop_file)

    if threading.current_thread() is not threading.main_thread():
        yield found  # only there can signals be caught
        return
    former = {number: signal.signal(number, catch) for number in _SIGNALS}
    _active = found
    try:
        yield found
    finally:
        _active = None
        for number, handler in former.items():
            signal.signal(number, handler)


def touch(path: Path) -> None:
    """Make the file if that is possible."""
    with suppress(OSError):  # or else the workers see that their launcher is gone
        path.touch()


def serve(launcher: int) -> None:
    """Prepare a worker that is a child of its launcher.

    Between runs it ignores Ctrl-C, which a terminal sends to all its processes; and without its
    launcher it ends, once the run it has is stopped.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == launcher or _active is not None:
            time.sleep(1)
        os._exit(1)  # at once: to tell the launcher would fail

    threading.Thread(target=watch, daemon=True).start()


@dataclass
class Watch:
    """Whether a run is to stop; asked between batches.

    Args:
        caught: signals of this process.
        stop_file: of the launch.
        parent: process id of the launcher if this is a child of it; None if it is none.
    """

    caught: Caught
    stop_file: Path | None = None
    parent: int | None = None
    _next: float = field(default=0.0, init=False)
    _asked: bool = field(default=False, init=False)

    def __call__(self) -> bool:
        if self.caught.number is not None:
            return True
        now = time.monotonic()
        if now >= self._next and not self._asked:
            self._next = now + 1
            orphaned = self.parent is not None and os.getppid() != self.parent
            self._asked = orphaned or (self.stop_file is not None and self.stop_file.exists())
        return self._asked
