"""Layers that already drop: the attribute that holds their rate, and the units that they drop."""

import functools
import inspect
import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..selectors.index import is_share
from ..selectors.wrappers import bare_type, find_module
from .base import Regularizer
from .dropout import Dropout, Dropout1d, Dropout2d, Dropout3d, DropPath

RATES = ("p", "drop_prob", "prob", "drop_rate", "drop_p")
"""The attributes that may hold a layer's own rate."""
_UNITS = {
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
def unit_of(name: str) -> str | None:
    """The units that a class of this name drops, such as ``"samples"``, or None."""
    plain = name.lower().replace("_", "")
    if "gaussian" in plain:
        return None  # noise
    return next((unit for part, unit in _UNITS.items() if part in plain), None)


def unit_dropped(regularizer: Regularizer) -> str | None:
    """The units that a regularizer drops; None if it does not drop."""
    if regularizer.acts_on == "gradient":
        return None
    names = [regularizer.label, *(cls.__name__ for cls in type(regularizer).__mro__)]
    return next(filter(None, map(unit_of, names)), None)


def rate_attribute(module: nn.Module) -> str | None:
    """The attribute that holds the rate of a layer, and can be set; None where there is none."""
    for name in RATES:
        static = inspect.getattr_static(type(module), name, None)
        fixed = isinstance(static, property) and static.fset is None
        if not fixed and is_share(getattr(module, name, None)):
            return name
    return None


def in_place_of(module: nn.Module) -> Regularizer | None:
    """The regularizer of this package that drops what the layer drops; None where it is unknown.

    Torch's dropouts are recognized by their ``forward``, drop paths by the name of their class.
    """
    if "forward" in vars(module):
        return None  # replaced on this one layer
    if unit_of(type(module).__name__) != "samples":
        return _OF_TORCH.get(type(module).forward)
    if module._modules or module._parameters or getattr(module, "mode", "row") != "row":
        return None
    return DropPath(0.0, scale_by_keep=bool(getattr(module, "scale_by_keep", True)))


def is_read(base: nn.Module, names: Iterable[str], attribute: str) -> bool:
    """Whether the source of a module above a layer reads its rate, as fused attention does.

    True where the source of the parent is missing.

    Args:
        base: the model.
        names: all names of the layer.
        attribute: the attribute that holds its rate.
    """
    for name in filter(None, names):
        *above, local = name.split(".")
        read = re.compile(rf"\.{re.escape(local)}\.{attribute}\b")
        modules = [find_module(base, ".".join(above[:n])) for n in range(len(above), -1, -1)]
        kinds: list[Any] = [bare_type(module) for module in modules if module is not None]
        sources = [_source(kind) for kind in kinds]
        if sources[0] is None or any(read.search(source or "") for source in sources):
            return True
    return False


@functools.lru_cache(maxsize=1024)
def _source(cls: Any) -> str | None:
    """The source of all methods of a class; None where that of one is missing."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    methods = [each for base in bases for each in vars(base).values() if inspect.isfunction(each)]
    try:
        return "".join(map(inspect.getsource, methods))
    except OSError:
        return None


_OF_TORCH: dict[Any, Regularizer] = {
    nn.Dropout.forward: Dropout(),
    nn.Dropout1d.forward: Dropout1d(),
    nn.Dropout2d.forward: Dropout2d(),
    nn.Dropout3d.forward: Dropout3d(),
}
