"""The regularizer: an immutable description of what to do at a layer; one method, ``apply``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

from torch import Tensor, nn

from ..axes.options import AxisOptions
from ..checks import LARGEST, check_option
from ..quoting import label, quote, shown
from ..registry import brief, check_fields, name_of
from ..schedules import Schedule, is_moving, same_kind, value_at
from .rates import Range, RateLike, checked_rate, hints_of, is_optional, ranges_of


class Now:
    """What holds during one call: the rate fields by name, as floats, and the following.

    Attributes:
        input: the layer's first input (a tensor, as a rule); for ``at="input"`` the value itself.
        layout: the axes of the tensor as the layer gave it, for example ``"NCHW"``; "" if unknown.
        training: the mode of the layer.
        grad_scale: what the loss was multiplied by (AMP): gradient bounds are multiplied by it.
        parameter: whose gradient it is, at ``param:`` selectors.
        norms: ``apply`` may leave here the norms that it has taken of a gradient, of the unscaled
            loss: the report shows how large they are.
    """

    input: Any
    layout: str
    training: bool
    grad_scale: float | Tensor
    parameter: Tensor | None = None
    norms: Tensor | None = None

    def __init__(
        self,
        *,
        input: Any,
        layout: str,
        training: bool,
        grad_scale: float | Tensor,
        **values: Any,
    ) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        self.input, self.layout = input, layout
        self.training, self.grad_scale = training, grad_scale

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"now has no {name!r}; it has {', '.join(vars(self))}")


Applied: TypeAlias = tuple[Tensor, "Tensor | int | None"]
"""What ``apply`` returns: the new tensor, and how many elements were dropped or changed."""


@dataclass(frozen=True, repr=False)
class Regularizer:
    """Base of all regularizers. A subclass has fields and ``apply``, and ``register`` above it.

    Rate fields are annotated `Rate`, `Probability`, `NonNegative` or `Positive`; they take a number
    or a schedule, and are checked against their range.

    Args:
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: which element of a tuple, list or dict; for inputs also the keyword.
        layout: the axes of the tensor, ``"NCHW"``, ``"NHWC"``, their 1d and 3d kin, or ``"NLC"``
            for tokens; ``"auto"`` decides from what the model tells, and refuses where it can't.
        grid: size of the map that tokens form, ``(height, width)``, where the model does not tell.
        prefix_tokens: how many tokens before those of the map are left alone, class and register
            tokens; None takes what the model tells.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout at evaluation).
    """

    at: Literal["output", "input"] = field(default="output", kw_only=True)
    index: int | str | None = field(default=None, kw_only=True)
    layout: str = field(default="auto", kw_only=True)
    grid: tuple[int, ...] | None = field(default=None, kw_only=True)
    prefix_tokens: int | None = field(default=None, kw_only=True)
    active: Literal["train", "always"] = field(default="train", kw_only=True)

    def apply(self, x: Tensor, now: Now) -> Applied:
        """The regularized tensor (`x` itself where nothing is to be done) and a count.

        `x` is the activation, with its axes as the layer gives them; ``channelwise`` or ``spatial``
        classes get the channels on axis 1. Where ``acts_on`` is "gradient", it is the gradient. The
        count is the number of elements dropped or changed: an int or a 0-dim tensor (not read until
        someone asks), or None where that means nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} must define apply(x, now)")

    # What a class of your own may say besides: CONTRIBUTING.md has examples -----------------------

    acts_on: ClassVar[Literal["activation", "gradient"]] = "activation"
    """Whether ``apply`` takes the activation, or the gradient that comes back to it."""
    channelwise: ClassVar[bool] = False
    """Whether ``apply`` needs to know the channels: `x` then comes as (N, C, ...), whatever the
    layout, and what is returned is put back. A parameter comes as (1, C, ...): its axis 0."""
    spatial: ClassVar[int | None] = None
    """Number of spatial axes that ``apply`` needs: `x` then comes as (N, C, ...) with so many, also
    of tokens that form a map."""
    samplewise: ClassVar[bool] = False
    """Whether ``apply`` takes axis 0 for the samples: tensors of which that is doubtful are refused
    (those of channelwise and spatial classes always are)."""
    needs_input: ClassVar[bool] = False
    """Whether ``apply`` uses ``now.input``, which a layer may then not give back changed."""
    linear: ClassVar[bool] = False
    """Whether ``apply`` multiplies each element by a number that does not depend on `x`, such as a
    mask or noise. The backward is then ``apply`` on the gradient with the same random numbers. A
    subclass that defines ``apply`` or ``bind`` must set it again."""
    random: ClassVar[bool] = True
    """Whether ``apply`` draws random numbers: ranks and recomputations are then looked at."""
    idle_at_zero: ClassVar[bool] = False
    """Whether ``apply`` gives the very same tensor back, and counts 0 or None, where its first rate
    is 0: in eager mode it is then not run again on a shape that it has seen."""
    reads_grad_scale: ClassVar[bool] = False
    """Whether ``apply`` multiplies a bound by ``now.grad_scale``: a GradScaler in use that
    ``attach`` was not given is then told."""
    follows_host: ClassVar[bool] = False
    """Whether it runs in evaluation too, told by ``now.training``."""

    def check(self, values: Mapping[str, float]) -> None:
        """Raise ValueError where fields don't go together; `values` are the rates at one time."""

    def refusal(self, module: nn.Module, parameter: nn.Parameter | None) -> str | None:
        """Why it can't work on this layer or parameter, or None."""
        no_map = parameter is not None and self.spatial is not None
        return f"a parameter has no map, which {self.label} needs" if no_map else None

    def bind(self) -> Callable[[Tensor, Now], Applied]:
        """Return the callable of one site: ``apply``, or an object with a state of its own.

        ``Attachment.set`` calls it again. The new object takes over the state of the old one if
        both have ``state_dict`` and ``load_state_dict``.
        """
        return self.apply

    def block_in_force(self, map_size: tuple[int, ...]) -> tuple[int, ...] | None:
        """The block that is dropped on a map of this size, or None."""
        return None

    def bounds_at(self, norm: float) -> dict[str, float]:
        """Rates by name with which what lies beyond this norm is changed; none where none is."""
        return {}

    def expected_share(
        self, values: Mapping[str, float], map_size: tuple[int, ...] | None
    ) -> float | None:
        """Share of the elements dropped on average at these rates on this map; None if unknown."""
        return None

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if {"apply", "bind"} & vars(cls).keys() and "linear" not in vars(cls):
            cls.linear = False  # what an inherited `linear` says is of another `apply`

    # What the package asks of every regularizer ---------------------------------------------------

    def __post_init__(self) -> None:
        check_fields(type(self))
        check_option("at", self.at, ("output", "input"))
        check_option("active", self.active, ("train", "always"))
        if isinstance(self.index, bool) or not isinstance(self.index, int | str | None):
            raise TypeError(f"index must be an integer or a key, got {quote(self.index)}")
        if isinstance(self.index, int) and abs(self.index) > LARGEST:
            raise ValueError(f"index must be an integer or a key, got {quote(self.index)}")
        self.axes.check(self.spatial, self.label)
        self._check_rates()
        self._check_others()
        self.check(self.values(0.0))

    def _check_rates(self) -> None:
        for name, allowed in self.ranges().items():
            rate = getattr(self, name)
            if rate is not None or not is_optional(_class_of(self), name):
                object.__setattr__(self, name, checked_rate(name, rate, allowed))

    def _check_others(self) -> None:
        hints, rates = hints_of(_class_of(self)), self.ranges()
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            if isinstance(value, Schedule) and name not in rates:
                raise TypeError(f"{name} takes no schedule; of a class of yours, annotate it Rate")
            if hints.get(name) is bool and not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {shown(value)}")

    @property
    def axes(self) -> AxisOptions:
        """What the user says about the axes."""
        return AxisOptions(self.layout, self.grid, self.prefix_tokens)

    @property
    def accumulates(self) -> bool:
        """Whether it acts once per update, on gradients of parameters: see `OnGradients`."""
        return False

    @property
    def kind(self) -> object:
        """What may be on a layer once: the class."""
        return type(self)

    @property
    def label(self) -> str:
        """The name in site keys."""
        return name_of(type(self))

    def ranges(self) -> Mapping[str, Range]:
        """The names of the rate fields, and the values they may take."""
        return _ranges(_class_of(self))

    @property
    def rates(self) -> dict[str, RateLike]:
        """The rate fields that are set: numbers and schedules by name."""
        rates = {name: getattr(self, name) for name in self.ranges()}
        return {name: rate for name, rate in rates.items() if rate is not None}

    @property
    def moving(self) -> bool:
        """Whether any rate changes with time."""
        return any(is_moving(rate) for rate in self.rates.values())

    def values(self, t: float) -> dict[str, float]:
        """The values of the rate fields at time `t`, each checked against its range."""
        ranges, values = self.ranges(), {}
        for name, rate in self.rates.items():
            try:
                values[name] = value_at(rate, t)
            except (TypeError, ValueError) as error:
                raise same_kind(error, f"{name}: {error} at t={t:g}") from error
            if values[name] not in ranges[name]:
                raise ValueError(f"{name} must be {ranges[name]}, got {values[name]} at t={t:g}")
        return values

    def with_rates(self, **rates: Any) -> Regularizer:
        """A copy with other rates."""
        for name in rates:
            if name not in self.ranges():
                known = ", ".join(self.ranges()) or "none"
                raise ValueError(f"{self.label} has no rate {label(name)!r}; its rates: {known}")
        return replace(self, **rates)

    def __repr__(self) -> str:
        return brief(self)


def _class_of(regularizer: Regularizer) -> Any:  # Any: mypy takes no class as hashable here
    return type(regularizer)


@functools.cache
def _ranges(cls: Any) -> Mapping[str, Range]:
    found = ranges_of(cls)
    reserved = sorted(found.keys() & Now.__annotations__)
    if reserved:
        raise TypeError(f"{cls.__name__}: a rate can't be named {reserved[0]!r}, which Now has")
    return found
