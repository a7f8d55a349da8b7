"""The observer: an immutable description of a measurement, and the state of a site.

A site has a `Watch` with this state. Outside of pauses, an `ObserveHook` calls `Watch.enter` in
each active call of its layer, and `Watch.update` if the call is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..axes.view import View
from ..functional.masks import wide_dtype
from ..regularizers.base import Regularizer
from ..tables import Columns

State: TypeAlias = dict[str, Any]
"""Tensors and numbers by name: the state of an observer at one site."""


class Seen(NamedTuple):
    """One call of a layer, or one gradient.

    Example:
        >>> Seen([torch.ones(2)], epoch=0.0, shared={}).tensor
        tensor([1., 1.])

    Attributes:
        tensors: the observed tensors, detached unless the observer `keeps_graph`; or one gradient.
        epoch: the time.
        shared: a dict of all sites of the attachment. Each class uses its own key.
        gradient: True for a gradient, which only has `at`, `scale` and `ticket` of the following.
        training: whether the layer was in training mode.
        differentiable: whether one of the tensors may get a gradient.
        nesting: returns the nested structure of the output. In place of a tensor, it has the index
            in `tensors`, and in place of another value None.
        given: the floating-point tensors among the layer's arguments, where `reads_given`.
        view: how the axes of a tensor are read; None if its channels are not known. Call it in
            `Observer.update` only, because it holds the graph of the tensors.
        at: the index of the tensor whose gradient it is.
        scale: the factor of the loss (AMP).
        ticket: the number of the call whose gradient it is; None, or -1 in compiled code, if a
            checkpoint has recomputed the call.
    """

    tensors: Sequence[Tensor]
    epoch: float
    shared: dict[str, Any]
    gradient: bool = False
    training: bool = True
    differentiable: bool = False
    nesting: Callable[[], Any] = lambda: 0
    given: Sequence[Tensor] = ()
    view: Callable[[Tensor], View | None] = lambda x: None
    at: int = 0
    scale: float | Tensor = 1.0
    ticket: int | None = None

    @property
    def tensor(self) -> Tensor:
        """The first tensor."""
        return self.tensors[0]

    def channels_first(self) -> Tensor | None:
        """Return a view of the first tensor as (N, C, ...), or None if its axes are not known."""
        view = self.view(self.tensor)
        if view is None:
            return None
        return view.to_maps(self.tensor)


class Compiled(NamedTuple):
    """The counts of compiled code at a site since they were read the last time.

    Example:
        >>> Compiled([0.0] * 7).place
        0

    Attributes:
        values: the numbers of the state, on the host.
        alive: the channels that had a value other than 0 in a call; None if they are not known.
        batches: the sums of `functional.measures.add_batch`; None without a BatchNorm.
        sums: the tensors of `Observer.start_sums`, by name.
        place: the number of the layer, in the order in which layers return.
        times_of_step: how much the time grows in a forward and its backward: 2 for each observed
            layer, and 2 more.
        before: the time at which the first of these calls began.
        turn: the number of earlier calls, counted from the last call that statistics measured; 0 if
            they measure the next call.
    """

    values: list[float]
    alive: Tensor | None = None
    batches: Tensor | None = None
    sums: Mapping[str, Tensor] = {}  # which nobody changes
    place: int = 0
    times_of_step: int = 4
    before: int = 0
    turn: int = 0


@dataclass(frozen=True, repr=False)
class Observer(Regularizer):
    """Base of the classes that measure a layer and change nothing.

    A subclass defines `start`, `update` and `compute`, which run as ordinary Python in compiled
    models too. The page "A regularizer of your own" explains the class variables.

    Example:
        >>> from dropblock_hooks import register
        >>> @register
        ... class LargestOutput(Observer):
        ...     def start(self):
        ...         return {"largest": torch.zeros(())}
        ...
        ...     def update(self, state, seen):
        ...         state["largest"] = torch.maximum(state["largest"], seen.tensor.abs().amax())
        ...
        ...     def compute(self, state):
        ...         return {"largest": float(state["largest"])}
        >>> LargestOutput(when="before")
        LargestOutput(when='before')

    Args:
        at: observe the layer's ``"output"`` or its ``"input"``, where no gradients are seen.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: size of the map that tokens form, ``(height, width)``, each at least 1; None asks the
            model.
        prefix_tokens: number of class and register tokens before the map, at least 0, which stay
            unchanged. None asks the model.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (in evaluation
            mode, too).
        when: see the activation ``"after"`` the regularizers of the layer, or ``"before"`` them. An
            observer of gradients alone sees them after, or before, the gradient regularizers.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type, or a subclass lacks one
            of the methods.
        ValueError: if a value is not allowed, or gradients are observed with
            ``at="input"``.
    """

    when: Literal["after", "before"] = field(default="after", kw_only=True)

    random: ClassVar[bool] = False
    parts: ClassVar[Literal["", "rows", "any"]] = "any"  # sharded gradients come as a whole
    states_defaults: ClassVar[bool] = False
    sees_values: ClassVar[bool] = True  # whether `update` gets activations
    whole: ClassVar[bool] = False  # whether it gets all tensors of a nested output
    reads_given: ClassVar[bool] = False  # whether it uses `Seen.given`
    compares_input: ClassVar[bool] = False  # whether it compares the output with the input
    keeps_graph: ClassVar[bool] = False  # whether tensors keep their autograd graph
    by_epoch: ClassVar[bool] = True  # False: one state of all time, which is not in the report
    reads_parameters: ClassVar[bool] = False  # whether `read_layer` reads numbers of parameters
    columns: ClassVar[Columns[Any]] = {}  # columns of the report; {}: a column for each result

    def __post_init__(self) -> None:
        needed = []
        if sees_tensors(self):
            needed.append("update")
        if self.by_epoch:
            needed.append("compute")

        for name in needed:
            if getattr(type(self), name) is getattr(Observer, name):
                raise TypeError(f"{type(self).__name__} must define {name}()")
        super().__post_init__()

    def start(self) -> State:
        """Return an empty state. `Watch` adds ``state["calls"]``, the number of measured calls."""
        return {}

    def update(self, state: State, seen: Seen) -> None:
        """Add one call of the layer, or one gradient, to the state.

        It should read no numbers from the device, which may be busy. Recomputations are left out.
        """
        raise NotImplementedError

    def is_due(self, state: State, turn: int, training: bool, shared: dict[str, Any]) -> bool:
        """Return whether a call of the layer, and its gradient, is to be measured in eager mode.

        For other calls, the hook starts no operator of torch.

        Args:
            state: the state of the site.
            turn: the number of the call in this epoch, from 0; of a parameter, of its gradient.
            training: whether the layer is in training mode.
            shared: see `Seen`.
        """
        return True

    def pause_at(self, state: State, turn: int, shared: dict[str, Any]) -> "Pause":
        """Return the pause at a turn: the next calls for which `is_due` is certainly False.

        The hook only counts these calls, if the layer is in training mode. A subclass that has its
        own `is_due`, or one of a mixin, inherits no pauses.
        """
        return NO_PAUSE

    def add_calls(self, state: State, calls: int) -> None:
        """Count further calls of the layer in eager mode, measured or not, as a `Watchdog` does."""

    def compute(self, state: State) -> Any:
        """Return the result: numbers by name, or an object with ``scalars()``.

        The tensors of the state are on the CPU. It is called only after at least one call.
        """
        raise NotImplementedError

    def merge(self, a: State, b: State) -> State:
        """Return the state of two ranks together: the sum of each number and tensor."""
        merged = {**b, **a}
        for name in a.keys() & b.keys():
            if isinstance(a[name], (Tensor, int, float)):
                merged[name] = a[name] + b[name]
        return merged

    def read_layer(self, state: State, module: nn.Module, parameter: str | None) -> None:
        """Read numbers from the layer itself, or from the owner of a parameter.

        It is called at both ends of an epoch, and before a report. A class that sees no tensors
        sets ``state["calls"]`` to 1 here, because the report shows nothing if it is 0.
        """

    def is_empty(self, state: State) -> bool:
        """Return whether the report should show the epoch before this one."""
        return not state["calls"]

    def start_compiled(self) -> list[float]:
        """Return the numbers of an empty state of compiled code, if the class is `traced`."""
        return []

    def start_sums(self, channels: int) -> dict[str, Tensor]:
        """Return further tensors of zeros to which compiled code adds, by name."""
        return {}

    def compiled_numbers(self, state: State) -> list[Any]:
        """Return further numbers that operators of compiled code need; see ``sites.observed``."""
        return []

    def finds_dead(self, state: State) -> bool:
        """Return whether compiled code looks for dead channels."""
        return False

    def take_compiled(self, state: State, counted: Compiled) -> int:
        """Add the counts of compiled code; return the number of calls in which it was active."""
        return 0

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # the operators of compiled code do the work of the inherited methods, not of new ones
        if {"start", "update"} & vars(cls).keys():
            cls.traced = vars(cls).get("traced", False)
        # a new `is_due` may be True in the pauses of an inherited `pause_at`
        if _depth_of("is_due", cls) < _depth_of("pause_at", cls):
            cls.pause_at = Observer.pause_at  # type: ignore[method-assign]  # of the subclass only

    def bind(self) -> Any:
        """Return a `Watch`, which has the state of a site."""
        return Watch(self)

    def check(self, values: Mapping[str, float]) -> None:
        if self.at == "input" and self.sees_gradients:
            raise ValueError(
                f"{self.label} can't see gradients at at='input': observe the output of the layer "
                "before, whose gradient is the same"
            )
        if not sees_tensors(self) and (self.at, self.index, self.layout) != (
            "output",
            None,
            "auto",
        ):
            raise ValueError(f"{self.label} reads parameters: it takes no at, index or layout")


def sees_tensors(observer: Observer) -> bool:
    """Return whether an observer gets tensors of a call, and does not only read the layer."""
    return observer.sees_values or observer.sees_gradients


def _depth_of(name: str, cls: type) -> int:
    """Return how many classes Python searches for a method before it finds it."""
    return next(depth for depth, base in enumerate(cls.__mro__) if name in vars(base))


@dataclass
class Pause:
    """Calls that are not measured, one after the other.

    Attributes:
        end: the turn after the last of these calls; inf until the pause is ended from outside.
    """

    end: float


NO_PAUSE = Pause(0)


class Awaited:
    """The gradient of a measured call.

    The hook that will see the gradient holds this object. If the graph of the call is freed and no
    gradient has come, the gradient is lost.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.shift = state["shift"]
        self.came = False

    def __del__(self) -> None:
        # after a shift, other calls are measured, which this loss says nothing about; see
        # `GradientStats.is_due`
        if not self.came and self.shift == self.state["shift"]:
            self.state["lost_gradients"] += 1


