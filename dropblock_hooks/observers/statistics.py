"""What was seen in a window, as plain numbers that can be added up over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..tables import Columns, Forms

_COUNTED = ("left_out", "dead", "saturated")


@dataclass(frozen=True)
class Statistics:
    """What was seen in a window. None where there is nothing to tell it from.

    Attributes:
        calls: how many there were.
        left_out: those with a value that is not finite: not in what follows up to `norm`.
        values: how many.
        mean, std, rms: of all values; the deviation is that of the population, and rough below
            1e-4 of the mean.
        largest: the largest magnitude.
        norm: the root of the sum of squares in each call, its mean over the calls.
        looked: values in the calls that were looked at closely (``every``).
        zeros: the share of them that was exactly zero.
        nonfinite: the share that was NaN or infinite.
        histogram: how many magnitudes, of values that are finite and not zero, lay below the first
            edge, between each two, and from the last one on.
        channels: how many, where they are watched one by one.
        dead: those that were exactly zero in every call.
        saturated: those that were flat in every call.
        unwatched: why there is no `dead`, or no `saturated`.
        mean_shift: of a BatchNorm, how far its running mean is from the mean of the batches that
            were looked at, in running deviations; the mean over its channels.
        variance_shift: the same of the variance: the logarithm of the ratio, without its sign. To
            variances the layer's eps is added, as it does.
        alive, moved: the others, as bits of an integer.
    """

    calls: int = 0
    left_out: int = 0
    values: int = 0
    mean: float | None = None
    std: float | None = None
    rms: float | None = None
    largest: float | None = None
    norm: float | None = None
    looked: int = 0
    zeros: float | None = None
    nonfinite: float | None = None
    histogram: tuple[int, ...] = ()
    channels: int | None = None
    dead: int | None = None
    saturated: int | None = None
    unwatched: str = ""
    mean_shift: float | None = None
    variance_shift: float | None = None
    alive: int = field(default=0, repr=False)
    moved: int = field(default=0, repr=False)

    def plus(self, other: Any) -> Any:
        """What both have seen, as of two ranks."""
        kept = self.calls - self.left_out, other.calls - other.left_out
        alive, moved = self.alive | other.alive, self.moved | other.moved
        mean = _mean(self.mean, other.mean, self.values, other.values)
        channels = _largest(self.channels, other.channels)
        return replace(
            self,
            calls=self.calls + other.calls,
            left_out=self.left_out + other.left_out,
            values=self.values + other.values,
            mean=mean,
            std=self._std_with(other, mean),
            rms=_root(_mean(_square(self.rms), _square(other.rms), self.values, other.values)),
            largest=_largest(self.largest, other.largest),
            norm=_mean(self.norm, other.norm, *kept),
            looked=self.looked + other.looked,
            zeros=_mean(self.zeros, other.zeros, self.looked, other.looked),
            nonfinite=_mean(self.nonfinite, other.nonfinite, self.looked, other.looked),
            histogram=tuple(a + b for a, b in zip(self.histogram, other.histogram, strict=True)),
            channels=channels,
            dead=_others(self.dead, other.dead, channels, alive),
            saturated=_others(self.saturated, other.saturated, channels, moved),
            unwatched=(other if self.channels is None else self).unwatched,
            mean_shift=_mean(self.mean_shift, other.mean_shift, self.looked, other.looked),
            variance_shift=_mean(
                self.variance_shift, other.variance_shift, self.looked, other.looked
            ),
            alive=alive,
            moved=moved,
        )

    def _std_with(self, other: Any, mean: Any) -> float | None:
        """Of both: each lies around its own mean, and these around that of both."""
        squares = [
            each.values * ((each.std or 0.0) ** 2 + ((each.mean or 0.0) - mean) ** 2)
            for each in (self, other)
            if each.values
        ]
        return math.sqrt(sum(squares) / (self.values + other.values)) if squares else None

    def scalars(self) -> dict[str, float]:
        """What is logged, by name."""
        values = {name.name: getattr(self, name.name) for name in fields(self)}
        return {name: values[name] for name in values if isinstance(values[name], float)} | {
            name: values[name] for name in _COUNTED if values.get(name) is not None
        }


def _mean(a: float | None, b: float | None, n: int, m: int) -> float | None:
    """The mean of two, of so many each."""
    if a is None or b is None:
        return b if a is None else a
    return (a * n + b * m) / (n + m)


def _square(x: float | None) -> float | None:
    return None if x is None else x * x


def _root(x: float | None) -> float | None:
    return None if x is None else math.sqrt(x)


def _largest(a: Any, b: Any) -> Any:
    return max((each for each in (a, b) if each is not None), default=None)


def _others(a: int | None, b: int | None, channels: int | None, noted: int) -> int | None:
    """The channels that neither has noted; None where one does not watch them."""
    if channels is None or (a is None and b is None):
        return None
    return channels - noted.bit_count()


def columns_of_moments() -> Columns[Any]:
    """The columns of moments and shares."""
    return {
        "mean": lambda s: short(s.mean),
        "std": lambda s: short(s.std),
        "largest": lambda s: short(s.largest),
        "norm": lambda s: short(s.norm),
        "zeros": lambda s: short(s.zeros),
        "nan/inf": lambda s: short(s.nonfinite),
    }


def short(value: float | None) -> str | None:
    """A number in three digits: there are many in a row."""
    return None if value is None else f"{value:.3g}"


def columns_of_units() -> Columns[Any]:
    """The columns of dead and saturated channels, and of BatchNorm's running statistics."""
    return {
        "dead": lambda s: _share(s.dead, s),
        "saturated": lambda s: _share(s.saturated, s),
        "running": _running,
    }


def _running(s: Any) -> str:
    """How far running statistics are; nothing where there are none."""
    if s.mean_shift is None or s.variance_shift is None:
        return ""
    return f"{s.mean_shift:.2g}, {s.variance_shift:.2g}"


def _share(count: int | None, s: Any) -> Any:
    if count is None:
        return Forms((f"- ({s.unwatched})", "-")) if s.unwatched else None
    return Forms((f"{count} of {s.channels}", str(count)))
