"""Schedules over time: constant, linear, cosine, in steps, in a window; and over the layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..checks import NON_NEGATIVE, PROBABILITY, as_count, as_number
from ..quoting import quote
from ..registry import register
from . import base
from .base import UNSAID, Schedule, between, put_numbers


@register
class ConstantSchedule(Schedule):
    """The same value at all times; a bare number means this.

    Example:
        >>> ConstantSchedule(0.1)(5)
        0.1

    Args:
        value: the value, any finite number.
    """

    value: float

    def __post_init__(self) -> None:
        put_numbers(self, "value")

    def __call__(self, t: float) -> float:
        return self.value

    def span(self) -> tuple[float, float]:
        return self.value, self.value


@register
class LinearSchedule(Schedule):
    """Moves on a line from `start` in the first to `stop` in the last of `epochs` epochs.

    ``start + (stop - start) * clip((t - delay) / (epochs - 1), 0, 1)``; with ``epochs=1`` the value
    is `stop`. A rate that rises like this is the "scheduled DropBlock" of Ghiasi et al., 2018
    (https://arxiv.org/abs/1810.12890).

    Example:
        >>> [LinearSchedule(0.0, 0.2, epochs=5)(t) for t in (0, 2, 4, 9)]
        [0.0, 0.1, 0.2, 0.2]

    Args:
        start: value until `delay`, any finite number.
        stop: value from `delay` + `epochs` - 1 on, any finite number.
        epochs: number of epochs of the ramp, at least 1. None takes the length of the training,
            ``attach(..., epochs=90)``, less `delay`.
        delay: number of epochs before the ramp begins, at least 0.
    """

    start: float
    stop: float
    epochs: int | None = None
    delay: float = 0.0

    def __post_init__(self) -> None:
        put_numbers(self, "start", "stop")
        vars(self)["delay"] = as_number("delay", self.delay, allowed=NON_NEGATIVE)
        if self.epochs is not None:
            vars(self)["epochs"] = as_count("epochs", self.epochs)

    def __call__(self, t: float) -> float:
        if self.epochs is None:
            if t <= self.delay:
                return self.start
            raise ValueError(UNSAID)
        past, last = t - self.delay, self.epochs - 1
        share = past / last if last else float(past >= 0)
        return between(self.start, self.stop, self._way(min(max(share, 0.0), 1.0)))

    def _way(self, share: float) -> float:
        return share

    @property
    def length(self) -> float | None:
        return None if self.epochs is None else self.delay + self.epochs

    def within(self, epochs: int) -> Any:
        if self.epochs is not None:
            return self
        if self.delay >= epochs:
            raise ValueError(f"delay={self.delay:g} leaves nothing of {epochs} epochs of training")
        rest = epochs - math.ceil(self.delay)  # whole numbers: epochs may be very many
        return replace(self, epochs=rest or 1)

    def span(self) -> tuple[float, float]:
        return min(self.start, self.stop), max(self.start, self.stop)


@register
class CosineSchedule(LinearSchedule):
    """Moves from `start` to `stop` along half a cosine: slow at both ends, fast in the middle.

    Example:
        >>> round(CosineSchedule(0.0, 0.2, epochs=5)(1), 4)
        0.0293
    """

    def _way(self, share: float) -> float:
        return (1 - math.cos(math.pi * share)) / 2


@register
class StepSchedule(Schedule):
    """Changes the value at given times, and keeps it until the next one.

    Example:
        >>> schedule = StepSchedule({0: 0.0, 30: 0.1, 60: 0.2})
        >>> schedule(29.5), schedule(30), schedule(100)
        (0.0, 0.1, 0.2)

    Args:
        values: a mapping from times, at least 0, to values, any finite numbers. Time 0 is needed.
    """

    values: Mapping[float, float] | Iterable[tuple[float, float]]

    def __post_init__(self) -> None:
        try:
            pairs = self.values.items() if isinstance(self.values, Mapping) else self.values
            steps = sorted((as_number("time", t), as_number("value", v)) for t, v in pairs)
        except (TypeError, ValueError) as error:
            takes = "StepSchedule takes a mapping of time to value, such as {0: 0.0, 30: 0.1}"
            raise ValueError(f"{takes}, or pairs, got {quote(self.values)}: {error}") from error
        times = [t for t, _ in steps]
        if times[:1] != [0] or len(set(times)) < len(times):
            needs = "StepSchedule must begin with the value at time 0, and have no time twice"
            raise ValueError(f"{needs}, got times {quote(times)}")
        vars(self)["values"] = tuple(steps)  # schedules are hashable

    def __call__(self, t: float) -> float:
        steps = dict(self.values)
        return steps[max((time for time in steps if time <= t), default=0.0)]

    @property
    def length(self) -> float:
        last = max(dict(self.values))
        return last + 1 if last else 0.0

    def span(self) -> tuple[float, float]:
        values = dict(self.values).values()
        return min(values), max(values)

    def _stated(self) -> dict[str, Any]:
        return {"values": dict(self.values)}


@register
class WindowSchedule(Schedule):
    """`value` while ``begin <= t < end``, `outside` before and after: early or late dropout.

    Liu et al., 2023, "Dropout Reduces Underfitting" (https://arxiv.org/abs/2303.01500).

    Example:
        >>> early = WindowSchedule(0.1, begin=0, end=50)
        >>> early(49), early(50)
        (0.1, 0.0)

    Args:
        value: the value in the window, any finite number.
        begin: time at which the window begins, in epochs, before `end`.
        end: time at which the window ends, in epochs.
        outside: the value before and after, any finite number.
    """

    value: float
    begin: float
    end: float
    outside: float = 0.0

    def __post_init__(self) -> None:
        put_numbers(self, "value", "begin", "end", "outside")
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

    A single site gets `stop`. The linear decay rule of stochastic depth (Huang et al., 2016,
    https://arxiv.org/abs/1603.09382) is ``StochasticDepth(p=ByDepth(0.0, 0.2))``.

    Example:
        >>> [ByDepth(0.0, 0.2).at(i, 3)(0) for i in range(3)]
        [0.0, 0.1, 0.2]

    Args:
        start: value at the first site, any number or a schedule.
        stop: value at the last site, any number or a schedule.
        share: the place of a site between the ends, in [0, 1]; ``attach`` sets it.
    """

    start: float | Schedule | Callable[[float], float]
    stop: float | Schedule | Callable[[float], float]
    share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("start", "stop"):
            end = getattr(self, name)
            if isinstance(end, ByDepth):
                raise TypeError(f"{name} of ByDepth can't itself be a ByDepth")
            if not callable(end) or isinstance(end, type):
                vars(self)[name] = as_number(name, end, "a number or a schedule")
        vars(self)["share"] = as_number("share", self.share, allowed=PROBABILITY)

    def at(self, i: int, n: int) -> ByDepth:
        return replace(self, share=i / (n - 1) if n > 1 else 1.0)

    def __call__(self, t: float) -> float:
        return between(base.value_at(self.start, t), base.value_at(self.stop, t), self.share)

    @property
    def length(self) -> float | None:
        start, stop = base.length_of(self.start), base.length_of(self.stop)
        return None if start is None or stop is None else max(start, stop)

    def within(self, epochs: int) -> ByDepth:
        start, stop = base.within(self.start, epochs), base.within(self.stop, epochs)
        return replace(self, start=start, stop=stop)

    def span(self) -> tuple[float, float]:
        low, high = zip(base.span_of(self.start), base.span_of(self.stop), strict=True)
        return min(low), max(high)

    @property
    def constant(self) -> bool:
        return not base.is_moving(self.start) and not base.is_moving(self.stop)
