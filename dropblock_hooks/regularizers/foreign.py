"""Layers of other libraries: as regularizers (`Foreign`), or with another rate (`Retune`).

For a `Retune`, a `RetuneHook` of ``sites.held`` usually sets the rate of the layer to 0, and drops
in its place.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch import Tensor, nn

from .._torch import children_of, parameters_of
from ..checks import Range, as_number
from ..functional.dropout import drop_units
from ..quoting import kind_of, label, quote
from ..registry import register, store
from ..schedules import Schedule
from ..selectors.dropouts import Unit, unit_of_layer
from .base import Applied, Now, Probability, RateLike, Regularizer
from .dropout import Dropout, Dropout1d, Dropout2d, Dropout3d, DropPath, DropsShare

_DEFAULTS = {option.name: option.default for option in fields(Regularizer)}
"""The defaults of the options that all regularizers have."""


@dataclass(frozen=True, init=False, repr=False)
class Foreign(Regularizer):
    """Wraps a module class without parameters, a module, or a function of a tensor.
    Use it for dropout of torchvision or timm, or of your own code.

    A module or a function in a spec means ``Foreign(module)``. Spec files cannot hold a `Foreign`.
    The class is called once per `Foreign`, and each site has a copy of the module, in training
    mode. `Attachment.set` calls the class again, and so does `attach` if a schedule depends on the
    depth or on ``epochs=``. Schedules and floats in `kwargs` are set as attributes of the copy. The
    realized rate is the share of nonzero elements that became zero. The state of the attachment
    does not hold buffers.

    A target whose name says that it drops channels or blocks, such as ``Dropout2d`` or
    ``DropBlock2d``, gets maps (N, C, ...), whatever the layout of the layer. With `grid`, every
    target gets maps (N, C, ...) of this size. All others get the tensor as the layer gave it.

    Example:
        >>> spec = {"layer4": Foreign(nn.Dropout2d, p=LinearSchedule(0.0, 0.1, epochs=10))}

    Args:
        target: the class, module or function.
        kwargs: arguments of the class; numbers may be schedules.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses. It is refused
            where it would have no effect, because the target gets the tensor as it is.
        grid: size of the map that tokens form, ``(height, width)`` or ``(depth, height, width)``,
            each at least 1. None passes tokens without a map.
        prefix_tokens: number of class and register tokens before the map, at least 0, which stay
            unchanged. None asks the model. It requires `grid`.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).

    Raises:
        TypeError: if `target` is no module, class or function, or `kwargs` come without a class.
        ValueError: if the module has parameters, if it lacks the attribute that a schedule sets, or
            if an option has a value that is not allowed.
    """

    target: Any
    kwargs: tuple[tuple[str, Any], ...]
    made: Any = field(init=False, repr=False, compare=False)  # each site gets a copy of it

    def __init__(self, target: Callable[..., Any], /, **kwargs: Any) -> None:
        options = {}
        for name, default in _DEFAULTS.items():
            options[name] = kwargs.pop(name, default)

        arguments = tuple(kwargs.items())
        store(self, target=target, kwargs=arguments, **options)
        self.__post_init__()

    def __post_init__(self) -> None:
        store(self, made=self._make())
        super().__post_init__()

    def _make(self) -> Any:
        """Make the module, in training mode, or take the function; refuse everything else.

        The class is called here alone, and sites copy its object, because objects may be large or
        draw random numbers. `with_rates` makes a new `Foreign`, and so calls the class again.
        """
        target = self.target
        is_class = inspect.isclass(target)
        is_other_class = is_class and not issubclass(target, nn.Module)
        if is_other_class or not callable(target):
            raise TypeError(f"Foreign takes a module, its class or a function, got {quote(target)}")
        if self.kwargs and not is_class:
            raise TypeError(f"{self.label} takes no arguments: it is not a class")

        if is_class:
            arguments = dict(self.kwargs)
            arguments.update(self.values(0.0))
            made = target(**arguments)
        elif isinstance(target, nn.Module):
            made = copy.deepcopy(target)
        else:
            return target

        parameters = list(made.parameters())
        if parameters:
            raise ValueError(f"{self.label} has parameters, which no optimizer would train")
        return made.train()

    @property
    def spatial(self) -> int | None:  # type: ignore[override]  # objects of a class may differ
        if self.grid is None:
            return None
        is_volume = isinstance(self.grid, tuple | list) and len(self.grid) == 3
        return 3 if is_volume else 2  # the check of the options refuses all other grids

    @property
    def unit(self) -> Unit | None:  # type: ignore[override]
        return unit_of_layer(_name(self.target))

    @property
    def channelwise(self) -> bool:  # type: ignore[override]
        return self.unit in ("channels", "blocks")

    @property
    def samplewise(self) -> bool:  # type: ignore[override]
        return self.unit == "samples"

    def check(self, values: Mapping[str, float]) -> None:
        has_layout = self.layout != "auto"
        # for a target that drops samples, a stated layout says that axis 0 is the batch
        ignores_layout = self.grid is None and not (self.channelwise or self.samplewise)
        if has_layout and ignores_layout:
            raise ValueError(
                f"{self.label} gets the tensor as the layer gave it, so layout={self.layout!r} has "
                "no effect. Move the axes in a function of yours, and wrap that"
            )

        for name, rate in self.rates.items():
            is_missing = not hasattr(self.made, name)
            if is_missing and isinstance(rate, Schedule):
                raise ValueError(f"{self.label} has no attribute {name!r} for a schedule to set")

    def bind(self) -> Callable[[Tensor, Now], Applied]:
        instance = self.made
        if isinstance(instance, nn.Module):
            instance = copy.deepcopy(instance)

        names = list(self.rates)
        return functools.partial(_applied, instance, names)

    @property
    def label(self) -> str:
        return f"Foreign({_name(self.target)})"

    @property
    def rates(self) -> dict[str, RateLike]:
        rates: dict[str, RateLike] = {}
        for name, value in self.kwargs:
            if isinstance(value, float | Schedule):
                rates[name] = value
        return rates

    def ranges(self) -> Mapping[str, Range]:
        any_number = Range()  # because the wrapped class checks its rates
        return dict.fromkeys(self.rates, any_number)

    def _options(self) -> dict[str, Any]:
        """Return the options that all regularizers have, by name."""
        return {name: getattr(self, name) for name in _DEFAULTS}

    def with_rates(self, **rates: Any) -> Foreign:
        arguments = dict(self.kwargs)
        for name, rate in rates.items():
            # a rate given as an int becomes a float, because an int counts as a plain option
            is_number = name in self.rates and not callable(rate)
            arguments[name] = as_number(name, rate) if is_number else rate
        return Foreign(self.target, **arguments, **self._options())

    def _stated(self) -> dict[str, Any]:
        """Return the parts of the repr by name: the target, its arguments and changed options."""
        stated = {"": _name(self.target)}
        stated.update(self.kwargs)
        for name, value in self._options().items():
            if value != _DEFAULTS[name]:
                stated[name] = value
        return stated


def _applied(target: Any, rates: Sequence[str], x: Tensor, now: Now) -> Applied:
    """Call the module or the function of a site, and count the values that became zero.

    The wrapped module is no part of the model, so it is moved to the device of the tensor here.
    """
    for name in rates:
        setattr(target, name, getattr(now, name))
    if isinstance(target, nn.Module):
        is_elsewhere = any(buffer.device != x.device for buffer in target.buffers())
        if is_elsewhere:
            target.to(x.device)

    nonzero = x.detach() != 0  # before a call that may work in place
    y = target(x)
    if getattr(y, "shape", None) != x.shape:
        return y, None  # the site refuses such an output

    dropped = (y.detach() == 0) & nonzero
    # the site divides by the number of all elements, so its realized rate is this share
    share = dropped.sum() / nonzero.sum().clamp_min(1)
    return y, (share * y.numel()).round().long()


def _name(target: object) -> str:
    """Return the name of a class or function, or of the class of a module."""
    name = getattr(target, "__name__", kind_of(target))
    return label(name)


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
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.
    """

    p: Probability
    # set by `fitted`, which describes them
    attribute: str = field(default="", init=False, repr=False, compare=False)
    ours: Regularizer | None = field(default=None, init=False, repr=False, compare=False)
    read_elsewhere: bool = field(default=False, init=False, repr=False, compare=False)

    linear: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True
    traced: ClassVar[bool] = True
    off: ClassVar[Mapping[str, float]] = {"p": 0.0}

    def check(self, values: Mapping[str, float]) -> None:
        is_default = self.at == "output" and self.index is None and self.layout == "auto"
        if not is_default:
            raise ValueError("Retune sets the rate of a layer: it takes no at, index or layout")

    @property
    def random(self) -> bool:  # type: ignore[override]  # objects of a class may differ
        return self.ours is not None

    @property
    def needs_calls(self) -> bool:  # type: ignore[override]
        return not self.read_elsewhere  # other code may drop by the rate, and not call the layer

    def fitted(
        self, attribute: str, ours: Regularizer | None = None, read_elsewhere: bool = False
    ) -> Retune:
        """Return a copy for a module whose rate is in this attribute; `RetuneHook` calls it.

        Args:
            attribute: the name of the attribute.
            ours: the regularizer of a hook that drops in place of the module; None if the module
                drops by itself.
            read_elsewhere: whether code other than the module reads the rate.
        """
        fitted = copy.copy(self)
        store(fitted, attribute=attribute, ours=ours, read_elsewhere=read_elsewhere)
        return fitted

    def apply(self, x: Tensor, now: Now) -> Applied:
        if self.ours is None:
            return x, None

        spatial = self.ours.spatial
        if spatial in (1, 3):
            # nn.Dropout1d and nn.Dropout3d take a tensor with one axis less as (C, ...), without a
            # batch, but nn.Dropout2d takes it as (N, C, L)
            is_unbatched = x.ndim == spatial + 1
            if is_unbatched:
                return drop_units(x, now.p, axes=1)
        return self.ours.apply(x, now)


