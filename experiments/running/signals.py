"""Being asked to stop: by a signal, by the launcher's stop file, or by the launcher's death.

A command that has no work yet, or no more, ends at once (`end_on_signals`). A launcher that gets
SIGTERM, SIGUSR1 (SLURM's warnings), SIGHUP (a closed terminal) or Ctrl-C leaves a file in the
study's directory; its workers, on whatever host, look for it once a second, write their
checkpoints, and end. The file bears the launch's name: one left behind stops nobody else.

Nothing here takes long to import: the commands begin with it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")


class Caught:
    """Which signal was caught first, if any."""

    number: int | None = None

    @property
    def exit_code(self) -> int | None:
        """130 for Ctrl-C, 75 ("try again later") for the others; None if there was none."""
        return None if self.number is None else _exit_code(self.number)


_active: Caught | None = None


def _exit_code(number: int) -> int:
    return 130 if number == signal.SIGINT else 75


def _signals() -> list[int]:
    """Those that ask to stop, but for SIGHUP where `nohup` has it ignored."""
    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    kept = getattr(signal, "SIGHUP", None)
    return [n for n in numbers if n != kept or signal.getsignal(n) is not signal.SIG_IGN]


def end_on_signals() -> None:
    """Have the signals that ask to stop end this command, with their exit status, until `caught`.

    For the first line of a command: its imports take seconds.
    """
    for number in _signals():
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    name, code = signal.Signals(number).name, _exit_code(number)
    os.write(2, f"stopped by {name}; start the same command again\n".encode())
    if _importing(frame):  # libraries have their own idea of what an exception in an import means
        os._exit(code)
    raise SystemExit(code)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def leave(code: int) -> NoReturn:
    """End this command; its work is done, and a signal that comes now changes nothing."""
    if threading.current_thread() is threading.main_thread():
        for number in _signals():
            signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


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
    former = {number: signal.signal(number, catch) for number in _signals()}
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

    Between runs it ignores Ctrl-C and SIGHUP, which a terminal sends to all its processes; and
    without its launcher it ends, once the run it has is stopped.
    """
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)

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
