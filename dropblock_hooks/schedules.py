"""Schedules: pure functions from the epoch to a number, accepted for each rate and bound.

A schedule holds no state: the Attachment holds the time, usually in epochs. Any function of the
time is a schedule, too, but can't be written to a file.

``attach`` fits the schedules to the layers and to the length of the training. `Attachment.step`
evaluates them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeAlias

from .checks import NON_NEGATIVE, PROBABILITY, as_count, as_number, check_arguments
from .pickling import set_state, state_of
from .quoting import described, quote
from .registry import brief, check_fields, register, store

Span: TypeAlias = tuple[float, float]
"""The smallest and the largest value."""

UNKNOWN: Span = (-math.inf, math.inf)

NO_LENGTH = (
    "the schedule has no length: pass epochs= to it, or the length of the whole training "
    "(epochs=90 of attach, plan or a callback; --epochs 90 of the command). If a trainer knows "
    "only the number of its steps, pass unit='step' to the callback"
)


class Schedule:
    """Base of the schedules: a frozen dataclass that is called with the epoch.

    A schedule of your own has fields, ``__call__``, and ``@register`` above it. With `span`, its
    values are checked before training.

    Example:
        >>> @register
        ... class Halving(Schedule):
        ...     start: float
        ...     def __call__(self, t):
        ...         return self.start / 2**t
        >>> Halving(0.4)(2)
        0.1
    """

    length: ClassVar[float | None] = 0.0
    """The number of epochs that a training needs to reach the end of the schedule.

    `attach` and `Attachment.set` warn if the training is shorter. It is 0 if the schedule has no
    end, as a wave, or if none is known. It is None if the schedule takes the length of the
    training, until `at` sets it.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_fields(cls, Schedule)
        check_arguments(cls, args, kwargs, annotation="float")
        return super().__new__(cls)

    def __getstate__(self) -> dict[str, Any]:
        return state_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        set_state(self, state)

    def __call__(self, t: float) -> float:
        raise NotImplementedError(f"{type(self).__name__} must define __call__(t)")

    def span(self) -> Span:
        """Return the smallest and the largest value; (-inf, inf) if unknown, the default."""
        return UNKNOWN

    def span_here(self) -> Span:
        """Return the smallest and the largest value at one site, for which `at` has made it."""
        return self.span()

    def moves(self) -> bool:
        """Return whether the value changes, or may change, with the epoch."""
        low, high = self.span()
        return low != high

    def scaled(self, factor: float) -> Schedule:
        """Return a schedule with the values of this schedule times a factor.

        A class of your own may define it, for the presets that scale rates.

        Raises:
            TypeError: if the class does not define it.
        """
        raise TypeError(f"{type(self).__name__} can't be scaled: define scaled(factor) in it")

    def at(self, i: int, n: int, epochs: int | None = None) -> Schedule:
        """Return the schedule of site `i` of `n`, in a training of so many epochs if known."""
        return self

    def without_epochs(self, epochs: int | None) -> Schedule:
        """Return the schedule with epochs=None if its `epochs` are those that `at` would give.

        A state is compared without these epochs, so that a longer training can load it.
        """
        return self

    def __repr__(self) -> str:
        return brief(self)


def length_of(rate: Any) -> float | None:
    """Return `Schedule.length` of a rate; 0 for a number or a function."""
    if isinstance(rate, Schedule):
        return rate.length
    return 0.0


def spread_rate(rate: Any, i: int, n: int, epochs: int | None) -> Any:
    """Return `Schedule.at` of a rate; a number or a function is the same at all sites."""
    if isinstance(rate, Schedule):
        return rate.at(i, n, epochs)
    return rate


def without_epochs(rate: Any, epochs: int | None) -> Any:
    """Return `Schedule.without_epochs` of a rate; a number or a function is returned unchanged."""
    if isinstance(rate, Schedule):
        return rate.without_epochs(epochs)
    return rate


def scaled(rate: Any, factor: float) -> Any:
    """Return a rate times a factor.

    Raises:
        TypeError: if the rate is a function, or a schedule that does not define `scaled`.
    """
    if isinstance(rate, Schedule):
        return rate.scaled(factor)
    number = as_number("p", rate, "a number or a schedule of this package")
    return number * factor


def rates_at_depth(rates: Mapping[str, Any], epochs: int | None, i: int, n: int) -> dict[str, Any]:
    """Return the rates of site `i` of `n` sites, in the order of the model.

    A `ByDepth` becomes the rate at this depth. A schedule without epochs gets those of the
    training.

    Raises:
        ValueError: if a schedule needs the length of the training, but there are no `epochs`.
    """
    fitted = {}
    for name, rate in rates.items():
        needs_epochs = length_of(rate) is None
        if needs_epochs and epochs is None:
            raise ValueError(f"{name}: {NO_LENGTH}")
        fitted[name] = spread_rate(rate, i, n, epochs)
    return fitted


