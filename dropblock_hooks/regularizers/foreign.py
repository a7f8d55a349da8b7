"""Modules and functions of other libraries as regularizers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..checks import Range
from ..quoting import kind_of, label, quote
from ..registry import documented
from ..schedules import Schedule
from .base import Applied, Now, Regularizer
from .rates import RateLike

_DEFAULTS = {f.name: f.default for f in fields(Regularizer)}  # of the options of all regularizers


@documented
@dataclass(frozen=True, init=False, repr=False)
class Foreign(Regularizer):
    """Wraps a module class without parameters, a module, or a function of a tensor.

    A module or a function in a spec means ``Foreign(module)``. Spec files cannot hold a `Foreign`.

    Each site has its own instance, in training mode, on the device of its layer. Schedules and
    floats in `kwargs` are set as attributes of the instance. The realized rate is the share of
    nonzero elements that became zero. The state of the attachment does not hold buffers. Use it for
    dropout of torchvision or timm, or of your own code.

    Example:
        >>> from torch import nn
        >>> Foreign(nn.Dropout2d, p=LinearSchedule(0.0, 0.1, epochs=10))
        Foreign(Dropout2d, p=LinearSchedule(start=0.0, stop=0.1, epochs=10))

    Args:
        target: the class, module or function.
        kwargs: arguments of the class; numbers may be schedules. With `grid`, tokens come as a map
            (N, C, height, width).

    Equation:
        The equation of the target.
    """

    target: Callable[..., Any]
    kwargs: tuple[tuple[str, Any], ...]

    def __init__(self, target: Callable[..., Any], /, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name, default) for name, default in _DEFAULTS.items()}
        vars(self).update(options, target=target, kwargs=tuple(kwargs.items()))
        vars(self)["spatial"] = None if self.grid is None else len(self.grid)
        vars(self)["samplewise"] = _name(target) in ("DropPath", "StochasticDepth")
        self.__post_init__()

    def check(self, values: Mapping[str, float]) -> None:
        target: Any = self.target
        is_class = inspect.isclass(target)
        if not callable(target) or (is_class and not issubclass(target, nn.Module)):
            takes = "a subclass of nn.Module, a module or a function"
            raise TypeError(f"Foreign takes {takes}, got {quote(target)}")
        if self.kwargs and not is_class:
            raise TypeError(f"{self.label} takes no arguments: it is not a class")
        module = self._module() or nn.Identity()
        if names := [name for name, _ in module.named_parameters()]:
            why = "which the model's state_dict and optimizer would miss"
            raise ValueError(f"{self.label} has parameters ({', '.join(names[:3])}), {why}")
        for name, rate in self.rates.items():
            if isinstance(rate, Schedule) and not hasattr(module, name):
                raise ValueError(f"{self.label} has no attribute {name!r} for a schedule to set")

    def _module(self) -> Any:
        """A new module; None for a function."""
        if isinstance(self.target, nn.Module):
            return copy.deepcopy(self.target)
        is_class = inspect.isclass(self.target)
        return self.target(**{**dict(self.kwargs), **self.values(0.0)}) if is_class else None

    def bind(self) -> Callable[[Tensor, Now], Applied]:
        module = self._module()
        return self.apply if module is None else partial(_hosted, module.train(), [*self.rates])

    def apply(self, x: Tensor, now: Now) -> Applied:
        return _counted(self.target, x)

    @property
    def kind(self) -> object:
        return type(self.target) if isinstance(self.target, nn.Module) else self.target

    @property
    def label(self) -> str:
        return f"Foreign({_name(self.target)})"

    @property
    def rates(self) -> dict[str, RateLike]:
        return {name: value for name, value in self.kwargs if isinstance(value, float | Schedule)}

    def ranges(self) -> Mapping[str, Range]:
        return dict.fromkeys(self.rates, Range())  # the class checks its own

    def with_rates(self, **rates: Any) -> Foreign:
        changed = copy.copy(self)
        vars(changed)["kwargs"] = tuple({**dict(self.kwargs), **rates}.items())
        changed.__post_init__()
        return changed

    def _stated(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in _DEFAULTS}
        stated = {name: value for name, value in options.items() if value != _DEFAULTS[name]}
        return {"": _name(self.target), **dict(self.kwargs), **stated}


def _hosted(module: nn.Module, rates: list[str], x: Tensor, now: Now) -> Applied:
    """Apply the module of a site, which is no child of the model."""
    for name in rates:
        setattr(module, name, getattr(now, name))
    if any(buffer.device != x.device for buffer in module.buffers()):
        module.to(x.device)
    return _counted(module, x)


def _counted(function: Callable[[Tensor], Tensor], x: Tensor) -> Applied:
    nonzero = x.detach() != 0  # before a call that may work in place
    y = function(x)
    if getattr(y, "shape", None) != x.shape:
        return y, None  # the site refuses it
    share = ((y.detach() == 0) & nonzero).sum() / nonzero.sum().clamp_min(1)
    return y, (share * y.numel()).round().long()


def _name(target: object) -> str:
    return label(getattr(target, "__name__", kind_of(target)))


def is_foreign(value: Any) -> bool:
    """Whether a value in a spec means ``Foreign(value)``."""
    return isinstance(value, nn.Module) or (callable(value) and not inspect.isclass(value))
