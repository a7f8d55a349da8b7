"""What drops, how much at once, and at which rate: layers of a model, and regularizers."""

import functools
import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..regularizers.base import Regularizer
from ..schedules import ByDepth, span_of
from ..selectors.wrappers import bare_type, named_modules

_RATES = ("p", "drop_prob", "prob", "drop_rate", "drop_p")
_UNITS = {
    "droppath": "samples",
    "stochasticdepth": "samples",
    "dropblock": "blocks",
    "dropout1d": "channels",
    "dropout2d": "channels",
    "dropout3d": "channels",
    "dropout": "elements",
}


@dataclass(frozen=True)
class Dropper:
    """A layer of the model that drops by itself; `rate` is its share, held by `attribute`."""

    name: str
    type: str
    attribute: str
    rate: float
    unit: str


@functools.cache
def unit_of(name: str) -> str | None:
    """What a class of this name drops at once: ``"samples"``, ``"elements"``; None if nothing."""
    plain = name.lower().replace("_", "")
    if "gaussian" in plain:
        return None  # noise
    return next((unit for part, unit in _UNITS.items() if part in plain), None)


def droppers(base: nn.Module) -> dict[str, Dropper]:
    """The layers of a model that drop by themselves in training, by name."""
    found = {}
    for name, module in named_modules(base):
        kind = "" if module._modules else bare_type(module).__name__
        unit = unit_of(kind)
        if unit is not None and (module.training or not base.training):
            for attribute in _RATES:
                rate = getattr(module, attribute, None)
                if isinstance(rate, int | float) and rate is not True and 0 < rate <= 1:
                    found[name] = Dropper(name, kind, attribute, float(rate), unit)
                    break
    return found


def unit_dropped(regularizer: Regularizer) -> str | None:
    """What a regularizer drops at once; None for one that does not drop."""
    if regularizer.acts_on == "gradient":
        return None
    names = [regularizer.label, *(cls.__name__ for cls in type(regularizer).__mro__)]
    return next(filter(None, map(unit_of, names)), None)


def highest_rate(regularizer: Regularizer) -> float:
    """The highest value of the main rate; of a plain function its first one."""
    rate = next(iter(regularizer.rates.values()), None)
    if rate is None:  # a peer's layer with its own default
        target: Any = getattr(regularizer, "target", None)
        held = (getattr(target, name, None) for name in _RATES)
        return next((float(r) for r in held if isinstance(r, int | float)), 0.0)
    high = _highest(rate)
    return high if math.isfinite(high) else next(iter(regularizer.values(0.0).values()))


def _highest(rate: Any) -> float:
    if isinstance(rate, ByDepth):
        first, last = _highest(rate.start), _highest(rate.stop)
        return first + (last - first) * rate.share if math.isfinite(last - first) else math.inf
    return span_of(rate)[1]
