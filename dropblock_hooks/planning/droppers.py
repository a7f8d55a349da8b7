"""What drops, how much at once, and at which rate: layers of a model, and regularizers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from ..regularizers.base import Regularizer
from ..regularizers.droppers import RATES, rate_attribute, unit_of
from ..schedules import ByDepth, span_of
from ..selectors.wrappers import bare_type, named_modules
from ..sites.retune import retune_hooks


@dataclass(frozen=True)
class Dropper:
    """A layer of the model that drops by itself; `rate` is its share, held by `attribute`.

    `retuned` says that the rate is set by ``Retune``.
    """

    name: str
    type: str
    attribute: str
    rate: float
    unit: str
    retuned: bool = False


def droppers(
    base: nn.Module, retuned: Mapping[nn.Module, float] = MappingProxyType({})
) -> dict[str, Dropper]:
    """The layers of a model that drop by themselves in training, by name.

    Args:
        base: the model.
        retuned: layers that are to have another rate, and that rate.
    """
    found = {}
    for name, module in named_modules(base):
        kind = "" if module._modules else bare_type(module).__name__
        unit, attribute = unit_of(kind), rate_attribute(module) if kind else None
        if unit is not None and attribute and (module.training or not base.training):
            live = [highest_rate(h.site.regularizer) for h in retune_hooks(module)]
            rate = retuned.get(module, (live or [getattr(module, attribute)])[0])
            if rate > 0:
                ours = bool(live) or module in retuned
                found[name] = Dropper(name, kind, attribute, float(rate), unit, ours)
    return found


def highest_rate(regularizer: Regularizer) -> float:
    """The highest value of the main rate; of a plain function its first one."""
    rate = next(iter(regularizer.rates.values()), None)
    if rate is None:  # a peer's layer with its own default
        target: Any = getattr(regularizer, "target", None)
        held = (getattr(target, name, None) for name in RATES)
        return next((float(r) for r in held if isinstance(r, int | float)), 0.0)
    high = _highest(rate)
    return high if math.isfinite(high) else next(iter(regularizer.values(0.0).values()))


def _highest(rate: Any) -> float:
    if isinstance(rate, ByDepth):
        first, last = _highest(rate.start), _highest(rate.stop)
        return first + (last - first) * rate.share if math.isfinite(last - first) else math.inf
    return span_of(rate)[1]
