"""``Watchdog``: keeps numbers at each site, which ``diagnosis.alerts`` judges together.

A *look* is a moment when they are judged: a `ModelHook` begins it after some forwards, and
`Attachment.step` when an epoch ends. The `Clock` decides which forwards are measured before it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from ..checks import Range, as_count, as_number, check_option
from ..functional.kernels import launch
from ..functional.measures import (
    BAD_CALLS,
    CALLS,
    DISTANCE,
    FIRST_BAD,
    FIRST_BAD_GRADIENT,
    FIRST_MADE,
    FIRST_WORSE,
    GRADIENT_NORM,
    GRADIENTS,
    MEASURED,
    NEAR,
    TINY,
    TURN,
    WATCHED,
    add_alive,
    alive_in_either,
    extremes,
    is_planned,
    largest_of_call,
    near_bounds,
    norm_of,
    norm_of_arguments,
    square_of,
    together,
)
from ..quoting import quote, shown
from ..registry import register, store
from .base import Compiled, Observer, Pause, Seen, State
from .batches import Batches
from .rows import Rows, rows_of
from .updates import Updates

RULES = (
    "nonfinite",
    "vanishing",
    "exploding",
    "dead",
    "saturated",
    "no_gradient",
    "no_update",
    "accumulating",
    "eval_norm",
    "equal_inputs",
)
_INF = math.inf
_ENOUGH = 4  # measured forwards that a rule about statistics needs
_MOST_UNREAD = 4096  # the most measurements of a site on the device, to bound their memory
_SHARE = Range(0, 1, open_low=True, open_high=True)
# layers are known by the names of their classes, which copies of torch's classes keep
_CAN_DIE = {"relu", "relu6", "threshold", "hardswish", "gelu", "silu", "swish", "mish"}
_BOUNDS = dict.fromkeys(("sigmoid", "hardsigmoid"), (0.0, 1.0))
_BOUNDS |= dict.fromkeys(("tanh", "hardtanh", "softsign"), (-1.0, 1.0))


@register
class Watchdog(Observer):
    """Warns of NaN, dead layers and other faults, with the layer, the epoch and a likely cure.

    Attach it to blocks and to the layers inside them. It looks at its numbers when an epoch
    (``attached.step``) or the ``with`` block of the attachment ends, and at each n-th training
    forward (`every`). It looks for NaN and Inf also at the forwards 1, 2, 4, 8, and so on, and at
    each measured forward that comes right after unmeasured ones. It waits for a device only then.
    If there are several faults, it names the first as the likely cause.

    Not every forward is measured. It measures the forwards at which it looks, the first forward of
    each epoch, and some forwards between two looks. The backward of such a forward is measured,
    too. Statistics need at least 4 measured forwards for each look. In other forwards, its hooks
    start no operator of torch. If NaN came in a forward that was not measured, the finding says
    between which forwards, and each forward is measured from then on. If the scale of a GradScaler
    has fallen at a look, each forward is measured up to the next look. Compiled code measures by
    the same plan, and counts the calls of each layer. A step that you capture with
    ``torch.cuda.graph`` is not measured, and its replays are not measured either. The rules:

    - ``nonfinite``: NaN or Inf: the layer that computed it or, in the backward, the first layer
      that such a gradient reaches. An output with -Inf may be a mask, so it counts once NaN
      follows. With a GradScaler that the attachment knows, gradients count
      only once its scale has fallen below 1.
    - ``vanishing``, ``exploding``: gradients in the first quarter of the layers are smaller, or
      larger, by `max_ratio` than in the last quarter, and not zero.
    - ``dead``: channels of a ReLU, or a similar activation, were zero in all calls.
    - ``saturated``: values of a sigmoid, a tanh or a similar activation are within 1 % of their
      bounds.
    - ``no_gradient``: a layer with trained parameters gets no gradient, or only zeros, and other
      layers get gradients.
    - ``no_update``: a layer gets gradients, and at least 3 updates change none of its parameters,
      because the learning rate is 0, or because the optimizer does not have them. The latter is
      not reported for the first layers, or if it holds for over a quarter of all layers, because
      these may be left out on purpose.

    - ``accumulating``: gradients are never cleared, so each update also uses the gradients of all
      earlier updates, because ``optimizer.zero_grad()`` is missing. If gradients may be kept, each
      forward is measured until 32 backwards have met them.

    - ``eval_norm``: a BatchNorm whose weight or bias is trained is in evaluation mode, and the
      model is in training mode.

    - ``equal_inputs``: all samples of a batch are equal in each measured forward since the last
      look, because a data loader repeats one sample, or inputs are zeros. Batches with a single
      sample, lists of tensors and graphs are not judged.

    Compiled code does not see the layers, so ``no_update``, ``accumulating``, ``eval_norm`` and
    ``equal_inputs`` need eager mode.

    Example:
        >>> model, found = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)), []
        >>> attached = attach(model, {"**": Watchdog("nonfinite", action=found.append)})
        >>> model[0].bias.data.fill_(torch.nan)
        tensor([nan, nan, nan, nan])
        >>> y = model(torch.ones(1, 4))
        >>> found[0].layer
        '0'

    Args:
        rules: the name of a rule or several names, or ``"all"``.
        at: ``"output"``; no other value is allowed.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (in evaluation
            mode, too).
        when: see the activation ``"after"`` the regularizers of the layer, or ``"before"`` them. An
            observer of gradients alone sees them after, or before, the gradient regularizers.
        action: ``"warn"``; ``"raise"``, which raises a `WatchdogError`; or a function to call
            with each `Finding`, whose errors stop the training. It cannot be written to a file.
        every: look at each n-th training forward of the model, at least 1, and measure some of the
            others; 1 measures each forward. 0 or None: measure each forward, and look only when an
            epoch or the block ends. Forwards are not counted where the whole model is compiled.
        max_ratio: the largest ratio of gradients at both ends of the model, above 1.
        max_dead: the largest share of a layer's channels that may be dead, in (0, 1).
        max_saturated: the largest share of a layer's values that may be saturated, in (0, 1).
        min_calls: the fewest calls of a layer that rules other than ``nonfinite`` need; at least 1.
            They also need 4 measured calls and gradients, or `min_calls` of them if that is below
            4. A layer with fewer waits for the next look.
        keep: how many steps before the first NaN or Inf the rule ``nonfinite`` shows of the layer
            that it names, at least 0: the largest magnitude of its output and the norm of its
            gradient in the last measured calls, with the numbers of these calls.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed, or no rule has the name.
        WatchdogError: in the training, if a rule holds and `action` is ``"raise"``.
    """

    rules: tuple[str, ...] | str = "all"
    action: str | Callable[[Any], Any] = field(default="warn", kw_only=True)
    every: int | None = field(default=100, kw_only=True)
    max_ratio: float = field(default=1e4, kw_only=True)
    max_dead: float = field(default=0.9, kw_only=True)
    max_saturated: float = field(default=0.8, kw_only=True)
    min_calls: int = field(default=10, kw_only=True)
    keep: int = field(default=0, kw_only=True)

    channelwise: ClassVar[bool] = True
    whole: ClassVar[bool] = True
    by_epoch: ClassVar[bool] = False
    reads_given: ClassVar[bool] = True
    needs_calls: ClassVar[bool] = False
    sees_gradients: ClassVar[bool] = True
    traced: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.rules, str) and self.rules != "all":
            store(self, rules=(self.rules,))
        super().__post_init__()

    @property
    def names(self) -> Sequence[str]:
        """The names of the rules."""
        return RULES if self.rules == "all" else self.rules

    @property
    def enough(self) -> int:
        """The number of measured forwards, or gradients, that the rules need."""
        return min(self.min_calls, _ENOUGH)

    def check(self, values: Mapping[str, float]) -> None:
        check_option("at", self.at, ("output",))
        if not isinstance(self.rules, Sequence) or not self.rules:
            raise TypeError(f"rules must be names of rules, got {shown(self.rules)}")
        for rule in self.names:
            check_option("rules", rule, RULES)
        if self.action not in ("warn", "raise") and not callable(self.action):
            text = "action must be 'warn', 'raise' or a function"
            raise ValueError(f"{text}, got {quote(self.action)}")
        as_count("every", self.every or 0, 0)
        as_count("min_calls", self.min_calls)
        as_count("keep", self.keep, 0)
        as_number("max_ratio", self.max_ratio, allowed=Range(1, open_low=True))
        as_number("max_dead", self.max_dead, allowed=_SHARE)
        as_number("max_saturated", self.max_saturated, allowed=_SHARE)

    def start(self) -> State:
        return {"watched": Watched(rows=Rows(self.keep))}

    def is_due(self, state: State, turn: int, training: bool, shared: dict[str, Any]) -> bool:
        # the clock plans training forwards only
        is_measured = not training or Clock.of(shared).measures
        return is_measured and not launch.is_captured()

    def pause_at(self, state: State, turn: int, shared: dict[str, Any]) -> Pause:
        return Clock.of(shared).pause

    def add_calls(self, state: State, calls: int) -> None:
        watched = state["watched"]
        watched.calls += calls
        watched.eager_calls += calls

    def read_layer(self, state: State, module: nn.Module, parameter: str | None) -> None:
        watched = state["watched"]
        name = type(module).__name__.lower()
        watched.can_die = "dead" in self.names and name in _CAN_DIE

        bounds = _BOUNDS.get(name)
        if bounds and isinstance(module, nn.Hardtanh):
            bounds = module.min_val, module.max_val
        watched.bounds = bounds if "saturated" in self.names else None

    def update(self, state: State, seen: Seen) -> None:
        watched = state["watched"]
        clock = Clock.of(seen.shared)
        clock.time += 1
        if seen.gradient:
            watched.see_gradient(seen, clock.time)
            if "accumulating" in self.names:
                must_measure_next = watched.updates.begin_backward(clock.unmeasured)
                if must_measure_next:
                    clock.measures = True
        else:
            watched.see(seen, clock.time)
        if len(watched.unread) >= _MOST_UNREAD:
            watched.read()

    def after_measured_forward(self, state: State, module: nn.Module) -> None:
        """Keep the parameters of a layer, and whether a BatchNorm is in evaluation mode.

        The `ModelHook` calls this after each measured training forward of the model.
        """
        watched = state["watched"]
        if "no_update" in self.names or "accumulating" in self.names:
            watched.updates.after_measured_forward(module)
        watched.evaluated += _has_statistics(module) and not module.training

    def start_compiled(self) -> list[float]:
        values = [0.0] * WATCHED
        for first in FIRST_BAD, FIRST_MADE, FIRST_WORSE, FIRST_BAD_GRADIENT:
            values[first] = _INF
        # a row is two numbers; there are rows of outputs and rows of gradients
        numbers_of_rows = 2 * 2 * self.keep
        return values + [0.0] * numbers_of_rows

    def distance(self, shared: dict[str, Any]) -> int:
        """Return how far apart compiled code measures forwards: 1 measures each of them."""
        clock = Clock.of(shared)
        if not self.every or clock.closely or clock.scale_fell:
            return 1
        return clock.distance(self.every, self.enough)

    def take_compiled(self, state: State, counted: Compiled) -> int:
        watched: Watched = state["watched"]
        calls = round(counted.values[CALLS])
        state["calls"] += calls
        watched.add_compiled(counted)
        return calls

    def compiled_numbers(self, state: State) -> list[float]:
        bounds = state["watched"].bounds
        if bounds is None:
            return []
        lower, upper = bounds
        return [float(lower), float(upper)]

    def finds_dead(self, state: State) -> bool:
        can_die: bool = state["watched"].can_die
        return can_die


def _has_statistics(module: nn.Module) -> bool:
    """Return whether a norm has running statistics."""
    return isinstance(getattr(module, "running_mean", None), Tensor)


class Gap(NamedTuple):
    """Forwards that were not measured."""

    before: int  # the number of the measured forward before them
    after: int  # the number of the measured forward after them
    time: int  # when they began


@dataclass
class Clock:
    """The state that all sites of an attachment share: which forwards are measured, and when.

    The `ModelHook` counts forwards here.
    """

    # the number of measured calls and gradients of all sites in eager mode: it orders them
    time: int = 0
    forwards: int = 0  # the training forwards since attaching
    looks: int = 0  # the number of looks that judged statistics
    alerts: dict[tuple[str, str], Any] = field(default_factory=dict)  # by site and rule
    # the pause of all sites while forwards are not measured; see `measures`
    pause: Pause = field(default_factory=lambda: Pause(0))
    since: int = 0  # the training forwards before the statistics began
    measured: int = 0  # the forwards with gradients that were measured since then
    epoch_began: int = 0  # the training forwards before the epoch
    epoch_length: int = 0  # the training forwards of the epoch before, if there was one
    unmeasured: int = 0  # the forwards with gradients that were not measured, in any mode
    last: int = 0  # the number of the last forward that was measured
    last_time: int = 0  # the time when that forward ended
    gap: Gap | None = None  # in a look: the unmeasured forwards just before the last one, if any
    closely: bool = False  # whether each forward is measured, because NaN came in such a gap
    scale: float = 0.0  # the factor of the loss at the last look
    scale_fell: bool = False  # whether the factor was larger at the look before that
    batches: Batches = field(default_factory=Batches)  # that enter the model

    @classmethod
    def of(cls, shared: dict[str, Any]) -> Self:
        """Return the clock in the shared state of an attachment. The first call makes it."""
        clock: Self | None = shared.get("Watchdog")
        if clock is None:
            clock = shared["Watchdog"] = cls()
        return clock

    @property
    def measures(self) -> bool:
        """Whether the next training forward is measured."""
        return self.pause.end == 0

    @measures.setter
    def measures(self, on: bool) -> None:
        self.pause.end = 0 if on else _INF

    def begin(self) -> None:
        """Begin the statistics anew, from the next forward on."""
        self.measured = 0
        self.since = self.forwards

    def end_epoch(self) -> None:
        """Keep the length of an epoch. The first forward of the next one is measured."""
        length = self.forwards - self.epoch_began
        if length:
            self.epoch_length = length
        self.epoch_began = self.forwards
        self.measures = True

    def count(self) -> None:
        """Count a training forward that has ended."""
        self.forwards += 1
        self.gap = None
        if not self.measures:
            self.count_unmeasured()
            return

        if self.last < self.forwards - 1:
            self.gap = Gap(before=self.last, after=self.forwards, time=self.last_time)
        self.last = self.forwards
        self.last_time = self.time
        self.measured += torch.is_grad_enabled()  # other forwards bring no gradients

    def count_unmeasured(self) -> None:
        """Count a forward that has ended and was not measured, if its backward may come."""
        self.unmeasured += torch.is_grad_enabled()

    def looks_for_nan(self, every: int) -> bool:
        """Return whether a `Watchdog` looks for NaN after the forward that has ended."""
        return self.gap is not None or is_planned(self.forwards, every)

    def plan(self, every: int, fewest: int) -> None:
        """Choose whether the next forward is measured.

        A forward at which a `Watchdog` looks is always measured. Statistics need `fewest` forwards
        whose backward comes before the look. These lie far apart, because a measured step takes
        several times as long as others.
        """
        coming = self.forwards + 1
        wanted = (coming - self.since) // self.distance(every, fewest)
        is_needed = self.measured < wanted
        is_suspicious = self.closely or self.scale_fell
        self.measures = is_needed or is_suspicious or is_planned(coming, every)

    def distance(self, every: int, fewest: int) -> int:
        """Return the distance of measured forwards, so that statistics get at least `fewest`."""
        # statistics are judged at each n-th forward, and when an epoch ends
        length = min(every, self.epoch_length or every)
        # one forward more, because the backward of the last one comes after the look
        return max(length // (fewest + 1), 1)

    def compare_scale(self, scale: float) -> None:
        """Compare the factor of the loss in a look with that in the look before."""
        self.scale_fell = scale < self.scale
        self.scale = scale


@dataclass
class Watched:
    """The counts of a site of a `Watchdog` since the last look, and a few that stay.

    `forget` resets the counts since the last look. Times are times of the `Clock`, and of
    ``Run.compiled_time`` in compiled code.
    """

    at: int = 0  # the time of the last call
    can_die: bool = False  # whether the rule ``dead`` applies to this layer
    bounds: tuple[float, float] | None = None  # of the values, if ``saturated`` applies to them
    bad: float = _INF  # the time of the first output with NaN or Inf
    made: float = _INF  # the time of the first such output of a finite input
    worse: float = _INF  # the time of the first output with NaN or +Inf; -Inf may be a mask
    grad_bad: float = _INF  # the time of the first gradient with NaN or Inf
    calls: int = 0  # all calls
    eager_calls: int = 0  # all calls since the beginning, in eager mode
    evaluated: int = 0  # the measured forwards in which a BatchNorm was in evaluation mode
    measured: int = 0  # the calls that were measured
    bad_calls: int = 0  # the measured calls whose output had NaN or Inf
    grads: int = 0  # the number of gradients
    norm: float = 0.0  # the sum of the finite gradient norms, in units of the unscaled loss
    near: Tensor | float = 0.0  # the sum over calls of the share of values at the bounds
    compiled_calls: int = 0  # all calls since the beginning, in compiled code
    unmeasured: int = 0  # the calls since the last measured one, in compiled code
    gap: int = 0  # how many calls before the first bad one were not measured, in compiled code
    bad_ago: int = 0  # how many calls came after the first bad one, in compiled code
    units: State = field(default_factory=dict)  # which channels were alive, from `add_alive`
    unread: list["Measurement"] = field(default_factory=list)
    updates: Updates = field(default_factory=Updates)
    rows: Rows = field(default_factory=Rows)  # of the last measured calls

    def forget(self, statistics: bool) -> None:
        """Forget values that were not finite, and with `statistics` all counts and sums."""
        self.bad = _INF
        self.made = _INF
        self.worse = _INF
        self.grad_bad = _INF
        self.gap = 0
        self.rows.forget()
        if statistics:
            self.calls = self.measured = self.bad_calls = self.grads = 0
            self.norm = self.near = 0.0
            self.evaluated = 0
            self.units = {}
            self.updates.forget()

    def see(self, seen: Seen, time: int) -> None:
        """Add one call of the layer."""
        x = seen.tensor
        self.at = time
        self.measured += 1

        numbers = largest_of_call(seen.tensors, seen.given)
        if numbers is None:  # without kernels
            numbers = self._numbers_of_call(seen)
        if numbers is not None:  # otherwise all values are finite, and no row is kept
            call = self.eager_calls + self.compiled_calls
            self.unread.append(Measurement(time, numbers, call, of_call=True))
        if not x.numel():
            return

        if self.can_die and x.ndim > 1:
            mapped = seen.channels_first()
            if mapped is None:
                mapped = guess_channels_first(x)
            add_alive(self.units, mapped, TINY)
        if self.bounds is not None:
            self.near = self.near + near_bounds(x, *self.bounds)

    def _numbers_of_call(self, seen: Seen) -> Tensor | None:
        """Return the numbers of a `Measurement` of a call.

        The result is None if all values are finite and no row is kept.
        """
        keeps = self.rows.keep > 0
        largest, positive = extremes(seen.tensors, exact=keeps)
        if positive is not None:
            return together([largest, positive, norm_of_arguments(seen.given)])
        # the output is finite, so nobody reads the other two numbers, and `largest` fills in
        return together([largest] * 3) if keeps else None

    def see_gradient(self, seen: Seen, time: int) -> None:
        """Add one gradient."""
        if not seen.tensor.numel():
            return
        self.grads += 1
        call = self.eager_calls + self.compiled_calls

        square = square_of(seen.tensor, seen.scale)
        if square is not None:
            self.unread.append(Measurement(time, square, call, is_square=True))
            return

        norm = norm_of(seen.tensor)
        if isinstance(seen.scale, Tensor) or seen.scale != 1.0:
            norm = norm / seen.scale
        self.unread.append(Measurement(time, norm, call))

    def add_compiled(self, counted: Compiled) -> None:
        """Add the counts of compiled code.

        In a forward, all layers return one after the other. Then the gradients come in reverse
        order.
        """
        values = counted.values
        times_of_step = counted.times_of_step

        def time_at(call: float, place: int) -> float:
            """Return the time at a place in the step of a call; inf for a call that never came."""
            if call < _INF:
                return counted.before + call * times_of_step + place
            return _INF

        place = counted.place + 1  # the first layer returns at time 1 of the step
        place_in_backward = times_of_step - counted.place  # up to the end of the step
        first_bad = time_at(values[FIRST_BAD], place)
        first_made = time_at(values[FIRST_MADE], place)
        first_worse = time_at(values[FIRST_WORSE], place)
        first_bad_gradient = time_at(values[FIRST_BAD_GRADIENT], place_in_backward)

        calls = round(values[CALLS])
        if calls:
            self.at = int(time_at(calls - 1, place))
        self.calls += calls
        self.measured += round(values[MEASURED])
        self.bad_calls += round(values[BAD_CALLS])
        self._add_plan(values, calls)  # before `self.bad` is set, because it reads the old value
        self._add_rows(values, calls)
        self.bad = min(self.bad, first_bad)
        self.made = min(self.made, first_made)
        self.worse = min(self.worse, first_worse)
        self.near = self.near + values[NEAR]

        self.grads += round(values[GRADIENTS])
        self.norm += values[GRADIENT_NORM]
        self.grad_bad = min(self.grad_bad, first_bad_gradient)

        if counted.alive is not None:
            self.units["alive"] = alive_in_either(self.units.get("alive"), counted.alive)

    def _add_plan(self, values: Sequence[float], calls: int) -> None:
        """Count the calls that were not measured at the end, and before the first bad one."""
        turn = round(values[TURN])
        distance = max(round(values[DISTANCE]), 1)
        self.compiled_calls = turn
        self.unmeasured = turn - last_planned(turn, distance)
        if values[FIRST_BAD] < _INF and self.bad == _INF:
            bad_turn = turn - calls + round(values[FIRST_BAD]) + 1
            self.gap = bad_turn - 1 - last_planned(bad_turn - 1, distance)
            self.bad_ago = turn - bad_turn

    def _add_rows(self, values: Sequence[float], calls: int) -> None:
        """Take over the rows and the first bad calls that compiled code has kept."""
        # behind the counts come the rows of the outputs, and then as many rows of the gradients
        middle = (WATCHED + len(values)) // 2
        first_call = self.eager_calls + self.compiled_calls - calls + 1
        self.rows.add_compiled(
            rows_of(values[WATCHED:middle], self.eager_calls),
            rows_of(values[middle:], self.eager_calls),
            first_bad=first_call + values[FIRST_BAD],
            first_bad_gradient=first_call + values[FIRST_BAD_GRADIENT],
        )

    def read(self) -> None:
        """Read the measurements of this site, and add them; this waits for a device."""
        read_together([self])

    def add_measurement(self, measurement: "Measurement", numbers: Iterator[float]) -> None:
        """Add a measurement. Its numbers are the next ones of the iterator."""
        first = next(numbers)
        time = measurement.time
        if measurement.of_call:
            self.rows.add(measurement.call, first)
            self._add_call(time, first, positive=next(numbers), given=next(numbers))
            return
        norm = math.sqrt(first) if measurement.is_square else first
        self.rows.add(measurement.call, norm, in_gradient=True)
        self._add_gradient(time, norm)

    def _add_gradient(self, time: int, norm: float) -> None:
        """Add the norm of a gradient, or its time if the norm is not finite."""
        if norm < _INF:
            self.norm += norm
        else:
            self.grad_bad = min(self.grad_bad, time)

    def _add_call(self, time: int, largest: float, positive: float, given: float) -> None:
        """Add the time of a call whose output is not finite, and whether its input is finite."""
        if largest < _INF:
            return
        self.bad_calls += 1
        self.bad = min(self.bad, time)
        if given < _INF:
            self.made = min(self.made, time)
        if not positive < _INF:
            self.worse = min(self.worse, time)


@dataclass(frozen=True)
class Measurement:
    """The measured numbers of a call or of a gradient, on its device.

    Attributes:
        time: the time of the `Clock`.
        numbers: the norm of a gradient; or three numbers of a call. The first is finite if all
            values of the output are; where rows are kept, it is the largest magnitude. The second
            is finite if none of them is NaN or +Inf. The third is finite if all values of the
            arguments are.
        call: the number of the call, or of the last call before the gradient.
        of_call: True for a call, False for a gradient.
        is_square: whether the norm is still to be computed as the square root.
    """

    time: int
    numbers: Tensor
    call: int
    of_call: bool = False
    is_square: bool = False


def guess_channels_first(x: Tensor) -> Tensor:
    """Return a tensor of unknown layout with its channels on axis 1.

    Tensors with 4 axes are taken to have them there, and others on the last axis.
    """
    return x if x.ndim == 4 else x.movedim(-1, 1)


def last_planned(turn: int, distance: int) -> int:
    """Return the number of the last measured call of compiled code up to `turn`; 0 if none."""
    while turn and not is_planned(turn, distance):
        turn -= 1
    return turn


def read_together(sites: Sequence[Watched]) -> None:
    """Read the measurements of several sites, and add them; this waits for a device once."""
    measurements = [(watched, unread) for watched in sites for unread in watched.unread]
    if not measurements:
        return
    for watched in sites:
        watched.unread = []

    numbers = iter(together([unread.numbers for _, unread in measurements]).tolist())
    for watched, measurement in measurements:
        watched.add_measurement(measurement, numbers)
