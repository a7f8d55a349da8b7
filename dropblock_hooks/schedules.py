"""Schedules: pure functions from the epoch to a number, usable wherever a rate or bound is taken.

A schedule holds no state; time is the Attachment's ``epoch``, so a resume is ``step(epoch)``. The
unit of `t` is whatever the schedule was given in (epochs, usually; fractions are allowed). Any
plain function of one number is a schedule too; it can only not be written to a file.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from .checks import as_count, as_number
from .quoting import described, message_of, quote
from .registry import brief, check_fields, register

_MOST_STEPS = 10_000
UNSAID = (
    "it does not say its epochs: give it epochs=, or attach(..., epochs=) for the whole training"
)


class Schedule:
    """Base of the schedules: a frozen dataclass that is called with the epoch.

    One of your own has fields, ``__call__`` (and ``span``, where the values have bounds), and
    ``@register`` above it.
    """

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


def _set(schedule: Any, name: str, value: Any) -> None:
    object.__setattr__(schedule, name, value)


def _set_numbers(schedule: Any, *names: str) -> None:
    for name in names:
        _set(schedule, name, as_number(name, getattr(schedule, name)))


def _between(start: float, stop: float, share: float) -> float:
    if share >= 1.0:
        return stop
    way = stop - start
    value = start + way * share if math.isfinite(way) else start * (1 - share) + stop * share
    return min(max(value, min(start, stop)), max(start, stop))


@register
class ConstantSchedule(Schedule):
    """The same value at all times; a bare number means this.

    Example:
        >>> ConstantSchedule(0.1)(5)
        0.1
    """

    value: float

    def __post_init__(self) -> None:
        _set_numbers(self, "value")

    def __call__(self, t: float) -> float:
        return self.value

    def span(self) -> tuple[float, float]:
        return self.value, self.value


@dataclass(frozen=True, repr=False)
class _Ramp:
    """What LinearSchedule and CosineSchedule share: all but the way between the ends."""

    start: float
    stop: float
    epochs: int | None = None
    delay: float = 0.0

    def __post_init__(self) -> None:
        _set_numbers(self, "start", "stop", "delay")
        if self.epochs is not None:
            _set(self, "epochs", as_count("epochs", self.epochs))
        if self.delay < 0:
            raise ValueError(f"delay must be >= 0, got {self.delay}")

    def __call__(self, t: float) -> float:
        if self.epochs is None:
            if t <= self.delay:
                return self.start
            raise ValueError(UNSAID)
        begun = float(t >= self.delay)
        share = (t - self.delay) / (self.epochs - 1) if self.epochs > 1 else begun
        return _between(self.start, self.stop, self._way(min(max(share, 0.0), 1.0)))

    @property
    def length(self) -> float | None:
        return None if self.epochs is None else self.delay + self.epochs

    def within(self, epochs: int) -> Any:
        if self.epochs is not None:
            return self
        if self.delay >= epochs:
            raise ValueError(f"delay={self.delay:g} leaves nothing of {epochs} epochs of training")
        return replace(self, epochs=math.floor(epochs - self.delay) or 1)

    def _way(self, share: float) -> float:
        """How far the value has come when this share of the time is over."""
        return share

    def span(self) -> tuple[float, float]:
        return min(self.start, self.stop), max(self.start, self.stop)


@register
class LinearSchedule(_Ramp, Schedule):
    """`start` in the first and `stop` in the last of `epochs` epochs, on a line between them.

    ``start + (stop - start) * clip((t - delay) / (epochs - 1), 0, 1)``, as ``linspace`` has it;
    with ``epochs=1`` the value is `stop`. A rate that rises like this is the "scheduled DropBlock"
    of Ghiasi et al., 2018 (https://arxiv.org/abs/1810.12890).

    Example:
        >>> [LinearSchedule(0.0, 0.2, epochs=5)(t) for t in (0, 2, 4, 9)]
        [0.0, 0.1, 0.2, 0.2]

    Args:
        start: value until `delay`.
        stop: value from `delay` + `epochs` - 1 on.
        epochs: number of epochs of the ramp, at least 1; without it those of the training, less
            `delay`, as ``attach(..., epochs=90)`` says them.
        delay: epochs before the ramp begins.

    Raises:
        ValueError: for ``epochs`` below 1 or a negative `delay`.
    """


@register
class CosineSchedule(_Ramp, Schedule):
    """From `start` to `stop` along half a cosine: slow at both ends, fast in the middle.

    Example:
        >>> round(CosineSchedule(0.0, 0.2, epochs=5)(1), 4)
        0.0293

    Its arguments are those of `LinearSchedule`.
    """

    def _way(self, share: float) -> float:
        return (1 - math.cos(math.pi * share)) / 2


@register
class StepSchedule(Schedule):
    """The value of the latest of the given times that has come.

    Example:
        >>> schedule = StepSchedule({0: 0.0, 30: 0.1, 60: 0.2})
        >>> schedule(29.5), schedule(30), schedule(100)
        (0.0, 0.1, 0.2)

    Args:
        values: time to value; must say the value at time 0.
    """

    values: Mapping[float, float]

    def __post_init__(self) -> None:
        try:
            pairs = self.values.items() if isinstance(self.values, Mapping) else self.values
            steps = [
                (as_number("time", t), as_number("value", v))
                for t, v in itertools.islice(pairs, _MOST_STEPS + 1)
            ]
        except (TypeError, ValueError) as error:
            raise ValueError(
                "StepSchedule takes a mapping of time to value, such as {0: 0.0, 30: 0.1}, "
                f"got {quote(self.values)}: {error}"
            ) from error
        if len(steps) > _MOST_STEPS:
            raise ValueError(f"StepSchedule takes at most {_MOST_STEPS} times")
        steps.sort()
        times = [t for t, _ in steps]
        if not times or times[0] != 0:
            got = quote(times)
            raise ValueError(f"StepSchedule must begin with the value at time 0, got times {got}")
        if len(set(times)) < len(times):
            raise ValueError(f"StepSchedule has a time twice: {quote(times)}")
        _set(self, "values", _Steps(tuple(steps)))

    def __call__(self, t: float) -> float:
        come = [value for time, value in self.values.items() if time <= t]
        return come[-1] if come else self.values[0.0]

    @property
    def length(self) -> float:
        last = max(self.values)
        return last + 1 if last else 0.0

    def span(self) -> tuple[float, float]:
        return min(self.values.values()), max(self.values.values())


class _Steps(Mapping[float, float]):
    """The mapping of a StepSchedule: hashable and unchangeable, as schedules are."""

    def __init__(self, pairs: tuple[tuple[float, float], ...]) -> None:
        self._pairs = pairs

    def __getitem__(self, time: float) -> float:
        return dict(self._pairs)[time]

    def __iter__(self) -> Iterator[float]:
        return (time for time, _ in self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __repr__(self) -> str:
        return repr(dict(self._pairs))


@register
class WindowSchedule(Schedule):
    """`value` while ``begin <= t < end``, `outside` before and after: early or late dropout.

    Liu et al., 2023, "Dropout Reduces Underfitting" (https://arxiv.org/abs/2303.01500).

    Example:
        >>> early = WindowSchedule(0.1, begin=0, end=50)
        >>> early(49), early(50)
        (0.1, 0.0)
    """

    value: float
    begin: float
    end: float
    outside: float = 0.0

    def __post_init__(self) -> None:
        _set_numbers(self, "value", "begin", "end", "outside")
        if self.begin >= self.end:
            raise ValueError(f"begin must be before end, got begin={self.begin}, end={self.end}")

    def __call__(self, t: float) -> float:
        return self.value if self.begin <= t < self.end else self.outside

    @property
    def length(self) -> float:
        return self.end

    def span(self) -> tuple[float, float]:
        return min(self.value, self.outside), max(self.value, self.outside)


@register
class ByDepth(Schedule):
    """Spreads a rate over the sites of its spec entry, in model order: `start` first, `stop` last.

    The ends may be schedules. ``attach`` gives each site its `share` of the way; a single site gets
    `stop`. The linear decay rule of stochastic depth (Huang et al., 2016,
    https://arxiv.org/abs/1603.09382) is ``StochasticDepth(p=ByDepth(0.0, 0.2))``.

    Example:
        >>> [ByDepth(0.0, 0.2).at(i, 3)(0) for i in range(3)]
        [0.0, 0.1, 0.2]
    """

    start: float | Schedule | Callable[[float], float]
    stop: float | Schedule | Callable[[float], float]
    share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("start", "stop"):
            end = getattr(self, name)
            if isinstance(end, ByDepth):
                raise TypeError(f"{name} of ByDepth can't itself be a ByDepth")
            is_schedule = callable(end) and not isinstance(end, type)
            _set(self, name, end if is_schedule else as_number(name, end, "a number or a schedule"))
        _set_numbers(self, "share")
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be in [0, 1], got {self.share}")

    def at(self, i: int, n: int) -> ByDepth:
        """The schedule of site `i` of `n`."""
        return replace(self, share=i / (n - 1) if n > 1 else 1.0)

    def __call__(self, t: float) -> float:
        return _between(value_at(self.start, t), value_at(self.stop, t), self.share)

    @property
    def length(self) -> float | None:
        ends = [length_of(self.start), length_of(self.stop)]
        known = [end for end in ends if end is not None]
        return max(known) if len(known) == 2 else None

    def within(self, epochs: int) -> ByDepth:
        ends = {name: within(getattr(self, name), epochs) for name in ("start", "stop")}
        return replace(self, **ends) if self.length is None else self

    def span(self) -> tuple[float, float]:
        low, high = zip(span_of(self.start), span_of(self.stop), strict=True)
        return min(low), max(high)

    @property
    def constant(self) -> bool:
        return not is_moving(self.start) and not is_moving(self.stop)


def spread_rate(rate: Any, i: int, n: int) -> Any:
    """The rate of site `i` of `n`: its own share of a `ByDepth`, the same for all otherwise."""
    return rate.at(i, n) if isinstance(rate, ByDepth) else rate


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
    value = rate(t) if isinstance(rate, ByDepth) else _called(rate, t)  # its ends are called so
    return as_number("the schedule's value", value)


def _called(schedule: Callable[[float], Any], t: float) -> Any:
    """What a schedule gives; TypeError or ValueError for all that it raises."""
    try:
        return schedule(t)
    except Exception as error:  # somebody's function may raise anything
        text = f"its schedule raised {described(error)}"
        if not _takes_time(schedule):
            text = f"a schedule is called with one number, the epoch: {message_of(error)}"
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
