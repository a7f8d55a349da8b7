"""`Schedule`, and the same for any rate: a number, a schedule or a function of the epoch."""

from __future__ import annotations

import math
from typing import Any, Self

from ..checks import as_number
from ..quoting import described
from ..registry import brief, check_fields

UNSAID = (
    "it does not say its epochs: give it epochs=, or the length of the whole training "
    "(epochs=90 of attach, plan or a callback; --epochs 90 of the command)"
)


class Schedule:
    """Base of the schedules: a frozen dataclass that is called with the epoch.

    A schedule of your own has fields, ``__call__``, and ``@register`` above it. With `span`, its
    values are checked before training.

    Example:
        >>> from dropblock_hooks import register
        >>> @register
        ... class Halving(Schedule):
        ...     start: float
        ...
        ...     def __call__(self, t):
        ...         return self.start / 2**t
        >>> Halving(0.4)(2)
        0.1
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_fields(cls)
        return super().__new__(cls)

    def __call__(self, t: float) -> float:
        raise NotImplementedError(f"{type(self).__name__} must define __call__(t)")

    def span(self) -> tuple[float, float]:
        """The smallest and the largest value; (-inf, inf) if unknown, which is the default."""
        return -math.inf, math.inf

    @property
    def constant(self) -> bool:
        """Whether the value can never change."""
        low, high = self.span()
        return low == high

    @property
    def length(self) -> float | None:
        """The epoch after which the value stays the same; 0 if unknown, None if not yet given."""
        return 0.0

    def within(self, epochs: int) -> Schedule:
        """The schedule in a training of so many epochs, which are its own if it has none."""
        return self

    def at(self, i: int, n: int) -> Schedule:
        """The schedule of site `i` of `n` sites; only `ByDepth` differs between them."""
        return self

    def __repr__(self) -> str:
        return brief(self)


def put_numbers(schedule: Any, *names: str) -> None:
    vars(schedule).update((name, as_number(name, getattr(schedule, name))) for name in names)


def between(start: float, stop: float, share: float) -> float:
    """The value at a share of the way; exactly `stop` at its end."""
    if share >= 1.0:
        return stop
    value = start + (stop - start) * share
    return min(max(value, min(start, stop)), max(start, stop))


def length_of(rate: Any) -> float | None:
    return rate.length if isinstance(rate, Schedule) else 0.0


def within(rate: Any, epochs: int) -> Any:
    return rate.within(epochs) if isinstance(rate, Schedule) else rate


def spread_rate(rate: Any, i: int, n: int) -> Any:
    return rate.at(i, n) if isinstance(rate, Schedule) else rate


def is_moving(rate: Any) -> bool:
    return not rate.constant if isinstance(rate, Schedule) else callable(rate)


def span_of(rate: Any) -> tuple[float, float]:
    if isinstance(rate, Schedule):
        return rate.span()
    return (-math.inf, math.inf) if callable(rate) else (float(rate), float(rate))


def value_at(rate: Any, t: float) -> float:
    """The number of a rate at time `t`; an error if it is not finite, or the function fails."""
    if not callable(rate):
        return float(rate)
    try:
        value = rate(t)
    except Exception as error:
        called = "its schedule, which is called with the epoch, raised"
        raise same_kind(error, f"{called} {described(error)}") from error
    return as_number("the schedule's value", value)


def same_kind(error: Exception, text: str) -> TypeError | ValueError:
    return TypeError(text) if isinstance(error, TypeError) else ValueError(text)
