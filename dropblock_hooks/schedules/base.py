"""What all schedules share, and what holds of any rate: a number, a schedule or a function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

from ..checks import as_number
from ..quoting import described
from ..registry import brief, check_fields

UNSAID = (
    "it does not say its epochs: give it epochs=, or the length of the whole training "
    "(attach(..., epochs=90); of a callback epochs=, of the command --epochs)"
)


class Schedule:
    """Base of the schedules: a frozen dataclass that is called with the epoch.

    One of your own has fields, ``__call__`` (and ``span``, where the values have bounds), and
    ``@register`` above it.
    """

    calls_others: ClassVar[bool] = False
    """Whether it calls other schedules, whose errors are told as theirs."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_fields(cls)
        return super().__new__(cls)

    def __call__(self, t: float) -> float:
        """The value at time `t`."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(t)")

    def span(self) -> tuple[float, float]:
        """The smallest and the largest value it can take; unknown (-inf, inf) by default."""
        return -math.inf, math.inf

    @property
    def constant(self) -> bool:
        """Whether the value can never change."""
        low, high = self.span()
        return low == high

    @property
    def length(self) -> float | None:
        """For how many epochs it goes on changing; 0 where that is unknown, None if still unsaid.

        One that is unsaid follows ``attach(..., epochs=...)``, by `within`.
        """
        return 0.0

    def within(self, epochs: int) -> Schedule:
        """The schedule in a training of so many epochs, which it follows if its own are unsaid."""
        return self

    def __repr__(self) -> str:
        return brief(self)


def put(schedule: Any, name: str, value: Any) -> None:
    object.__setattr__(schedule, name, value)


def put_numbers(schedule: Any, *names: str) -> None:
    for name in names:
        put(schedule, name, as_number(name, getattr(schedule, name)))


def between(start: float, stop: float, share: float) -> float:
    if share >= 1.0:
        return stop
    way = stop - start
    value = start + way * share if math.isfinite(way) else start * (1 - share) + stop * share
    return min(max(value, min(start, stop)), max(start, stop))


def length_of(rate: Any) -> float | None:
    """For how many epochs a rate goes on changing; 0 if unknown, None if it does not say yet."""
    return rate.length if isinstance(rate, Schedule) else 0.0


def within(rate: Any, epochs: int) -> Any:
    """The rate in a training of so many epochs, which a schedule without `epochs` follows."""
    return rate.within(epochs) if isinstance(rate, Schedule) else rate


def value_at(rate: Any, t: float) -> float:
    """The number that a rate (a number, a schedule or a function) has at time `t`."""
    if not callable(rate):
        return float(rate)
    value = rate(t) if getattr(rate, "calls_others", False) else _called(rate, t)
    return as_number("the schedule's value", value)


def _called(schedule: Callable[[float], Any], t: float) -> Any:
    """What a schedule gives; TypeError or ValueError for all that it raises."""
    try:
        return schedule(t)
    except Exception as error:  # somebody's function may raise anything
        text = f"its schedule raised {described(error)}"
        if not _takes_time(schedule):
            text = f"a schedule is called with one number, the epoch: {error}"
        raise same_kind(error, text) from error


def _takes_time(schedule: Callable[[float], Any]) -> bool:
    try:
        inspect.signature(schedule).bind(0.0)
    except TypeError:
        return False
    except ValueError:  # it does not tell its signature
        return True
    return True


def same_kind(error: Exception, text: str) -> TypeError | ValueError:
    """An error of the kind of another one, with more text: TypeError, else ValueError."""
    return TypeError(text) if isinstance(error, TypeError) else ValueError(text)


def span_of(rate: Any) -> tuple[float, float]:
    """The smallest and largest value a rate can take; (-inf, inf) for a plain function."""
    if isinstance(rate, Schedule):
        return rate.span()
    return (-math.inf, math.inf) if callable(rate) else (float(rate), float(rate))


def is_moving(rate: Any) -> bool:
    """Whether the rate can change with time."""
    return not rate.constant if isinstance(rate, Schedule) else callable(rate)
