"""How every command begins and ends: signals, errors and bad input become exit statuses.

0: all went well; 1: something that was asked for failed; 2: bad input, told in one line; 130:
Ctrl-C; 75: another signal that asks to stop.

Nothing here takes long to import: the commands begin with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from experiments.files import reason
from experiments.running.signals import end_on_signals, leave

__all__ = ["begin", "called", "leave", "status"]


def begin() -> None:
    """Be ready for signals, before imports that take seconds; set what the libraries read."""
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # threads that spin starve when a core is busy
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which counts memory, talks much
    end_on_signals()


def called(function: Callable[..., int], description: str | None) -> int:
    """Call a function with the options of the command line; its exit status."""
    from jsonargparse import auto_cli

    return status(lambda: auto_cli(function, description=description, allow_abbrev=False))


def status(work: Callable[[], int]) -> int:
    """The exit status of work: what it returns, or what its error means; that is told in a line.

    Example:
        >>> status(lambda: 1), status(lambda: int("one"))
        (1, 2)
    """
    try:
        return work()
    except KeyboardInterrupt:
        print("interrupted; start the same command again", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        return 2
