"""The main rate of a regularizer over its whole schedule."""

import math
from collections.abc import Iterable
from typing import Any

from ..regularizers.base import Regularizer
from ..regularizers.retune import RATES
from ..schedules.base import span_of
from ..schedules.by_depth import ByDepth

Range = tuple[float, float]


def rate_range(regularizer: Regularizer) -> Range | None:
    """The lowest and highest main rate; of a plain function its first one; None without a rate."""
    rate = next(iter(regularizer.rates.values()), None)
    if rate is None:
        return None
    low, high = _range(rate)
    if math.isfinite(high - low):
        return low, high
    first = next(iter(regularizer.values(0.0).values()))
    return first, first


def highest_rate(regularizer: Regularizer) -> float:
    """The highest main rate; of a ``Foreign`` without a rate of its own, that of its layer."""
    rates = rate_range(regularizer)
    if rates is not None:
        return rates[1]
    held = (getattr(getattr(regularizer, "target", None), name, None) for name in RATES)
    return next((float(rate) for rate in held if isinstance(rate, int | float)), 0.0)


def range_of(values: Iterable[float | None]) -> float | Range | None:
    """The lowest and the highest value, or one number if they are equal."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return known[0] if min(known) == max(known) else (min(known), max(known))


def _range(rate: Any) -> Range:
    if isinstance(rate, ByDepth):  # which knows its place in the model by now
        (low, high), (low_end, high_end) = _range(rate.start), _range(rate.stop)
        ends = low + (low_end - low) * rate.share, high + (high_end - high) * rate.share
        return min(ends), max(ends)
    return span_of(rate)
