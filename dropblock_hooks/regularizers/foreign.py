"""Modules and functions of other libraries as regularizers."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from ..quoting import described, kind_of, label, quote
from ..schedules import Schedule
from .base import Applied, Now, Regularizer
from .droppers import zeroed
from .rates import Range, RateLike

_DEFAULTS = {f.name: f.default for f in fields(Regularizer)}  # of the options of all regularizers


@dataclass(frozen=True, init=False, repr=False)
class Foreign(Regularizer):
    """Wraps a module class without parameters, a module, or a function of a tensor.

    Each site has its own instance, built from `kwargs`; a module is deep-copied. The instance
    follows the training mode and the device of its layer. A function is called while the site is
    active. Keywords that are schedules or floats are set as attributes of the instance when they
    change. The realized rate is the share of nonzero elements that became zero.

    A module or a function may stand in a spec as it is; it then means ``Foreign(module)``. Spec
    files cannot hold a `Foreign`. Copies and pickles of the model keep the buffers of the module;
    the state of the attachment does not hold them.

    Example:
        >>> from torch import nn
        >>> Foreign(nn.Dropout2d, p=LinearSchedule(0.0, 0.1, epochs=10))
        Foreign(Dropout2d, p=LinearSchedule(start=0.0, stop=0.1, epochs=10))

    Args:
        target: the class, module or function.
        kwargs: arguments of the class, apart from `Regularizer`'s own (``at``, ``index``,
            ``layout``, ``grid``, ``prefix_tokens``, ``active``); with `grid`, tokens come as a map
            (N, C, height, width).

    Raises:
        TypeError: for a target that can't be called with a tensor.
        ValueError: for a module with parameters, or a schedule for what is not an attribute.
    """

    target: Callable[..., Any]
    kwargs: tuple[tuple[str, Any], ...]

    def __init__(self, target: Callable[..., Any], /, **kwargs: Any) -> None:
        for name, default in _DEFAULTS.items():
            object.__setattr__(self, name, kwargs.pop(name, default))
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "kwargs", tuple(kwargs.items()))
        self.__post_init__()

    def _check_rates(self) -> None:
        """The wrapped class validates its own rates."""

    def check(self, values: Mapping[str, float]) -> None:
        is_class = inspect.isclass(self.target)
        if self.kwargs and not is_class:
            raise TypeError(f"{self.label} takes no arguments: it is not a class")
        if is_class and not issubclass(self.target, nn.Module):  # type: ignore[arg-type]
            raise TypeError(
                f"{self.label} must be a subclass of nn.Module, an instance or a function"
            )
        if not callable(self.target):
            raise TypeError(
                f"Foreign takes a module class, a module or a function, got {quote(self.target)}"
            )
        module = self._build()
        if module is None:
            return
        names = [name for name, _ in module.named_parameters()]
        if names:
            raise ValueError(
                f"{self.label} has parameters ({', '.join(names[:3])}): a regularizer put on by "
                "hooks must have none, since the model's state_dict and optimizer would miss them"
            )
        for name, rate in self.rates.items():
            if isinstance(rate, Schedule) and not hasattr(module, name):
                raise ValueError(f"{self.label} has no attribute {name!r} for a schedule to set")

    def _build(self) -> nn.Module | None:
        if isinstance(self.target, nn.Module):
            return copy.deepcopy(self.target)
        if not inspect.isclass(self.target):
            return None
        try:
            build: Any = self.target
            module: nn.Module = build(**{**dict(self.kwargs), **self.values(0.0)})
        except Exception as error:  # somebody's constructor may raise anything
            raise ValueError(f"{self.label} can't be built: {described(error)}") from error
        return module

    def bind(self) -> Callable[[Tensor, Now], Applied]:
        module = self._build()
        if module is None:
            return functools.partial(_counted, self.target, "function")
        return _Hosted(module, tuple(self.rates))

    @property
    def spatial(self) -> int | None:  # type: ignore[override]  # a constant elsewhere
        """The number of axes of `grid`: with it, the module gets tokens as a map."""
        return None if self.grid is None else len(self.grid)

    @property
    def samplewise(self) -> bool:  # type: ignore[override]  # a constant elsewhere
        """Whether it drops whole samples, as the known drop paths do."""
        return self.label in ("Foreign(DropPath)", "Foreign(StochasticDepth)")

    @property
    def follows_host(self) -> bool:  # type: ignore[override]  # a constant elsewhere
        """True for modules, which decide by their own training mode."""
        return isinstance(self.target, nn.Module) or inspect.isclass(self.target)

    @property
    def kind(self) -> object:
        own = inspect.isroutine(self.target) or inspect.isclass(self.target)
        return self.target if own else type(self.target)

    def __hash__(self) -> int:
        return hash((self.label, tuple(name for name, _ in self.kwargs)))

    @property
    def label(self) -> str:
        name = getattr(self.target, "__name__", None)
        return f"Foreign({label(name) if isinstance(name, str) else kind_of(self.target)})"

    @property
    def rates(self) -> dict[str, RateLike]:
        return {name: value for name, value in self.kwargs if isinstance(value, float | Schedule)}

    def ranges(self) -> Mapping[str, Range]:
        return dict.fromkeys(self.rates, Range())

    def with_rates(self, **rates: Any) -> Foreign:
        kwargs = dict(self.kwargs)
        for name in rates:
            if name not in kwargs:
                raise ValueError(
                    f"{self.label} has no argument {name!r}; it has {quote(list(kwargs))}"
                )
        return Foreign(self.target, **{**kwargs, **rates}, **self._options())

    def _options(self) -> dict[str, Any]:
        """The options that are set."""
        given = {name: getattr(self, name) for name in _DEFAULTS}
        return {name: value for name, value in given.items() if value != _DEFAULTS[name]}

    def _stated(self) -> dict[str, Any]:
        """The parts of the repr: the target, its arguments, and the options that are set."""
        return {"": self.label[len("Foreign(") : -1], **dict(self.kwargs), **self._options()}


class _Hosted:
    """A module at one site. It is no child of the model."""

    def __init__(self, module: nn.Module, rates: tuple[str, ...]) -> None:
        self.module = module
        self.rates = rates

    def __call__(self, x: Tensor, now: Now) -> Applied:
        if self.module.training != now.training:
            self.module.train(now.training)
        for name in self.rates:
            if getattr(self.module, name, None) != getattr(now, name):
                setattr(self.module, name, getattr(now, name))
        module = self.module
        if any(buffer.device != x.device for buffer in module.buffers()):
            if x.is_meta:  # buffers that were moved there would lose their values
                module = copy.deepcopy(module)
            module.to(x.device)
        return _counted(module, "module", x, now)

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.module.load_state_dict(state, strict=False)


def _counted(function: Callable[[Tensor], Tensor], kind: str, x: Tensor, now: Now) -> Applied:
    """Call `function`; while active, count the elements that become zero if it keeps the shape."""
    nonzero = x.detach() != 0 if now.training else None  # before a call that may work in place
    y = function(x)
    if not isinstance(y, Tensor):
        raise TypeError(f"the {kind} must return a tensor, got {None if y is None else kind_of(y)}")
    return y, None if nonzero is None or y.shape != x.shape else zeroed(nonzero, y)


def is_foreign(value: Any) -> bool:
    """Whether a value in a spec means ``Foreign(value)``."""
    return isinstance(value, nn.Module) or (callable(value) and not inspect.isclass(value))
