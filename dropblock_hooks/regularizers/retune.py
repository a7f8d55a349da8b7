"""Retune: another rate for a layer that already drops; and what such layers drop, and how."""

import copy
import functools
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, ClassVar

from torch import Tensor, nn

from ..functional.dropout import drop_units
from ..registry import register
from ..selectors.index import is_share
from ..selectors.wrappers import bare_type, find_module
from .base import Applied, Now, Regularizer
from .dropout import Dropout, Dropout1d, Dropout2d, Dropout3d, DropPath, DropsShare
from .rates import Probability

RATES = ("p", "drop_prob", "prob", "drop_rate", "drop_p")
"""The attributes that may hold a layer's own rate."""
_UNITS = {
    "droppath": "samples",
    "stochasticdepth": "samples",
    "dropblock": "blocks",
    "patchdropout": "tokens",
    "dropout[123]d": "channels",
    "dropout": "elements",
}


@register
class Retune(DropsShare, Regularizer):
    """Sets another rate, or a schedule, in a layer that already drops, such as ``nn.Dropout``.

    The rate is a number in [0, 1] that the layer holds as ``p``, ``drop_prob``, ``prob``,
    ``drop_rate`` or ``drop_p``, or that an ``attr:`` selector names, such as ``nn.LSTM.dropout``.
    Dropouts of torch and drop paths get the rate 0, and a hook of this package drops in their
    place: their realized rate is measured, and a schedule does not recompile. Other layers drop by
    themselves. `Attachment.remove` restores every rate. Use it for models that come with dropout.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        >>> attached = attach(model, {"type:Dropout": Retune(p=LinearSchedule(0.0, 0.4, epochs=5))})
        >>> attached.step(2)
        >>> attached.rates
        {'1/Retune': {'p': 0.2}}

    Args:
        p: the new rate, a number in [0, 1] or a schedule.
        at: ``"output"``; no other value is allowed.
        index: None; no other value is allowed.
        layout: ``"auto"``; no other value is allowed.

    Equation:
        The equation of the layer, with another rate.
    """

    p: Probability
    attribute: str = field(default="", init=False, repr=False, compare=False)
    ours: Regularizer | None = field(default=None, init=False, repr=False, compare=False)

    random: ClassVar[bool] = False  # unless a hook of this package drops
    needs_calls: ClassVar[bool] = True  # unless other code reads the rate of the layer
    linear: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True

    def check(self, values: Mapping[str, float]) -> None:
        if self.at != "output" or self.index is not None or self.layout != "auto":
            raise ValueError("Retune sets the rate of a layer: it takes no at, index or layout")

    def fitted(self, attribute: str, ours: Regularizer | None = None) -> "Retune":
        """A copy for a module with this attribute, which drops as `ours`, or else by itself."""
        changed = copy.copy(self)
        vars(changed).update(attribute=attribute, ours=ours, random=ours is not None)
        return changed

    def apply(self, x: Tensor, now: Now) -> Applied:
        if self.ours is None:
            return x, None
        spatial = self.ours.spatial
        if spatial in (1, 3) and x.ndim == spatial + 1:  # torch reads it as unbatched: (C, ...)
            return drop_units(x, now.p, 1)
        return self.ours.apply(x, now)


@functools.cache
def unit_of(name: str) -> str | None:
    """The units that a class of this name drops, such as ``"samples"``, or None."""
    plain = name.lower().replace("_", "")
    if "gaussian" in plain:
        return None  # noise
    return next((unit for part, unit in _UNITS.items() if re.search(part, plain)), None)


def unit_dropped(regularizer: Regularizer) -> str | None:
    """The units that a regularizer drops; None if it does not drop."""
    if regularizer.acts_on == "gradient":
        return None
    names = [regularizer.label, *(cls.__name__ for cls in type(regularizer).__mro__)]
    return next(filter(None, map(unit_of, names)), None)


def held_rate(regularizer: Regularizer) -> str:
    """The attribute of its layer that a `Retune` sets; ``""`` of another regularizer."""
    return regularizer.attribute if isinstance(regularizer, Retune) else ""


def rate_attribute(module: nn.Module) -> str | None:
    """The attribute that holds the rate of a layer, and can be set; or None."""
    for name in RATES:
        static = inspect.getattr_static(type(module), name, None)
        fixed = isinstance(static, property) and static.fset is None
        if not fixed and is_share(getattr(module, name, None)):
            return name
    return None


def in_place_of(module: nn.Module) -> Regularizer | None:
    """The regularizer of this package that equals the layer; None if the layer is unknown."""
    if "forward" in vars(module):
        return None  # replaced on this one layer
    if unit_of(type(module).__name__) != "samples":
        return _OF_TORCH.get(type(module).forward)
    if module._modules or module._parameters or getattr(module, "mode", "row") != "row":
        return None
    return DropPath(0.0, scale_by_keep=bool(getattr(module, "scale_by_keep", True)))


def reads_own(module: nn.Module, attribute: str) -> bool:
    """Whether a method of a module may read this attribute; ``__init__`` only stores it."""
    kind: Any = bare_type(module)
    source = None if "forward" in vars(module) else _source(kind)
    return source is None or bool(re.search(rf"[.'\"]{attribute}\b", source))


def is_read(base: nn.Module, names: Iterable[str], attribute: str) -> bool:
    """Whether a module above a layer reads its rate, or the source of its parent is missing."""
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
    """The source of all methods of a class but ``__init__``; None if a method has no source."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    held = [getattr(x, "fget", x) for b in bases for n, x in vars(b).items() if n != "__init__"]
    try:
        return "".join(map(inspect.getsource, filter(inspect.isfunction, held)))
    except OSError:
        return None


_OF_TORCH: dict[Any, Regularizer] = {
    nn.Dropout.forward: Dropout(),
    nn.Dropout1d.forward: Dropout1d(),
    nn.Dropout2d.forward: Dropout2d(),
    nn.Dropout3d.forward: Dropout3d(),
}
