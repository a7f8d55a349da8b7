"""Other people's layers as regularizers: a module class, a module, or a function of a tensor."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..quoting import described, kind_of, label, quote
from ..schedules import Schedule
from .base import Applied, Now, Regularizer
from .droppers import zeroed
from .rates import Range, RateLike

_DEFAULTS = {f.name: f.default for f in fields(Regularizer)}  # of the options of all regularizers


@dataclass(frozen=True, init=False, repr=False)
class Foreign(Regularizer):
    """Any module class without parameters, put on layers by name: a peer's DropBlock, say.

    Each site has an instance of its own, built from `kwargs` (a module is deep-copied), which
    follows the layer's training mode; a plain function of a tensor is called while the site is
    active. Keywords that are schedules or floats are set as attributes of the instance as time
    moves. The realized rate is the share of nonzero elements that became zero.

    A module, or a function, may stand in a spec as it is; it then means ``Foreign(module)``. What
    holds code can't be written to a file, nor read from one.

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
    traceable: ClassVar[bool] = False  # other people's code reads its rates as numbers

    def __init__(self, target: Callable[..., Any], /, **kwargs: Any) -> None:
        for name, default in _DEFAULTS.items():
            object.__setattr__(self, name, kwargs.pop(name, default))
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "kwargs", tuple(kwargs.items()))
        self.__post_init__()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_target()

    def _check_rates(self) -> None:
        """What a rate may be, the peer's class says."""

    def _check_target(self) -> None:
        if self.kwargs and not inspect.isclass(self.target):
            raise TypeError(f"{self.label} takes no arguments: it is not a class")
        if inspect.isclass(self.target) and not issubclass(self.target, nn.Module):
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
            return functools.partial(_call_function, self.target)
        return _Hosted(module, tuple(self.rates))

    @property
    def spatial(self) -> int | None:  # type: ignore[override]  # a constant elsewhere
        """The axes of `grid`: a peer gets the tensor as it is, or tokens as a map."""
        return None if self.grid is None else len(self.grid)

    @property
    def samplewise(self) -> bool:  # type: ignore[override]  # a constant elsewhere
        """Whether it is a peer's layer that drops samples, which are its axis 0."""
        return self.label in ("Foreign(DropPath)", "Foreign(StochasticDepth)")

    @property
    def follows_host(self) -> bool:  # type: ignore[override]  # a constant elsewhere
        """Whether it runs in evaluation too: a module decides by its own mode."""
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
        """What the repr says: the target, its arguments, and the options that are set."""
        return {"": self.label[len("Foreign(") : -1], **dict(self.kwargs), **self._options()}


def _call_function(function: Callable[[Tensor], Tensor], x: Tensor, now: Now) -> Applied:
    return _counted(function, x, "function")


class _Hosted:
    """A module at one site: no child of the model, but in its layer's mode and on its device."""

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
            if x.is_meta:  # from where no number comes back
                module = copy.deepcopy(module)
            module.to(x.device)
        if not now.training:
            return _tensor(module(x), "module"), None
        return _counted(module, x, "module")

    def state_dict(self) -> dict[str, Tensor]:
        """The buffers of the module: statistics, say, that a training run has gathered."""
        return {
            name: buffer
            for name, buffer in self.module.state_dict().items()
            if isinstance(buffer, Tensor) and not is_lazy(buffer)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take buffers over, also where there is none yet, or one of another shape."""
        owners = dict(self.module.named_modules())
        for name, tensor in state.items():
            path, _, local = name.rpartition(".")
            if path not in owners or local not in owners[path]._buffers:
                raise ValueError(f"{type(self.module).__name__} has no buffer {name!r}")
            owners[path]._buffers[local] = tensor.detach().clone()  # a call moves it


def _tensor(y: object, kind: str) -> Tensor:
    if not isinstance(y, Tensor):
        raise TypeError(f"the {kind} must return a tensor, got {None if y is None else kind_of(y)}")
    return y


def _counted(function: Callable[[Tensor], Tensor], x: Tensor, kind: str) -> Applied:
    nonzero = x.detach() != 0  # before the call, which may work in place
    y = _tensor(function(x), kind)
    if y.shape != nonzero.shape:
        return y, None
    return y, zeroed(nonzero, y)


def is_foreign(value: Any) -> bool:
    """Whether a value in a spec means ``Foreign(value)``."""
    return isinstance(value, nn.Module) or (callable(value) and not inspect.isclass(value))
