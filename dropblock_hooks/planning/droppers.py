"""What drops, how much at once, and at which rate: layers of a model, and regularizers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..attachment.placement import Placement
from ..regularizers.base import Regularizer
from ..regularizers.droppers import RATES, rate_attribute, unit_of
from ..regularizers.retune import Retune
from ..schedules import ByDepth, span_of
from ..selectors.wrappers import bare_type, named_modules
from ..sites.retune import retune_hooks

Range = tuple[float, float]


@dataclass(frozen=True)
class Dropper:
    """A layer of the model that drops in training: its class, rate, and what it drops at once."""

    name: str
    type: str
    rate: float
    unit: str


def droppers(base: nn.Module, placements: Iterable[Placement]) -> dict[str, Dropper]:
    """The layers of a model that drop in training, by name, at the rates that placements set."""
    retuned = {
        p.target.module: highest_rate(p.regularizer)
        for p in placements
        if isinstance(p.regularizer, Retune) and p.attribute == rate_attribute(p.target.module)
    }
    found = {}
    for name, module in named_modules(base):
        kind = "" if module._modules else bare_type(module).__name__
        unit, attribute = unit_of(kind), rate_attribute(module) if kind else None
        if unit is not None and attribute and (module.training or not base.training):
            live = [highest_rate(h.site.regularizer) for h in retune_hooks(module)]
            rate = retuned.get(module, (live or [getattr(module, attribute)])[0])
            if rate > 0:
                found[name] = Dropper(name, kind, float(rate), unit)
    return found


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


def _range(rate: Any) -> Range:
    if isinstance(rate, ByDepth):  # which knows its place in the model by now
        (low, high), (low_end, high_end) = _range(rate.start), _range(rate.stop)
        ends = low + (low_end - low) * rate.share, high + (high_end - high) * rate.share
        return min(ends), max(ends)
    return span_of(rate)