class Watch:
    """The state of an observer at one site.

    Example:
        >>> Capture().bind().open["calls"]
        0

    Attributes:
        observer: the observer.
        turn: the number of the next call in this epoch, from 0.
        counted: how many of the calls in `turn` the site and the observer have counted, too. They
            count the calls in a pause later; see `take_skipped`.
        pause: the next calls that are not measured. For these, the hook only adds to `turn`.
        was_due: whether the last call was measured. Its recomputation by a checkpoint is then
            measured too.
        awaited: the gradient of the last measured call of an operator in compiled code. In eager
            mode, the hook of the gradient holds it.
        open: the state of this epoch, or of all time.
        closed: the state of the epoch before; None before the first end of an epoch.
    """

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.turn = 0
        self.counted = 0
        self.pause = NO_PAUSE
        self.was_due = True
        self.awaited: Awaited | None = None
        self.open = self._started()
        self.closed: State | None = None

    def _started(self) -> State:
        self._device = torch.device("cpu")  # until the first tensor is on another device
        with torch.inference_mode(False), self._device:
            return {"calls": 0, **self.observer.start()}

    def enter(self, training: bool, shared: dict[str, Any]) -> bool:
        """Count a call, or a gradient of a parameter; return whether it is to be measured."""
        self.was_due = self.observer.is_due(self.open, self.turn, training, shared)
        self.observer.add_calls(self.open, 1)
        self.turn += 1
        self.counted += 1
        self.pause = self.observer.pause_at(self.open, self.turn, shared)
        return self.was_due

    def take_skipped(self) -> int:
        """Count the calls that the hook has only added to `turn`, and return their number."""
        calls = self.turn - self.counted
        if calls:
            self.counted = self.turn
            self.was_due = False
            self.observer.add_calls(self.open, calls)
        return calls

    def await_gradient(self) -> Awaited | None:
        """Return the gradient of a measured call, if the observer notes lost gradients."""
        return Awaited(self.open) if "lost_gradients" in self.open else None

    def note_recomputation(self) -> None:
        """Note that a checkpoint repeats a call, whose gradient will come.

        The first forward of a reentrant checkpoint has no graph, so the gradient seemed lost.
        """
        if "lost_gradients" in self.open:
            self.open["lost_gradients"] = 0

    @torch.inference_mode(False)
    def add_compiled(self, counted: Compiled, device: torch.device) -> int:
        """Add the counts of compiled code on a device; see `Observer.take_compiled`."""
        if device != self._device:
            self._device = device
            self.open.update(on_device(self.open, device))

        return self.observer.take_compiled(self.open, counted)

    @torch.inference_mode(False)  # the tensors of that mode can't be changed outside of it
    def update(self, seen: Seen) -> int:
        """Add one call of the layer, or a gradient, and return the number of the call."""
        device = seen.tensors[0].device
        if device != self._device:
            self._device = device
            self.open.update(on_device(self.open, device))

        self.observer.update(self.open, seen)
        number: int = self.open["calls"]
        # otherwise the call of this gradient was counted before
        if not (seen.gradient and self.observer.sees_values):
            self.open["calls"] = number + 1
        return number

    def close_window(self) -> None:
        """Begin the state of a new epoch."""
        if not self.observer.by_epoch:
            return
        self.closed = {name: x for name, x in self.open.items() if not isinstance(x, Unsaved)}
        self.open = self._started()
        self.turn = 0
        self.counted = 0
        self.pause = NO_PAUSE

    def shown(self) -> State | None:
        """Return the state for the report, on the CPU; None without any call."""
        state = self.open
        if self.closed is not None and self.observer.is_empty(state):
            state = self.closed
        if not (self.observer.by_epoch and state["calls"]):
            return None
        return on_device(state, torch.device("cpu"))

    def result(self) -> Any:
        """Return the result of the observer for the present state."""
        return self.observer.compute(self.open)


class Unsaved(dict[Any, Any]):
    """A dict in a state that is not copied or saved: its copies and pickles are empty."""

    def __reduce__(self) -> Any:
        return Unsaved, ()


def on_device(state: State, device: torch.device) -> State:
    """Return the state with its tensors on a device, in float32 if it has no float64."""
    moved = dict(state)
    for name, x in state.items():
        if isinstance(x, Tensor):
            dtype = wide_dtype(device) if x.dtype is torch.float64 else x.dtype
            moved[name] = x.to(device, dtype)
    return moved