def longer_than(epochs: int, rates: Mapping[str, Any]) -> list[str]:
    """Return a warning for each rate whose schedule is longer than the training."""
    warnings = []
    for rate in rates.values():
        length = length_of(rate) or 0
        if length > epochs:
            numbers = f"takes {length:g} epochs, and the training has {epochs}"
            warnings.append(f"{quote(rate)} {numbers}: it does not reach its end")
    return warnings


def span_of(rate: Any) -> Span:
    """Return the smallest and the largest value of a rate; `UNKNOWN` for a function."""
    if isinstance(rate, Schedule):
        return rate.span()
    if callable(rate):
        return UNKNOWN
    value = float(rate)
    return value, value


def span_here(rate: Any) -> Span:
    """Return `Schedule.span_here` of a rate; `UNKNOWN` for a function."""
    if isinstance(rate, Schedule):
        return rate.span_here()
    return span_of(rate)


def value_at(rate: Any, t: float) -> float:
    """Return the number of a rate at time `t`.

    Raises:
        TypeError: if a function returns no number, or fails with a TypeError.
        ValueError: if the number is not finite, or a function fails with another error.
    """
    if not callable(rate):
        return float(rate)
    try:
        value = rate(t)
    except Exception as error:
        message = f"its schedule, which is called with the epoch, raised {described(error)}"
        raise same_kind(error, message) from error
    return as_number("the schedule's value", value)


def same_kind(error: Exception, text: str) -> TypeError | ValueError:
    """Return an error with another text: a TypeError for a TypeError, else a ValueError."""
    if isinstance(error, TypeError):
        return TypeError(text)
    return ValueError(text)


def between(start: float, stop: float, share: float) -> float:
    """Return the value at this share of the way from `start` to `stop`, never outside of both."""
    if share >= 1.0:
        return stop  # exactly, because the sum below may round
    value = start + (stop - start) * share
    low = min(start, stop)
    high = max(start, stop)
    return min(max(value, low), high)


def _set_numbers(schedule: Schedule, *names: str) -> None:
    """Replace the fields with these names by finite floats, or raise an error."""
    for name in names:
        number = as_number(name, getattr(schedule, name))
        store(schedule, **{name: number})


@register
class ConstantSchedule(Schedule):
    """Has the same value at all times. A number in place of a schedule means this.

    Example:
        >>> ConstantSchedule(0.1)(5)
        0.1

    Args:
        value: the value, any finite number.

    Raises:
        TypeError: if `value` is no number.
        ValueError: if `value` is not finite.
    """

    value: float

    def __post_init__(self) -> None:
        _set_numbers(self, "value")

    def __call__(self, t: float) -> float:
        return self.value

    def span(self) -> Span:
        return self.value, self.value

    def scaled(self, factor: float) -> Schedule:
        return replace(self, value=self.value * factor)


@register
class LinearSchedule(Schedule):
    """Moves on a line from `start` in the first to `stop` in the last of `epochs` epochs.

    ``start + (stop - start) * clip((t - delay) / (epochs - 1), 0, 1)``; with ``epochs=1`` the value
    is `stop` from `delay` on. Ghiasi et al., 2018, schedule DropBlock like this
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

    Raises:
        TypeError: if a number other than `epochs` has a wrong type.
        ValueError: if a value is not allowed; in a training, if `delay` leaves no epochs.
    """

    start: float
    stop: float
    epochs: int | None = None
    delay: float = 0.0

    def __post_init__(self) -> None:
        _set_numbers(self, "start", "stop")
        delay = as_number("delay", self.delay, allowed=NON_NEGATIVE)
        store(self, delay=delay)
        if self.epochs is not None:
            epochs = as_count("epochs", self.epochs)
            store(self, epochs=epochs)

    @property
    def length(self) -> float | None:  # type: ignore[override]  # differs between objects
        if self.epochs is None:
            return None
        return self.delay + self.epochs

    def __call__(self, t: float) -> float:
        if self.epochs is None:
            if t <= self.delay:
                return self.start
            raise ValueError(NO_LENGTH)

        elapsed = t - self.delay
        last = self.epochs - 1
        share = elapsed / last if last else float(elapsed >= 0)
        clipped = min(max(share, 0.0), 1.0)
        return between(self.start, self.stop, self._shape(clipped))

    def _shape(self, share: float) -> float:
        """Return the share of the change after this share of the time, both in [0, 1]."""
        return share

    def at(self, i: int, n: int, epochs: int | None = None) -> Schedule:
        if self.epochs is not None or epochs is None:
            return self

        if self.delay >= epochs:
            raise ValueError(f"delay={self.delay:g} leaves nothing of {epochs} epochs of training")
        return replace(self, epochs=self._rest_of(epochs))

    def without_epochs(self, epochs: int | None) -> Schedule:
        if epochs is None or self.epochs != self._rest_of(epochs):
            return self
        return replace(self, epochs=None)

    def _rest_of(self, epochs: int) -> int:
        """Return the length of the ramp in a training of so many epochs."""
        # computes with integers, because a float rounds large numbers
        rest = epochs - math.ceil(self.delay)
        return rest or 1  # 1 epoch with a delay of half an epoch leaves 0

    def span(self) -> Span:
        low = min(self.start, self.stop)
        high = max(self.start, self.stop)
        return low, high

    def scaled(self, factor: float) -> Schedule:
        start = self.start * factor
        stop = self.stop * factor
        return replace(self, start=start, stop=stop)


