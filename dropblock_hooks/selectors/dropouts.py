"""Facts about the model's own dropouts: their units, and the attributes of their rates.

`Retune` and `builtin` need them, and `find_doubled`, which finds layers that would drop twice.
"""

import functools
import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import nn

from .kinds import is_share
from .wrappers import bare_type, find_module

Unit = Literal["elements", "channels", "samples", "blocks", "tokens"]
"""The unit that a dropout drops as a whole."""

RATES = ("p", "drop_prob", "prob", "drop_rate", "drop_p")
"""The attributes that hold the rate of a layer."""

# the units of layers of torch, timm, Transformers and others, by a part of their class name;
# the first part that fits decides, so the order matters
_UNITS: dict[str, Unit | None] = {
    "gaussian": None,  # noise
    "droppath": "samples",
    "stochasticdepth": "samples",
    "dropblock": "blocks",
    "patchdropout": "tokens",
    "dropout1d": "channels",
    "dropout2d": "channels",
    "dropout3d": "channels",
    "featurealphadropout": "channels",
    "dropout": "elements",
}


@functools.cache
def unit_of_layer(class_name: str) -> Unit | None:
    """Return the unit that layers of this class drop as a whole; None if they drop nothing.

    This is for classes of torch and of other libraries. A `Regularizer` has an attribute `unit`.
    """
    plain = class_name.lower().replace("_", "")
    for part, unit in _UNITS.items():
        if part in plain:
            return unit
    return None


def rate_attribute(module: nn.Module) -> str | None:
    """Return the name of the attribute that holds the rate of a layer; None without a rate."""
    attributes = vars(module)
    for name in RATES:
        if is_share(attributes.get(name)):
            return name
    return None


def has_no_effect(module: nn.Module, attribute: str) -> bool:
    """Return whether a rate has no effect, because a recurrent layer has only one layer."""
    return isinstance(module, nn.RNNBase) and attribute == "dropout" and module.num_layers == 1


def reads_own(module: nn.Module, attribute: str) -> bool:
    """Return whether a method of a module, except ``__init__``, may read its attribute.

    `builtin` asks this, because a rate that no code reads has no effect.
    """
    if "forward" in vars(module):
        return True  # the source of the replaced forward is unknown
    source = _source_of(module)
    # as an attribute, or as a string for `getattr`
    return source is None or bool(re.search(rf"[.'\"]{attribute}\b", source))


def is_read_above(base: nn.Module, names: Iterable[str], attribute: str) -> bool:
    """Return whether a module above a layer may read a rate of the layer.

    `Retune` asks this, because a 0 in the attribute would also switch off the code that reads it.
    So it only writes 0, and lets its hook drop, if the answer is False. `builtin` asks this to find
    rates without effect. If the source of the parent is missing, the answer is True.

    Args:
        base: the model.
        names: the names of the layer in the model.
        attribute: the attribute that holds the rate.
    """
    for name in filter(None, names):  # the model itself, whose name is "", has none above it
        *parents, local = name.split(".")
        reading = re.compile(rf"\.{re.escape(local)}\.{attribute}\b")
        sources = _sources_above(base, parents)
        if sources[0] is None:
            return True
        if any(reading.search(source) for source in sources if source is not None):
            return True
    return False


def _sources_above(base: nn.Module, parents: Sequence[str]) -> list[str | None]:
    """Return the sources of the classes of the modules above a layer, its parent first."""
    sources = []
    for depth in range(len(parents), -1, -1):
        module = find_module(base, ".".join(parents[:depth]))
        if module is not None:
            sources.append(_source_of(module))
    return sources


def _source_of(module: nn.Module) -> str | None:
    """Return the source of the class of a module; see `_source`."""
    kind: Any = bare_type(module)  # mypy does not see that a class is hashable
    return _source(kind)


@functools.lru_cache(maxsize=1024)
def _source(cls: Any) -> str | None:
    """Return the source of all methods except ``__init__``; None if a method has no source."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    sources = []
    for base in bases:
        for name, member in vars(base).items():
            function = getattr(member, "fget", member)  # the getter, if it is a property
            if name == "__init__" or not inspect.isfunction(function):
                continue
            try:
                sources.append(inspect.getsource(function))
            except OSError:
                return None
    return "".join(sources)
