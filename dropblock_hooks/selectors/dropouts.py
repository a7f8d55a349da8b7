"""The dropouts that a model has: what they drop, the attributes of their rates."""

import functools
import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import nn

from .kinds import is_share
from .wrappers import bare_type, find_module

Unit = Literal["elements", "channels", "samples", "blocks", "tokens"]
"""What a dropout drops as a whole."""

RATES = ("p", "drop_prob", "prob", "drop_rate", "drop_p")
"""The attributes that hold the rate of a layer."""

# what layers of torch, timm, Transformers and others drop, by a part of the name of their class
_UNITS: dict[str, Unit | None] = {
    "gaussian": None,  # noise
    "droppath": "samples",
    "stochasticdepth": "samples",
    "dropblock": "blocks",
    "patchdropout": "tokens",
    "dropout1d": "channels",
    "dropout2d": "channels",
    "dropout3d": "channels",
    "dropout": "elements",
}


@functools.cache
def unit_of_layer(class_name: str) -> Unit | None:
    """Return what layers of this class drop as a whole; None if they drop nothing.

    This is for classes of torch and of other libraries. A `Regularizer` says its own `unit`.
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
    """Return whether a layer never uses its rate: a recurrent layer drops between its layers."""
    return isinstance(module, nn.RNNBase) and attribute == "dropout" and module.num_layers == 1


def reads_own(module: nn.Module, attribute: str) -> bool:
    """Return whether a method of a module may read an attribute, besides ``__init__``."""
    if "forward" in vars(module):
        return True  # its source is not known
    kind: Any = bare_type(module)  # mypy takes no class as hashable
    source = _source(kind)
    return source is None or bool(re.search(rf"[.'\"]{attribute}\b", source))


def is_read_above(base: nn.Module, names: Iterable[str], attribute: str) -> bool:
    """Return whether a module above a layer may read the rate of the layer.

    It may if the source of the parent is missing.

    Args:
        base: the model.
        names: the names of the layer in the model.
        attribute: the attribute that holds the rate.
    """
    for name in filter(None, names):
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
            kind: Any = bare_type(module)  # mypy takes no class as hashable
            sources.append(_source(kind))
    return sources


@functools.lru_cache(maxsize=1024)
def _source(cls: Any) -> str | None:
    """Return the source of all methods but ``__init__``; None if a method has no source."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    sources = []
    for base in bases:
        for name, member in vars(base).items():
            function = getattr(member, "fget", member)  # of a property
            if name == "__init__" or not inspect.isfunction(function):
                continue
            try:
                sources.append(inspect.getsource(function))
            except OSError:
                return None
    return "".join(sources)