@register
class CosineSchedule(LinearSchedule):
    """Moves from `start` to `stop` along half a cosine: slow at both ends, fast in the middle.

    Example:
        >>> round(CosineSchedule(0.0, 0.2, epochs=5)(1), 4)
        0.0293

    Args:
        start: value until `delay`, any finite number.
        stop: value from `delay` + `epochs` - 1 on, any finite number.
        epochs: number of epochs of the ramp, at least 1. None takes the length of the training,
            ``attach(..., epochs=90)``, less `delay`.
        delay: number of epochs before the ramp begins, at least 0.

    Raises:
        TypeError: if a number other than `epochs` has a wrong type.
        ValueError: if a value is not allowed; in a training, if `delay` leaves no epochs.
    """

    def _shape(self, share: float) -> float:
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

    Raises:
        ValueError: if `values` is not such a mapping, or has a time twice.
    """

    values: Mapping[float, float] | Iterable[tuple[float, float]]

    def __post_init__(self) -> None:
        rule = "StepSchedule takes a mapping of time to value that begins at time 0"
        try:
            steps = self._steps()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{rule}, got {quote(self.values)}: {error}") from error

        times = [time for time, _ in steps]
        starts_at_0 = times[:1] == [0]
        is_twice = len(set(times)) < len(times)
        if is_twice or not starts_at_0:
            raise ValueError(f"{rule} and has no time twice, got {quote(self.values)}")

        store(self, values=tuple(steps))  # a tuple can be hashed

    def _steps(self) -> list[tuple[float, float]]:
        """Return the times and values as finite numbers, by time."""
        pairs = self.values
        if isinstance(pairs, Mapping):
            pairs = pairs.items()

        steps = []
        for time, value in pairs:
            step = as_number("time", time), as_number("value", value)
            steps.append(step)
        return sorted(steps)

    @property
    def length(self) -> float:  # type: ignore[override]  # differs between objects
        last = max(dict(self.values))
        if last == 0:
            return 0.0
        return last + 1  # the last value lasts for an epoch, too

    def __call__(self, t: float) -> float:
        steps = dict(self.values)
        begun = [time for time in steps if time <= t]
        last = max(begun, default=0.0)
        return steps[last]

    def span(self) -> Span:
        values = dict(self.values).values()
        return min(values), max(values)

    def scaled(self, factor: float) -> Schedule:
        values = {}
        for time, value in dict(self.values).items():
            values[time] = value * factor
        return StepSchedule(values)

    def _stated(self) -> dict[str, Any]:
        """Return the fields as the user writes them; `registry.stated_fields` calls it."""
        return {"values": dict(self.values)}


@register
class WindowSchedule(Schedule):
    """Has the value `value` while ``begin <= t < end``, and `outside` before and after.

    Early and late dropout are such schedules (Liu et al., 2023, "Dropout Reduces Underfitting",
    https://arxiv.org/abs/2303.01500).

    Example:
        >>> early = WindowSchedule(0.1, begin=0, end=50)
        >>> early(49), early(50)
        (0.1, 0.0)

    Args:
        value: the value in the window, any finite number.
        begin: time at which the window begins, in epochs, before `end`.
        end: time at which the window ends, in epochs.
        outside: the value before and after, any finite number.

    Raises:
        TypeError: if a number has a wrong type.
        ValueError: if a number is not finite, or `begin` is not before `end`.
    """

    value: float
    begin: float
    end: float
    outside: float = 0.0

    def __post_init__(self) -> None:
        _set_numbers(self, "value", "begin", "end", "outside")
        if self.begin >= self.end:
            raise ValueError(f"begin must be before end, got begin={self.begin}, end={self.end}")

    @property
    def length(self) -> float:  # type: ignore[override]  # differs between objects
        return self.end

    def __call__(self, t: float) -> float:
        is_within = self.begin <= t < self.end
        return self.value if is_within else self.outside

    def span(self) -> Span:
        low = min(self.value, self.outside)
        high = max(self.value, self.outside)
        return low, high

    def scaled(self, factor: float) -> Schedule:
        value = self.value * factor
        outside = self.outside * factor
        return replace(self, value=value, outside=outside)


@register
class ByDepth(Schedule):
    """Spreads a rate over the sites of its spec entry, in model order: `start` first, `stop` last.

    A single site gets `stop`. ``StochasticDepth(p=ByDepth(0.0, 0.2))`` is the linear decay rule of
    stochastic depth (Huang et al., 2016, https://arxiv.org/abs/1603.09382).

    Example:
        >>> [ByDepth(0.0, 0.2).at(i, 3)(0) for i in range(3)]
        [0.0, 0.1, 0.2]

    Args:
        start: value at the first site, any number or a schedule.
        stop: value at the last site, any number or a schedule.
        share: the place of a site between the ends, in [0, 1]; ``attach`` sets it.

    Raises:
        TypeError: if an end is not a number or a schedule.
        ValueError: if an end is a `ByDepth`, or a number is outside its range.
    """

    start: float | Schedule | Callable[[float], float]
    stop: float | Schedule | Callable[[float], float]
    share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("start", "stop"):
            end = getattr(self, name)
            if isinstance(end, ByDepth):
                raise ValueError(
                    f"{name} can't be a ByDepth itself, got {quote(end)}: the rate would rise "
                    "twice with the depth. Write one ByDepth with both ends"
                )

            is_rate = callable(end) and not isinstance(end, type)
            if not is_rate:
                number = as_number(name, end, "a number or a schedule")
                store(self, **{name: number})

        share = as_number("share", self.share, allowed=PROBABILITY)
        store(self, share=share)

    @classmethod
    def rising(cls, rate: Any, first_share: float = 0.0) -> ByDepth:
        """Return a rate that rises with depth to `rate`, from `first_share` times `rate`.

        A `ByDepth` is returned unchanged.
        """
        if isinstance(rate, ByDepth):
            return rate
        # a function can't be scaled, but 0 times a function is 0
        start = scaled(rate, first_share) if first_share else 0.0
        return cls(start, rate)

    @property
    def length(self) -> float | None:  # type: ignore[override]  # differs between objects
        start_length = length_of(self.start)
        stop_length = length_of(self.stop)
        if start_length is None or stop_length is None:
            return None
        return max(start_length, stop_length)

    def __call__(self, t: float) -> float:
        first = value_at(self.start, t)
        last = value_at(self.stop, t)
        return between(first, last, self.share)

    def at(self, i: int, n: int, epochs: int | None = None) -> ByDepth:
        start = spread_rate(self.start, i, n, epochs)
        stop = spread_rate(self.stop, i, n, epochs)
        share = i / (n - 1) if n > 1 else 1.0
        return replace(self, start=start, stop=stop, share=share)

    def without_epochs(self, epochs: int | None) -> Schedule:
        start = without_epochs(self.start, epochs)
        stop = without_epochs(self.stop, epochs)
        return replace(self, start=start, stop=stop)

    def span(self) -> Span:
        low_of_start, high_of_start = span_of(self.start)
        low_of_stop, high_of_stop = span_of(self.stop)
        low = min(low_of_start, low_of_stop)
        high = max(high_of_start, high_of_stop)
        return low, high

    def span_here(self) -> Span:
        low_of_start, high_of_start = span_of(self.start)
        low_of_stop, high_of_stop = span_of(self.stop)
        low = between(low_of_start, low_of_stop, self.share)
        high = between(high_of_start, high_of_stop, self.share)
        return min(low, high), max(low, high)

    def moves(self) -> bool:
        start_moves = self.share < 1.0 and is_moving(self.start)
        stop_moves = self.share > 0.0 and is_moving(self.stop)
        return start_moves or stop_moves

    def scaled(self, factor: float) -> Schedule:
        start = scaled(self.start, factor)
        stop = scaled(self.stop, factor)
        return replace(self, start=start, stop=stop)


def is_moving(rate: Any) -> bool:
    """Return `Schedule.moves` of a rate; True for a function."""
    if isinstance(rate, Schedule):
        return rate.moves()
    return callable(rate)