def held_rate(regularizer: Regularizer) -> str:
    """Return the attribute of its layer that a `Retune` sets; ``""`` for another regularizer.

    ``builtin`` asks this to find the site that sets a rate. ``plan`` asks it because a site that
    sets a rate acts even if its hook is never called.
    """
    if isinstance(regularizer, Retune):
        return regularizer.attribute
    return ""


def in_place_of(module: nn.Module) -> Regularizer | None:
    """Return the regularizer of this package that equals the layer; None if it is unknown."""
    if "forward" in vars(module):
        return None  # the forward of this one layer was replaced

    # a subclass is known if it inherits the forward of torch's class
    cls = type(module)
    if unit_of_layer(cls.__name__) != "samples":
        return _OF_TORCH.get(cls.forward)

    # StochasticDepth of torchvision has a mode in which it drops whole batches
    drops_rows = getattr(module, "mode", "row") == "row"
    does_more = children_of(module) or parameters_of(module)
    if does_more or not drops_rows:
        return None
    scale_by_keep = bool(getattr(module, "scale_by_keep", True))
    return DropPath(0.0, scale_by_keep=scale_by_keep)


_OF_TORCH: dict[Any, Regularizer] = {
    nn.Dropout.forward: Dropout(),
    nn.Dropout1d.forward: Dropout1d(),
    nn.Dropout2d.forward: Dropout2d(),
    nn.Dropout3d.forward: Dropout3d(),
}
