"""The regularizer: an immutable description of what to do at a layer; one method, ``apply``.

A site that gets a regularizer calls `Regularizer.bind` once, and keeps the result. It is usually
the method ``apply``. `perform` calls it for each tensor that the site regularizes.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from torch import Tensor, nn

from ..axes.view import check_axes
from ..checks import (
    NON_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    Range,
    as_index,
    as_number,
    check_arguments,
    check_option,
)
from ..pickling import set_state, state_of
from ..quoting import label, quote, shown
from ..registry import ShortSignature, brief, check_fields, name_of, store
from ..schedules import Schedule, same_kind, span_here, span_of, value_at
from ..selectors.dropouts import Unit

RateLike = float | Schedule | Callable[[float], float]
Rate = Annotated[RateLike, Range()]
"""Any number, or a schedule of it."""
Probability = Annotated[RateLike, PROBABILITY]
"""A number in [0, 1], or a schedule of it."""
NonNegative = Annotated[RateLike, NON_NEGATIVE]
"""A number >= 0, or a schedule of it."""
Positive = Annotated[RateLike, POSITIVE]
"""A number > 0, or a schedule of it."""
MapSize = tuple[int, ...] | None
Applied = tuple[Tensor, Tensor | int | None]
"""What ``apply`` returns."""


_OF_APPLY = (
    "function",
    "linear",
    "idle_at_zero",
    "traced",
    "off",
    "parts",
    "apply_all",
    "block_options",
)
"""What describes one ``apply``. A class that defines ``apply`` or ``bind`` inherits none of it."""


class Now:
    """The arguments of ``apply`` in a call: the rates by name, as floats, and these attributes.

    Example:
        >>> Dropout(0.5).apply(torch.ones(0), Now(p=0.5))
        (tensor([]), 0)

    Attributes:
        input: the layer's first input; for ``at="input"`` the value to regularize.
        layout: the axes of the tensor as the layer gave it, such as ``"NCHW"``; "" if unknown.
        grad_scale: the factor of a GradScaler; multiply bounds of gradients by it.
        parameter: the parameter whose gradient it is, at ``param:`` selectors.
        activation: the activation whose gradient it is, if the class sets ``needs_activation``.
        norms: ``apply`` may store numbers for the report here, usually the norms of the gradient of
            the unscaled loss. Penalties store the penalty, adaptive clipping the ratios of norms.
        parameters: in ``apply_all``, the parameters whose gradients they are.
        anchor: the value of the parameter when it was attached, if the class sets ``anchored``.
        anchors: in ``apply_all``, these values of all parameters.
        norm_counts: ``apply_all`` stores here how many of the `norms` belong to each gradient. None
            means one for each.
        shards: in ``apply_all``, how sharded gradients are spread over processes; None if they are
            whole.
    """

    input: Any = None
    layout: str = ""
    grad_scale: float | Tensor = 1.0
    parameter: Any = None
    activation: Any = None
    norms: Tensor | None = None
    parameters: Sequence[Any] = ()
    anchor: Any = None
    anchors: Sequence[Any] = ()
    norm_counts: Sequence[int] | None = None
    shards: Any = None

    def __init__(self, **values: Any) -> None:
        # compiled code sets attributes instead, because dynamo of torch 2.9 can't trace the update
        if values:
            self.__dict__.update(values)

    def reduce_norms(self, norms: Tensor, norm_type: float, by_rows: bool = False) -> Tensor:
        """Return the norms of whole gradients, or of whole rows, from those of their local parts.

        If the gradients are not sharded, these are the same norms.
        """
        if self.shards is None:
            return norms
        whole: Tensor = self.shards.reduce_norms(norms, norm_type, by_rows)
        return whole

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"now has no {name!r}; it has {', '.join(vars(self))}. If {name!r} is a rate, annotate "
            f"it in the class as one: `{name}: Probability = 0.1`"
        )


@dataclass(frozen=True, repr=False)
class Regularizer:
    """Base of all regularizers. A subclass has fields and ``apply``, and ``register`` above it.

    Fields that are annotated `Rate`, `Probability`, `NonNegative` or `Positive` take a number or a
    schedule in their range. The page "A regularizer of your own" of the documentation explains the
    class variables, such as ``spatial = 2``.

    Example:
        >>> from dropblock_hooks import register
        >>> @register
        ... class Halve(Regularizer):
        ...     def apply(self, x, now):
        ...         return x / 2, None
        >>> Halve(at="input")
        Halve(at='input')

    Args:
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: size of the map that tokens form, ``(height, width)``, each at least 1; None asks the
            model.
        prefix_tokens: number of class and register tokens before the map, at least 0, which stay
            unchanged. None asks the model.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type, or a subclass does not
            define ``apply``.
        ValueError: if a value is not allowed.
    """

    at: Literal["output", "input"] = field(default="output", kw_only=True)
    index: int | str | None = field(default=None, kw_only=True)
    layout: str = field(default="auto", kw_only=True)
    grid: tuple[int, ...] | None = field(default=None, kw_only=True)
    prefix_tokens: int | None = field(default=None, kw_only=True)
    active: Literal["train", "always"] = field(default="train", kw_only=True)

    __signature__ = ShortSignature()

    # what ``apply`` receives
    acts_on: ClassVar[Literal["activation", "gradient"]] = "activation"
    channelwise: ClassVar[bool] = False  # whether it needs the axis of the channels, as axis 1
    spatial: ClassVar[int | None] = None  # the number of axes of the map that it needs
    samplewise: ClassVar[bool] = False  # whether it treats each sample of the batch differently
    needs_input: ClassVar[bool] = False  # whether it uses the input of the layer
    needs_activation: ClassVar[bool] = False  # at gradients: whether it reads ``now.activation``
    anchored: ClassVar[bool] = False  # at parameters: whether it reads ``now.anchor``
    penalizes: ClassVar[bool] = False  # whether ``now.norms`` are the values of a penalty
    needs_calls: ClassVar[bool] = True  # whether a layer that is never called is a fault
    reads_grad_scale: ClassVar[bool] = False  # whether it reads ``now.grad_scale``
    sees_gradients: ClassVar[bool] = False  # whether it measures gradients: see `Observer`

    # what ``apply`` does
    function: ClassVar[Callable[..., Any] | None] = None  # the pure function of its equation
    # the unit that it drops as a whole; None if it drops no activations
    unit: ClassVar[Unit | None] = None
    random: ClassVar[bool] = True  # whether it draws random numbers
    linear: ClassVar[bool] = False  # whether it multiplies by numbers that do not depend on ``x``
    # whether it does nothing while its first rate is 0: then it gets no activations
    idle_at_zero: ClassVar[bool] = False
    # rates at which it changes nothing, by name; empty if there are none
    off: ClassVar[Mapping[str, float]] = {}
    # rates that bound ``now.norms``, by name: 1 is an upper bound, -1 a lower one
    bounds: ClassVar[Mapping[str, int]] = {}
    # the parts of sharded gradients that it can act on: none, those of whole rows, or any
    parts: ClassVar[Literal["", "rows", "any"]] = ""

    # how its repr and the files of specs show it
    states_defaults: ClassVar[bool] = True  # whether they show numbers that equal their defaults

    # how compiled code runs it
    traced: ClassVar[bool] = False  # whether ``apply`` is traced, with rates as tensors

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_fields(cls, Regularizer)
        check_arguments(cls, args, kwargs, annotation="Probability")
        return super().__new__(cls)

    def __copy__(self) -> Self:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))  # without the checks of `__new__` and `__post_init__`
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return state_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        set_state(self, state)

    def apply(self, x: Tensor, now: Now) -> Applied:
        """Return the new tensor, or `x` itself, and how many elements were dropped or changed.

        The number is an int, a 0-dim tensor, or None if it has no meaning.
        """
        raise NotImplementedError

    def apply_all(self, grads: Sequence[Tensor], now: Now) -> Tensor | None:
        """Regularize all gradients of an update in place; return how many elements each changed.

        A class may define it, with ``torch._foreach_*`` operators, beside ``apply``. It is called
        with ``when="accumulated"``. The gradients share a device and a dtype, and belong to sites
        whose rates are equal. Each has at least one element, except parts of sharded gradients,
        which may be empty. All other gradients get ``apply``. The result is a tensor with a number
        for each gradient, or None if the numbers have no meaning.
        """
        raise NotImplementedError

    @property
    def block_options(self) -> str:
        """The options, if compiled code calls `functional.operators.drop_and_count`.

        They are a text; see `functional.operators.BlockOptions`. For "", compiled code calls
        ``apply``.
        """
        return ""

    def check(self, values: Mapping[str, float]) -> None:
        """Raise ValueError if fields contradict each other; `values` are the rates at one time.

        It runs when the object is made, at each ``step`` and ``set``. It stores nothing: values
        that follow from fields are stored by ``__post_init__``, or are properties.
        """

    def refusal(self, module: nn.Module, parameter: nn.Parameter | None) -> str | None:
        """Return why the regularizer can't work on this layer or parameter, or None."""
        if parameter is None:
            return None
        if self.spatial is not None:
            return f"a parameter has no map, which {self.label} needs"
        if self.samplewise:
            return f"a parameter has no samples, which {self.label} needs"
        return None

    def bind(self) -> Callable[[Tensor, Now], Applied]:
        """Return the callable of a site: ``apply``, or an object with a memory of its own.

        The object has ``state_dict()`` and ``load_state_dict(state)``, and is copied with the
        model.
        """
        return self.apply

    def block_in_force(self, map_size: tuple[int, ...]) -> MapSize:
        """Return the edges of a block on this map; None if it drops no blocks."""
        return None

    def expected_share(self, values: Mapping[str, float], map_size: MapSize) -> float | None:
        """Return the expected dropped share at these rates on this map; None if unknown."""
        return None

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # the class itself, and mixins in front of the regularizer that it extends
        new = []
        for part in cls.__mro__:
            if part is not cls and issubclass(part, Regularizer):
                break
            new.append(vars(part))
        if not any("apply" in names or "bind" in names for names in new):
            return

        check_apply(cls)
        for name in _OF_APPLY:
            if not any(name in names for names in new):
                setattr(cls, name, getattr(Regularizer, name))

    def __post_init__(self) -> None:
        cls: Any = type(self)  # mypy takes no class as hashable
        check_axes(self)
        ranges = _ranges_of(cls)
        reserved = ranges.keys() & Now.__annotations__
        if reserved:
            raise TypeError(f"{cls.__name__}: a rate can't be named {min(reserved)!r}: Now has it")

        for name, hint in hints_of(cls).items():
            value = getattr(self, name)
            if name in ranges:
                checked = _checked_rate(name, value, hint, ranges[name])
            else:
                checked = _checked_field(name, value, hint)
            if checked is not value:
                store(self, **{name: checked})

        if cls.apply is Regularizer.apply and cls.bind is Regularizer.bind:
            raise TypeError(f"{cls.__name__} must define apply(x, now)")
        self.check(self.values(0.0))

    @property
    def accumulates(self) -> bool:
        """Whether the regularizer acts once per update, on gradients of parameters."""
        return False

    @property
    def has_share(self) -> bool:
        """Whether there is an expected share. Then the realized rate counts idle calls too."""
        return type(self).expected_share is not Regularizer.expected_share

    @property
    def acts_on_all(self) -> bool:
        """Whether the class has ``apply_all``."""
        return type(self).apply_all is not Regularizer.apply_all

    @property
    def label(self) -> str:
        """The name of the class, in the keys of sites."""
        return name_of(type(self))

    def ranges(self) -> Mapping[str, Range]:
        """Return the ranges of the rate fields, by name."""
        cls: Any = type(self)
        return _ranges_of(cls)

    @property
    def rates(self) -> dict[str, RateLike]:
        """The rate fields that are set: numbers and schedules by name."""
        rates = {name: getattr(self, name) for name in self.ranges()}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def values(self, t: float) -> dict[str, float]:
        """Return the values of the rate fields at time `t`, each checked against its range."""
        ranges = self.ranges()
        values = {}
        for name, rate in self.rates.items():
            try:
                value = value_at(rate, t)
            except (TypeError, ValueError) as error:
                raise same_kind(error, f"{name}: {error} at t={t:g}") from error

            if value not in ranges[name]:
                raise ValueError(f"{name} must be {ranges[name]}, got {value} at t={t:g}")
            values[name] = value
        return values

    def off_values(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the rates for compiled code that is switched off."""
        return {name: self.off.get(name, value) for name, value in values.items()}

    def with_rates(self, **rates: Any) -> Regularizer:
        """Return a copy with other rates, which are checked."""
        for name in rates:
            if name not in self.ranges():
                known = ", ".join(self.ranges()) or "none"
                raise ValueError(f"{self.label} has no rate {label(name)!r}; its rates: {known}")

        changed = copy.copy(self)
        store(changed, **rates)
        changed.__post_init__()
        return changed

    def __repr__(self) -> str:
        return brief(self)


def check_apply(cls: type[Regularizer]) -> None:
    """Raise TypeError if ``apply`` of a class does not take the tensor and `Now`."""
    function = vars(cls).get("apply")
    if not inspect.isfunction(function):
        return

    signature = inspect.signature(function)
    try:
        signature.bind("self", "x", "now")
    except TypeError:
        names = ", ".join(signature.parameters)
        raise TypeError(
            f"{cls.__name__}.apply must take (self, x, now), got ({names}): write "
            "`def apply(self, x, now)`, where now.p is the present rate"
        ) from None


def rate_range(regularizer: Regularizer) -> tuple[float, float] | None:
    """Return the lowest and highest value of the first rate; None without a rate.

    The values of a plain function are not known in advance, so its value at time 0 is both.
    """
    if not regularizer.rates:
        return None

    rate = next(iter(regularizer.rates.values()))
    low, high = span_here(rate)  # of a `ByDepth` at a site, only the values at this site
    if not math.isfinite(high - low):
        first = next(iter(regularizer.values(0.0).values()))
        return first, first
    return low, high


def highest_rate(regularizer: Regularizer) -> float:
    """Return the highest value of the first rate; 0 without a rate."""
    span = rate_range(regularizer)
    if span is None:
        return 0.0
    _, high = span
    return high


def _checked_field(name: str, value: Any, hint: Any) -> Any:
    """Check the value of a field that is no rate; return the value to store, a tuple for a list."""
    if get_origin(hint) is Literal:
        check_option(name, value, get_args(hint))
    elif name == "index":
        return as_index(value)
    elif isinstance(value, list):
        return tuple(value)
    elif isinstance(value, Schedule):
        raise TypeError(f"{name} takes no schedule; of a class of yours, annotate it Rate")
    elif hint is bool and not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return value


def _checked_rate(name: str, rate: Any, hint: Any, allowed: Range) -> Any:
    """Check a rate; return a float, a schedule, or None for ``Rate | None``."""
    if rate is None and type(None) in get_args(hint):
        return None
    if inspect.isclass(rate):
        cls = rate.__name__
        raise TypeError(f"{name} got the class {cls}: write {cls}(...)")
    if not callable(rate):
        return as_number(name, rate, "a number or a schedule", allowed)
    for end in filter(math.isfinite, span_of(rate)):
        if end not in allowed:
            raise ValueError(f"{name} must be {allowed}, got {quote(rate)}, which reaches {end:g}")
    return rate


@functools.cache
def hints_of(cls: Any) -> Mapping[str, Any]:
    """Return the annotations of the arguments of a class, by name; derived fields are left out."""
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in fields(cls) if f.init}


@functools.cache
def _ranges_of(cls: Any) -> Mapping[str, Range]:
    """Return the ranges of the rate fields of a class, by name."""
    ranges: dict[str, Range] = {}
    for name, hint in hints_of(cls).items():
        for part in (hint, *get_args(hint)):  # in ``Rate | None``, the first part has the range
            for metadata in getattr(part, "__metadata__", ()):
                if isinstance(metadata, Range):
                    ranges[name] = metadata
    return ranges
