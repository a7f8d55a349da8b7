"""A clock for a model whose hooks are part of compiled code, which counts without Python.

A `ModelHook` starts it if there is a `Watchdog`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from typing import Any

from torch import nn


class Ticker:
    """Calls a function at some backwards of a model, and no Python in the others.

    Compiled code can't call Python, so another clock must say when a `Watchdog` is due. torch
    calls a hook of a parameter in each backward, outside of the compiled code. That hook is
    ``next`` on an iterator of Python's standard library, which only counts.

    Args:
        model: the first trained parameter of the model gets the hook.
        wait: returns in how many backwards the function is due, at least 1.
        due: the function to call.
        leave_out: how many of the next backwards do not count, at least 0.
    """

    def __init__(
        self,
        model: nn.Module,
        wait: Callable[[], int],
        due: Callable[[], None],
        leave_out: int = 0,
    ) -> None:
        self._handle: Any = None
        trained = (p for p in model.parameters() if p.requires_grad and p.is_leaf)
        parameter = next(trained, None)
        if parameter is None:
            return

        countdown = chain.from_iterable(_countdowns(wait, due, leave_out))
        hook = partial(next, countdown)
        self._handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's

    def stop(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _countdowns(
    wait: Callable[[], int], due: Callable[[], None], leave_out: int
) -> Iterator[Iterator[None]]:
    """Yield iterators of None. When one of them ends, the function is due."""
    yield repeat(None, leave_out + wait() - 1)
    while True:
        due()
        yield repeat(None, wait())
