"""Layers of other libraries: as regularizers (`Foreign`), or with another rate (`Retune`)."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch import Tensor, nn

from .._torch import children_of, parameters_of
from ..checks import Range
from ..functional.dropout import drop_units
from ..quoting import kind_of, label, quote
from ..registry import register, store
from ..schedules import Schedule
from ..selectors.dropouts import Unit, unit_of_layer
from .base import Applied, Now, Probability, RateLike, Regularizer
from .dropout import Dropout, Dropout1d, Dropout2d, Dropout3d, DropPath, DropsShare

_DEFAULTS = {f.name: f.default for f in fields(Regularizer)}  # of the options of all regularizers


@dataclass(frozen=True, init=False, repr=False)
class Foreign(Regularizer):
    """Wraps a module class without parameters, a module, or a function of a tensor.
    Use it for dropout of torchvision or timm, or of your own code.

    A module or a function in a spec means ``Foreign(module)``. Spec files cannot hold a `Foreign`.
    The class is called once, and each site has a copy of the module, in training mode. Schedules
    and floats in `kwargs` are set as attributes of the copy. The realized rate is the share of
    nonzero elements that became zero. The state of the attachment does not hold buffers.

    Example:
        >>> spec = {"layer4": Foreign(nn.Dropout2d, p=LinearSchedule(0.0, 0.1, epochs=10))}

    Args:
        target: the class, module or function.
        kwargs: arguments of the class; numbers may be schedules. With `grid`, tokens come as a map
            (N, C, height, width).
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None takes the only tensor.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: size of the map that tokens form, ``(height, width)``, each at least 1; None asks the
            model.
        prefix_tokens: number of class and register tokens before the map, at least 0, which stay
            unchanged. None asks the model.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).
    """

    target: Any
    kwargs: tuple[tuple[str, Any], ...]
    made: Any = field(init=False, repr=False, compare=False)  # what each site gets a copy of

    def __init__(self, target: Callable[..., Any], /, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name, default) for name, default in _DEFAULTS.items()}
        store(self, target=target, kwargs=tuple(kwargs.items()), **options)
        self.__post_init__()

    def __post_init__(self) -> None:
        store(self, made=self._make())
        super().__post_init__()

    def _make(self) -> Any:
        """Make the module, in training mode, or take the function; refuse everything else.

        The class is called here alone, because its objects may be large or draw random numbers.
        """
        target = self.target
        is_class = inspect.isclass(target)
        if not callable(target) or (is_class and not issubclass(target, nn.Module)):
            raise TypeError(f"Foreign takes a module, its class or a function, got {quote(target)}")
        if self.kwargs and not is_class:
            raise TypeError(f"{self.label} takes no arguments: it is not a class")

        if is_class:
            arguments = {**dict(self.kwargs), **self.values(0.0)}
            made = target(**arguments).train()
        elif isinstance(target, nn.Module):
            made = copy.deepcopy(target).train()
        else:
            return target

        if next(made.parameters(), None) is not None:
            raise ValueError(f"{self.label} has parameters, which no optimizer would train")
        return made

    @property
    def spatial(self) -> int | None:  # type: ignore[override]  # of each object, not of the class
        return None if self.grid is None else len(self.grid)

    @property
    def unit(self) -> Unit | None:  # type: ignore[override]
        return unit_of_layer(_name(self.target))

    @property
    def samplewise(self) -> bool:  # type: ignore[override]
        return self.unit == "samples"

    def check(self, values: Mapping[str, float]) -> None:
        for name, rate in self.rates.items():
            if isinstance(rate, Schedule) and not hasattr(self.made, name):
                raise ValueError(f"{self.label} has no attribute {name!r} for a schedule to set")

    def bind(self) -> Callable[[Tensor, Now], Applied]:
        instance = self.made
        if isinstance(instance, nn.Module):
            instance = copy.deepcopy(instance)
        return functools.partial(_applied, instance, [*self.rates])

    @property
    def label(self) -> str:
        return f"Foreign({_name(self.target)})"

    @property
    def rates(self) -> dict[str, RateLike]:
        return {name: value for name, value in self.kwargs if isinstance(value, float | Schedule)}

    def ranges(self) -> Mapping[str, Range]:
        return dict.fromkeys(self.rates, Range())  # the wrapped class checks its rates

    def _options(self) -> dict[str, Any]:
        """The options that all regularizers have, by name."""
        return {name: getattr(self, name) for name in _DEFAULTS}

    def with_rates(self, **rates: Any) -> Foreign:
        arguments = {**dict(self.kwargs), **rates, **self._options()}
        return Foreign(self.target, **arguments)

    def _stated(self) -> dict[str, Any]:
        """The parts of the repr by name: the target, its arguments and changed options."""
        options = self._options().items()
        changed = {name: value for name, value in options if value != _DEFAULTS[name]}
        return {"": _name(self.target), **dict(self.kwargs), **changed}


def _applied(target: Any, rates: list[str], x: Tensor, now: Now) -> Applied:
    """Call a module or a function; no module of the model holds the module."""
    for name in rates:
        setattr(target, name, getattr(now, name))
    buffers = target.buffers() if isinstance(target, nn.Module) else ()
    if any(buffer.device != x.device for buffer in buffers):
        target.to(x.device)

    nonzero = x.detach() != 0  # before a call that may work in place
    y = target(x)
    if getattr(y, "shape", None) != x.shape:
        return y, None  # the site refuses it

    dropped = (y.detach() == 0) & nonzero
    share = dropped.sum() / nonzero.sum().clamp_min(1)
    return y, (share * y.numel()).round().long()


def _name(target: object) -> str:
    """The name of a class or function, or of the class of a module."""
    return label(getattr(target, "__name__", kind_of(target)))


@register
class Retune(DropsShare, Regularizer):
    """Sets another rate, or a schedule, in a layer that already drops, such as ``nn.Dropout``.
    Use it for models that come with dropout. `Attachment.remove` restores every rate.

    The rate is a number in [0, 1] that the layer holds as ``p``, ``drop_prob``, ``prob``,
    ``drop_rate`` or ``drop_p``, or that an ``attr:`` selector names, such as ``nn.LSTM.dropout``.
    Dropouts of torch and drop paths get the rate 0, and a hook drops in their place: it measures
    their realized rate, and a schedule does not recompile. Other layers drop by themselves.

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
        grid: size of the map that tokens form, ``(height, width)``, each at least 1; None asks the
            model.
        prefix_tokens: number of class and register tokens before the map, at least 0, which stay
            unchanged. None asks the model.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).
    """

    p: Probability
    attribute: str = field(default="", init=False, repr=False, compare=False)
    ours: Regularizer | None = field(default=None, init=False, repr=False, compare=False)
    read_elsewhere: bool = field(default=False, init=False, repr=False, compare=False)

    linear: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True
    traced: ClassVar[bool] = True
    off: ClassVar[Mapping[str, float]] = {"p": 0.0}

    def check(self, values: Mapping[str, float]) -> None:
        if self.at != "output" or self.index is not None or self.layout != "auto":
            raise ValueError("Retune sets the rate of a layer: it takes no at, index or layout")

    @property
    def random(self) -> bool:  # type: ignore[override]  # of each object, not of the class
        return self.ours is not None

    @property
    def needs_calls(self) -> bool:  # type: ignore[override]
        return not self.read_elsewhere

    def fitted(
        self, attribute: str, ours: Regularizer | None = None, read_elsewhere: bool = False
    ) -> Retune:
        """Return a copy for a module whose rate is in this attribute.

        Args:
            attribute: the name of the attribute.
            ours: what a hook does in place of the module; None if the module drops by itself.
            read_elsewhere: whether code other than the module reads the rate.
        """
        fitted = copy.copy(self)
        store(fitted, attribute=attribute, ours=ours, read_elsewhere=read_elsewhere)
        return fitted

    def apply(self, x: Tensor, now: Now) -> Applied:
        if self.ours is None:
            return x, None

        spatial = self.ours.spatial
        if spatial in (1, 3) and x.ndim == spatial + 1:  # torch reads it as unbatched: (C, ...)
            return drop_units(x, now.p, 1)
        return self.ours.apply(x, now)


def held_rate(regularizer: Regularizer) -> str:
    """The attribute of its layer that a `Retune` sets; ``""`` of another regularizer."""
    return regularizer.attribute if isinstance(regularizer, Retune) else ""


def in_place_of(module: nn.Module) -> Regularizer | None:
    """The regularizer of this package that equals the layer; None if the layer is unknown."""
    if "forward" in vars(module):
        return None  # replaced on this one layer
    if unit_of_layer(type(module).__name__) != "samples":
        return _OF_TORCH.get(type(module).forward)

    mode = getattr(module, "mode", "row")
    if children_of(module) or parameters_of(module) or mode != "row":
        return None
    scale_by_keep = bool(getattr(module, "scale_by_keep", True))
    return DropPath(0.0, scale_by_keep=scale_by_keep)


_OF_TORCH: dict[Any, Regularizer] = {
    nn.Dropout.forward: Dropout(),
    nn.Dropout1d.forward: Dropout1d(),
    nn.Dropout2d.forward: Dropout2d(),
    nn.Dropout3d.forward: Dropout3d(),
}
