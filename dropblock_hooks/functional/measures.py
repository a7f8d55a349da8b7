"""Measurements of tensors for observers, as functions that add to a state.

Eager observers keep their state in a dict. In compiled code it is one tensor that an operator
changes, so that no Python runs between the operators. `sites.observed` calls these operators. They
call the same functions as the eager observers:

observer                     in eager mode            in compiled code
statistics of activations    add_measured, add_alive  add_statistics
statistics of gradients      add_measured             add_call, add_measured_gradient
`Watchdog`, activations      extremes, near_bounds    add_watched
`Watchdog`, gradients        norm_of, square_of       add_watched_gradient

Not each call is measured. A call, or a gradient, is *due* if it is measured. On a CPU, a `due` is a
bool. Other devices are not read, because that waits. There `due` is a tensor, everything is
computed, and `if_due` chooses between the new and the old numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from .._torch import NO_TASK, graph_task
from . import in_graph
from .kernels import launch
from .masks import wide_dtype
from .operators import operator

KEPT, COUNT, SUM, SQUARES, NORMS, ZEROS, NONFINITE, BINS = range(8)
"""The places in ``state["sums"]``, the sums over the measured calls.

KEPT        measured calls without NaN and Inf; COUNT to NORMS cover only these calls
COUNT       the number of values
SUM         the values
SQUARES     their squares
NORMS       the norms of the calls
ZEROS       values that are 0
NONFINITE   values that are NaN or Inf
BINS        here begin the bins: smaller magnitudes, each octave, larger magnitudes
"""
ON, TRAINED, EVALUATED, OFF, CALLS, ALL_VALUES, LARGEST, SUMS = range(1, 9)
"""The places in the tensor of `add_statistics`. That of `add_watched` has them up to CALLS, too.

0           1 if the site is on in evaluation mode, else 0
ON          1 if the site is on in training mode, else 0
TRAINED     calls of the layer in training mode
EVALUATED   calls of the layer in evaluation mode
OFF         calls in training mode while the site was off
CALLS       calls while the site was on, measured or not; for `add_statistics`, also gradients
ALL_VALUES  values of the measured calls
LARGEST     the largest magnitude
SUMS        here begin the sums, with the places from KEPT on
"""
BAD_CALLS, FIRST_BAD, FIRST_MADE, GRADIENTS, GRADIENT_NORM, FIRST_BAD_GRADIENT, NEAR = range(6, 13)
FIRST_WORSE, MEASURED, TURN, DISTANCE, SEEN_GRADIENTS, FOUND = range(13, 19)
SQUARE, WATCHED = 21, 22
"""More places in the tensor of `add_watched`.

A site has two such tensors: one for its calls, and one for its gradients. Both have all places,
because their numbers are added when they are read.

BAD_CALLS           measured calls whose output has NaN or Inf
FIRST_BAD           the number of CALLS before the first bad call; Inf if there was none
FIRST_MADE          the same of bad calls with finite arguments: the layer made the NaN or Inf
GRADIENTS           measured gradients
GRADIENT_NORM       the sum of their finite norms
FIRST_BAD_GRADIENT  the number of SEEN_GRADIENTS before the first with NaN or Inf; Inf if none
NEAR                the sum over calls of the share of saturated values
FIRST_WORSE         as FIRST_BAD, but for NaN and +Inf only, because -Inf may be a mask
MEASURED            measured calls
TURN                all calls, or gradients, so far; it goes on when reading clears other counts
DISTANCE            the distance of measured calls or gradients, see `is_planned`
SEEN_GRADIENTS      gradients while the site was on, measured or not
FOUND               here begin three numbers of a call, only for kernels
SQUARE              a number of a gradient, only for kernels
WATCHED             the number of places above; the rows begin here, see `rows_in`
"""
_ROW = 4096  # how many values are added up in float32
TINY = 1e-12  # the magnitude up to which a Watchdog calls a channel dead
READ = {"cpu"}
"""The types of devices whose tensors are read to decide what to do; a test takes the CPU out."""
_NEAR = 0.01  # the distance from a bound at which a value is saturated, as a share of the range


def add_measured(
    state: dict[str, Any], x: Tensor, scale: float | Tensor, exponents: tuple[int, int]
) -> None:
    """Add the values of a call, divided by `scale`: moments, shares and octaves.

    The octaves lie between these exponents of 2.
    """

    def with_kernels() -> None:
        from .kernels import moments

        # without a gate, the kernels use only the places in the sums
        places = moments.Places(KEPT, ZEROS, BINS, TRAINED, OFF, ALL_VALUES)
        moments.measure(x, state["sums"], state["largest"], exponents, places, scale)
        state["all_values"] += x.numel()

    def with_torch() -> None:
        add_moments(state, x, scale)
        add_shares(state, x.float() / scale, octaves(*exponents))

    if launch.takes(x):
        launch.or_else(with_kernels, with_torch)
    else:
        with_torch()


def add_moments(state: dict[str, Any], x: Tensor, scale: float | Tensor = 1.0) -> None:
    """Add the moments of a call, divided by `scale`. A call with NaN or Inf adds nothing."""
    sums = state["sums"]
    count = x.numel()
    if not count:
        x = x.new_zeros(1)  # adds nothing but the call

    low, high = torch.aminmax(x)
    largest = torch.maximum(high, -low).to(sums.dtype)
    total, norm = _sum_and_norm(x, largest)
    total = total / scale
    norm = norm / scale
    largest = largest / scale

    ones = torch.ones_like(norm)
    added = torch.stack((ones, ones * count, total, norm.square(), norm))
    finite = torch.isfinite(largest)
    sums[KEPT:ZEROS].add_(torch.where(finite, added, 0.0))
    state["largest"].clamp_(min=torch.where(finite, largest, 0.0))


def _sum_and_norm(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and the norm of a tensor with this largest magnitude, in a wide type."""
    wide = wide_dtype(x.device)
    may_use_rows = x.device.type == "cpu" and x.dtype.itemsize <= 4
    # in float32, squares of other magnitudes would overflow or vanish
    if may_use_rows and 1e-12 < float(largest) < 1e15:
        total, norm = _sum_and_norm_by_rows(x)
        squares = float(norm) ** 2
        square_of_sum = float(total) ** 2
        # the variance of nearly equal values needs more digits than float32 has
        values_differ = squares > 1.01 * square_of_sum / x.numel()
        if values_differ:
            return total, norm
    return x.sum(dtype=wide), vector_norm(x, dtype=wide)


def in_memory_order(x: Tensor) -> Tensor:
    """Return the values as one row, in the order of their places in memory, where possible."""
    order = sorted(range(x.ndim), key=x.stride, reverse=True)
    return x.permute(order).reshape(-1)


def _sum_and_norm_by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and the norm of a tensor, from those of rows of `_ROW` values.

    A row is added up in float32, and the results in float64. On a CPU, torch adds up float32 in
    float64 ten times slower than in float32.
    """
    flat = in_memory_order(x).float()
    whole = flat.numel() // _ROW * _ROW
    rows = flat[:whole].view(-1, _ROW)
    rest = flat[whole:].double()

    sums_of_rows = rows.sum(1)
    total = sums_of_rows.sum(dtype=torch.float64) + rest.sum()

    norms_of_rows = vector_norm(rows, dim=1)
    norm_of_rows = vector_norm(norms_of_rows, dtype=torch.float64)
    norm = torch.hypot(norm_of_rows, vector_norm(rest))
    return total, norm


def add_shares(state: dict[str, Any], x: Tensor, edges: Sequence[float]) -> None:
    """Count zeros, values that are not finite, and magnitudes by octave.

    Args:
        state: the state, which is changed.
        x: the values in float32. The octave of a value is its exponent.
        edges: the edges of the octaves, see `octaves`.
    """
    state["all_values"] += x.numel()
    bits = x.view(torch.int32)
    # of a float32: 127 for values from 1 to 2, 0 for zeros and subnormals, 255 for Inf and NaN
    exponents = ((bits >> 23) & 255).reshape(-1)
    if x.device.type == "cpu":
        counts = torch.bincount(exponents, minlength=256)
    else:  # bincount would wait for the device
        counts = torch.histc(exponents, 256, 0, 256)

    first = int(math.log2(edges[0])) + 127
    last = first + len(edges) - 1
    zeros = x.numel() - torch.count_nonzero(x)
    smaller = counts[:first].sum() - zeros  # which have the exponent 0
    larger = counts[last:255].sum(0, keepdim=True)
    shares = torch.stack((zeros, counts[255], smaller))
    added = torch.cat((shares, counts[first:last], larger))
    state["sums"][ZEROS:].add_(added)


def add_alive(state: dict[str, Any], x: Tensor, zero: float = 0.0) -> None:
    """Note which channels of a call (N, C, ...) were alive: had a magnitude above `zero`."""
    before: Any = state.get("alive")
    if before is None or before.shape != x.shape[1:2] or before.device != x.device:
        before = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device)

    def with_torch() -> Tensor:
        alive: Tensor = before | _alive_in(x, zero)
        return alive

    def with_kernels() -> Tensor:
        from .kernels import moments

        moments.alive(x, before, zero)
        alive: Tensor = before  # the kernel has changed it
        return alive

    alive = before
    if x.numel() and launch.takes(x):
        alive = launch.or_else(with_kernels, with_torch)
    elif x.numel() and not (x.device.type == "cpu" and bool(before.all())):
        alive = with_torch()
    state["alive"] = alive


def _alive_in(x: Tensor, zero: float) -> Tensor:
    """Return which channels of a tensor have a magnitude above `zero`, or NaN."""
    others = [0, *range(2, x.ndim)]
    largest = x.abs().amax(others)
    return ~(largest <= zero)


def alive_in_either(before: Tensor | None, now: Tensor) -> Tensor:
    """Return the channels that were alive before or now; only now, if their number has changed."""
    if before is None or before.shape != now.shape:
        return now
    return before.to(now.device) | now


def octaves(first: int, last: int) -> tuple[float, ...]:
    """Return the edges of octaves: all powers of 2 from one exponent to the other, rising."""
    return tuple(2.0**exponent for exponent in range(first, last + 1))


def add_batch(batches: Any, x: Tensor) -> Any:
    """Add a batch to the sums over batches: for each channel its mean, its variance, and 1.

    Returns the new sums.
    """
    if x.numel() <= x.shape[1]:  # a channel with a single value has no variance
        return batches
    wide = x.to(wide_dtype(x.device))
    others = [0, *range(2, x.ndim)]
    variance, mean = torch.var_mean(wide, others)
    added = torch.stack((mean, variance, torch.ones_like(mean)))
    return batches + added


def near_bounds(x: Tensor, lower: float, upper: float) -> Tensor:
    """Return the share of values within 1 % of the bounds."""
    edge = _NEAR * (upper - lower)
    at_bounds = (x < lower + edge) | (x > upper - edge)
    return at_bounds.mean(dtype=torch.float32)


def norm_of_arguments(arguments: Sequence[Tensor]) -> Tensor:
    """Return a number that is finite if the arguments of a layer are.

    -inf counts in the first argument only, because masks of attention hold it.
    """
    of_first = [norm_of(x) for x in arguments[:1] if x.numel()]
    of_others = [_largest_positive(x) for x in arguments[1:] if x.numel()]
    return _largest_of([*of_first, *of_others])


def extremes(tensors: Sequence[Tensor], exact: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return two numbers that say whether all values of tensors are finite.

    The first is finite if all values are; if `exact`, it is the largest magnitude. The second is
    finite if no value is NaN or +Inf, because -Inf may be a mask of logits. On a CPU, the second is
    None if all values are finite.
    """
    tensors = [x for x in tensors if x.numel()]
    measure = largest_magnitude if exact else norm_of
    largest = _largest_of([measure(x) for x in tensors])
    if largest.device.type == "cpu" and largest < math.inf:
        return largest, None
    return largest, _largest_of([_largest_positive(x) for x in tensors])


def _largest_positive(x: Tensor) -> Tensor:
    """Return the largest value, at least 0; NaN if there is one."""
    if x.element_size() == 1:
        x = x.float()  # torch has no extremes of float8
    return x.amax().clamp(min=0)


def largest_of_call(tensors: Sequence[Tensor], arguments: Sequence[Tensor]) -> Tensor | None:
    """Return the numbers of `extremes` and `norm_of_arguments`, by a kernel for each two tensors.

    Without kernels, it returns None. Then call these two functions.
    """
    if not _kernels_take([x for x in (*tensors, *arguments) if x.numel()]):
        return None
    from .kernels import moments

    def with_kernels() -> Tensor:
        device = (*tensors, *arguments)[0].device
        numbers = launch.zeros(device, 3).view(torch.float64)  # zeros of int64 have the same bits
        moments.largest_of_call(tensors, arguments, numbers)
        return numbers

    numbers: Tensor | None = launch.or_else(with_kernels, lambda: None)
    return numbers


def together(numbers: Sequence[Tensor]) -> Tensor:
    """Join numbers of any devices and shapes to one vector, on the device of the first."""
    device = numbers[0].device
    dtype = wide_dtype(device)
    return torch.cat([x.to(device, dtype).reshape(-1) for x in numbers])


def _kernels_take(tensors: Sequence[Tensor]) -> bool:
    """Return whether there are tensors, on one device, and kernels are used for all of them.

    These kernels compute in float32.
    """
    takes = all(x.dtype is not torch.float64 and launch.takes(x) for x in tensors)
    return takes and len({x.device for x in tensors}) == 1


def _largest_of(numbers: Sequence[Tensor]) -> Tensor:
    """Return the largest number, or NaN if one is NaN; 0 without any."""
    if len(numbers) == 1:
        return numbers[0]
    return together(numbers).amax() if numbers else torch.zeros(())


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest magnitude, or NaN if there is one."""
    if x.element_size() == 1:
        x = x.float()  # torch has no extremes of float8
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low)


def norm_of(x: Tensor) -> Tensor:
    """Return the norm. It is finite if all values are, also where their squares overflow.

    If even the norm in float64 overflows, the result is the largest magnitude.
    """
    if x.element_size() == 1:
        x = x.float()  # torch has no norm of float8
    fast = x.device.type == "cpu" and x.dtype is not torch.float64
    dtype = torch.float32 if fast else wide_dtype(x.device)
    norm: Tensor = vector_norm(x, dtype=dtype)
    if fast and not norm < math.inf:
        norm = vector_norm(x, dtype=torch.float64)

    if x.dtype is torch.float64:
        is_known_finite = x.device.type == "cpu" and norm < math.inf  # others are not read
        if not is_known_finite:
            norm = torch.where(norm < math.inf, norm, largest_magnitude(x))
    return norm


def square_of(x: Tensor, scale: float | Tensor = 1.0) -> Tensor | None:
    """Return the sum of squares of a tensor divided by a scale, by one kernel on a GPU.

    Without kernels, it returns None. Then call `norm_of`.
    """
    if not x.numel() or not _kernels_take([x]):
        return None
    from .kernels import moments

    square: Tensor | None = launch.or_else(lambda: moments.square_of(x, scale), lambda: None)
    return square


def rows_in(state: Tensor) -> int:
    """Return how many calls have a row in the tensor of `add_watched`; as many gradients have one.

    A row has the number of the call or gradient since the beginning, from 1, and its value: the
    largest magnitude or the norm. The rows of the gradients come after those of the calls.
    """
    return (state.shape[0] - WATCHED) // 4


def _keep_row(new: Tensor, value: Tensor, of_gradient: bool) -> None:
    """If all values so far were finite, add a row behind the others, and remove the oldest one."""
    keep = rows_in(new)
    if not keep:
        return

    begin = WATCHED + 2 * keep * of_gradient
    rows = new[begin : begin + 2 * keep]
    first_bad = new[FIRST_BAD_GRADIENT if of_gradient else FIRST_BAD]

    row = torch.stack((new[TURN] + 1, value.to(new)))
    moved = torch.cat((rows[2:], row))
    are_finite = (value.to(new) < math.inf) & (first_bad == math.inf)
    rows.copy_(torch.where(are_finite, moved, rows))


def recomputes() -> bool:
    """Return whether a checkpoint repeats the call; always False in a graph, which can't ask."""
    return graph_task() != NO_TASK and not launch.is_traced()


def is_planned(turn: int, distance: int) -> bool:
    """Return whether a number from 1 is a power of 2, or a multiple of `distance`.

    Compiled code measures these calls and gradients. In eager mode, a `Watchdog` looks for NaN
    after these forwards, and after others.
    """
    return turn.bit_count() == 1 or turn % distance == 0


def _is_next_planned(training: bool, state: Tensor) -> Any:
    """Return whether the next call is measured: the site is on, and `is_planned` holds.

    The result is a tensor on devices that are not read.
    """
    turn = state[TURN].long() + 1
    distance = state[DISTANCE].long().clamp(min=1)
    is_power = (turn & (turn - 1)) == 0
    planned = (is_power | (turn % distance == 0)) & (state[int(training)] > 0)
    may_read = state.device.type in READ and not launch.is_traced()
    return bool(planned) if may_read else planned


def due_call(training: bool, every: int, state: Tensor) -> Any:
    """Return whether the next call of `add_statistics` is measured.

    The result is a tensor on devices that are not read.
    """
    if recomputes():
        return False
    due = (state[CALLS] % every == 0) & (state[int(training)] > 0)
    may_read = state.device.type in READ and not launch.is_traced()
    return bool(due) if may_read else due


def _begin(training: bool, state: Tensor, calls: bool) -> Tensor | None:
    """Count a call by its mode, unless it is a gradient; return where to add the measurements.

    On a CPU, this is the state itself. Other devices are not read. There it is a copy, and `_end`
    writes it into the state if the site is on.

    Args:
        training: the mode of the layer.
        state: the state, which is changed.
        calls: True for a call of the layer, False for a gradient.

    Returns:
        The state or its copy. None if there is nothing to add, because a checkpoint repeats the
        call or, on a CPU, because the site is off.
    """
    if recomputes() and calls:
        return None
    on = state[int(training)]
    if calls:
        state[TRAINED if training else EVALUATED] += 1
        if training:
            state[OFF] += 1 - on
    if state.device.type not in READ or launch.is_traced():
        return state.clone()
    return state if float(on) else None


def _end(training: bool, state: Tensor, new: Tensor) -> None:
    """Write `new`, the result of `_begin`, into the state if it is a copy and the site is on."""
    if new is state:
        return
    on = state[int(training)] > 0
    state.copy_(torch.where(on, new, state))


def _changed_unseen(state: Tensor) -> Tensor:
    """Return the state, or in an operator an alias whose changes autograd does not see."""
    return state if launch.is_traced() else state.data


def nothing(*arguments: Any) -> None:
    """Do nothing: the fake implementation of an operator that only changes a state."""


def _measures_in_graph(
    x: Tensor,
    mapped: Tensor | None,
    batch: Tensor | None,
    scale: Tensor | None,
    state: Tensor,
    alive: Tensor | None,
    batches: Tensor | None,
    **others: Any,
) -> bool:
    """Return whether AOTAutograd can trace into `add_statistics`."""
    return in_graph.fits_kernels(x, mapped, batch, scale, state, alive, batches)


@operator(
    "add_statistics(Tensor x, Tensor? mapped, Tensor? batch, Tensor? scale, bool training, "
    "bool calls, int every, int first, int last, Tensor(a!) state, Tensor(b!)? alive, "
    "Tensor(c!)? batches) -> ()",
    fake=nothing,
    fits_graph=_measures_in_graph,
)
@torch.no_grad()
def add_statistics(
    x: Tensor,
    mapped: Tensor | None,
    batch: Tensor | None,
    scale: Tensor | None,
    training: bool,
    calls: bool,
    every: int,
    first: int,
    last: int,
    state: Tensor,
    alive: Tensor | None,
    batches: Tensor | None,
) -> None:
    """Add a tensor to the statistics of a site in compiled code.

    Args:
        x: the tensor.
        mapped: the tensor as (N, C, ...), to find dead channels; None to find none.
        batch: the input of a BatchNorm in training mode; None for other layers.
        scale: the factor of the loss, by which gradients are divided; None is 1.
        training: the mode of the layer.
        calls: True for a call of the layer, False for a gradient.
        every: each n-th call is measured.
        first: the exponent of 2 where the octaves begin.
        last: the exponent of 2 where they end.
        state: the state of the site, which is changed.
        alive: which channels had a value other than 0 in a call; changed.
        batches: the sums of `add_batch`; changed.
    """
    if recomputes() and calls:
        return
    measured = _MeasuredTensor(
        x=x,
        mapped=mapped,
        batch=batch,
        scale=scale,
        training=training,
        calls=calls,
        every=every,
        exponents=(first, last),
        state=state,
        alive=alive,
        batches=batches,
    )
    if launch.takes(x):
        launch.or_else(measured.add_with_kernels, measured.add_with_torch)
    else:
        measured.add_with_torch()


@dataclass(frozen=True)
class _MeasuredTensor:
    """A tensor to add to statistics; its attributes are the arguments of `add_statistics`."""

    x: Tensor
    mapped: Tensor | None
    batch: Tensor | None
    scale: Tensor | None
    training: bool
    calls: bool
    every: int
    exponents: tuple[int, int]
    state: Tensor
    alive: Tensor | None
    batches: Tensor | None

    def add_with_kernels(self) -> None:
        from .kernels import moments

        state = self.state
        mode = TRAINED if self.training else EVALUATED
        places = moments.Places(KEPT, ZEROS, BINS, mode, OFF, ALL_VALUES)
        gate = moments.Gate(state, self.training, counts=self.calls, calls=CALLS, every=self.every)
        is_on = state[int(self.training)] > 0
        due = (state[CALLS] % self.every == 0) & is_on
        self._add_batch(due)
        if self.mapped is not None and self.alive is not None and self.mapped.numel():
            moments.alive(self.mapped, self.alive, 0.0, gate)
        # last, because this counts the call, and the gate of each kernel reads the count
        scale = 1.0 if self.scale is None else self.scale
        moments.measure(
            self.x,
            state[SUMS:],
            state[LARGEST],
            self.exponents,
            places,
            scale,
            gate=gate,
        )

    def add_with_torch(self) -> None:
        new = _begin(self.training, self.state, self.calls)
        if new is None:
            return

        is_on = new[int(self.training)] > 0
        due: Any = (new[CALLS] % self.every == 0) & is_on
        if self.x.device.type in READ:
            due = bool(due)
        if due is not False:
            self._add_values(new, due)
            self._add_alive(due)
            self._add_batch(due)
        new[CALLS] += 1
        _end(self.training, self.state, new)

    def _add_values(self, new: Tensor, due: Any) -> None:
        """Add moments and shares to a state, where the call is `due`."""
        scale: Any = 1.0 if self.scale is None else self.scale.to(self.state.dtype)
        edges = octaves(*self.exponents)
        before = new.clone()

        # the state of an eager observer, as views of the tensor
        views: dict[str, Any] = {
            "sums": new[SUMS:],
            "largest": new[LARGEST],
            "all_values": 0,
        }
        add_moments(views, self.x, scale)
        add_shares(views, self.x.float() / scale, edges)
        new[ALL_VALUES] += views["all_values"]  # a number, which is no view
        new.copy_(if_due(due, new, before))

    def _add_alive(self, due: Any) -> None:
        """Note which channels are alive, where the call is `due`."""
        if self.mapped is None or self.alive is None:
            return
        _note_alive(self.alive, self.mapped, 0.0, due)

    def _add_batch(self, due: Any) -> None:
        """Add the statistics of a batch, where the call is `due`."""
        if self.batch is None or self.batches is None:
            return
        added = add_batch(self.batches, self.batch)
        self.batches.copy_(if_due(due, added, self.batches))


def _note_alive(alive: Tensor, x: Tensor, zero: float, due: Any) -> None:
    """Note which channels of a call are alive, where the call is `due`."""
    if not x.numel() or (alive.device.type == "cpu" and bool(alive.all())):
        return
    alive.copy_(if_due(due, alive | _alive_in(x, zero), alive))


def if_due(due: Any, new: Tensor, before: Tensor) -> Tensor:
    """Return the new values if the call is `due`, which is True or a tensor; else those before."""
    return new if due is True else torch.where(due, new, before)


def _counts_in_graph(state: Tensor, **others: Any) -> bool:
    """Return whether AOTAutograd can trace into `add_call`."""
    return in_graph.fits_kernels(state)


@operator(
    "add_call(bool training, Tensor(a!) state) -> ()", fake=nothing, fits_graph=_counts_in_graph
)
@torch.no_grad()
def add_call(training: bool, state: Tensor) -> None:
    """Count a call of a layer whose gradients are measured in compiled code."""
    _begin(training, state, calls=True)


def _watches_in_graph(
    tensors: Sequence[Tensor],
    given: Sequence[Tensor],
    mapped: Tensor | None,
    state: Tensor,
    alive: Tensor | None,
    **others: Any,
) -> bool:
    """Return whether AOTAutograd can trace into `add_watched`."""
    seen = [*tensors, *given]
    return (
        bool(tensors)
        and len({x.device for x in (*seen, state)}) == 1
        and not any(x.dtype is torch.float64 for x in seen)
        and all(in_graph.fits_kernels(x) for x in seen)
        and in_graph.are_static([mapped, state, alive])
    )


@operator(
    "add_watched(Tensor[] tensors, Tensor[] given, Tensor? mapped, bool training, float[] bounds, "
    " Tensor(a!) state, Tensor(b!)? alive) -> ()",
    fake=nothing,
    fits_graph=_watches_in_graph,
)
@torch.no_grad()
def add_watched(
    tensors: Sequence[Tensor],
    given: Sequence[Tensor],
    mapped: Tensor | None,
    training: bool,
    bounds: Sequence[float],
    state: Tensor,
    alive: Tensor | None,
) -> None:
    """Add a call of a layer to the state that a Watchdog keeps in compiled code.

    Args:
        tensors: the floating-point tensors in the output.
        given: the floating-point tensors among the arguments.
        mapped: the first tensor as (N, C, ...), to find dead channels; None to find none.
        training: the mode of the layer.
        bounds: the bounds of the activation, near which values are saturated; empty if it has none.
        state: the state of the site, which is changed.
        alive: which channels had a value other than 0 in a call; changed.
    """
    if recomputes():
        return
    watched = _WatchedCall(
        tensors=tensors,
        arguments=given,
        mapped=mapped,
        training=training,
        bounds=bounds,
        state=state,
        alive=alive,
    )
    if watched.kernels_take():
        launch.or_else(watched.add_with_kernels, watched.add_with_torch)
    else:
        watched.add_with_torch()


@dataclass(frozen=True)
class _WatchedCall:
    """A call that a Watchdog watches; its attributes are the arguments of `add_watched`."""

    tensors: Sequence[Tensor]
    arguments: Sequence[Tensor]
    mapped: Tensor | None
    training: bool
    bounds: Sequence[float]
    state: Tensor
    alive: Tensor | None

    def kernels_take(self) -> bool:
        """Return whether kernels are used for all tensors. The first one must have elements."""
        if not self.tensors or not self.tensors[0].numel():
            return False
        seen = [x for x in (*self.tensors, *self.arguments) if x.numel()]
        return _kernels_take(seen)

    def add_with_kernels(self) -> None:
        from .kernels import moments

        gate = moments.Gate(
            self.state, self.training, counts=True, calls=TURN, every=DISTANCE, planned=True
        )
        numbers = self.state[FOUND : FOUND + 3]
        moments.largest_of_call(self.tensors, self.arguments, numbers, gate)
        near = near_bounds(self.tensors[0], *self.bounds) if self.bounds else None
        if self.mapped is not None and self.alive is not None:
            moments.alive(self.mapped, self.alive, TINY, gate)

        mode = TRAINED if self.training else EVALUATED
        places = mode, OFF, CALLS, BAD_CALLS, FIRST_BAD, FIRST_MADE, FIRST_WORSE, NEAR, MEASURED
        moments.note_call(gate, numbers, near, (*places, WATCHED), rows_in(self.state))

    def add_with_torch(self) -> None:
        new = _begin(self.training, self.state, calls=True)
        if new is None:
            return
        due = _is_next_planned(self.training, new)
        if due is not False:
            self._measure(new, due)
        new[CALLS] += 1
        new[TURN] += 1
        _end(self.training, self.state, new)

    def _measure(self, new: Tensor, due: Any) -> None:
        """Measure the call in a state, if the call is `due`."""
        before = new.clone()
        largest, positive = extremes(self.tensors, exact=rows_in(new) > 0)
        _keep_row(new, largest, of_gradient=False)
        if positive is not None:
            self._note_bad(new, largest, positive)
        if self.tensors and self.tensors[0].numel():
            self._note_values(new, due)
        new[MEASURED] += 1
        new.copy_(if_due(due, new, before))

    def _note_bad(self, new: Tensor, largest: Tensor, positive: Tensor) -> None:
        """Note whether a value is not finite, and whether the layer has made it."""
        is_bad = ~(largest.to(new) < math.inf)
        has_finite_arguments = norm_of_arguments(self.arguments).to(new) < math.inf
        is_made = is_bad & has_finite_arguments
        is_worse = ~(positive.to(new) < math.inf)
        new[BAD_CALLS] += is_bad

        calls_before = new[CALLS].clone()
        never = torch.full_like(calls_before, math.inf)
        conditions = {FIRST_BAD: is_bad, FIRST_MADE: is_made, FIRST_WORSE: is_worse}
        for place, holds in conditions.items():
            number = torch.where(holds, calls_before, never)
            new[place] = torch.minimum(new[place], number)

    def _note_values(self, new: Tensor, due: Any) -> None:
        """Note the share of saturated values, and which channels are alive."""
        if self.bounds:
            new[NEAR] += near_bounds(self.tensors[0], *self.bounds)
        if self.mapped is not None and self.alive is not None:
            _note_alive(self.alive, self.mapped, TINY, due)


def _watches_gradient_in_graph(
    grad: Tensor, scale: Tensor | None, state: Tensor, **others: Any
) -> bool:
    """Return whether AOTAutograd can trace into `add_watched_gradient`."""
    return grad.dtype is not torch.float64 and in_graph.fits_kernels(grad, scale, state)


@operator(
    "add_watched_gradient(Tensor grad, Tensor? scale, bool training, Tensor state) -> ()",
    fake=nothing,
    fits_graph=_watches_gradient_in_graph,
)
@torch.no_grad()
def add_watched_gradient(grad: Tensor, scale: Tensor | None, training: bool, state: Tensor) -> None:
    """Add a gradient to the state that a Watchdog keeps of a layer in compiled code.

    The schema does not say that the state is changed. Otherwise, after two forwards, autograd would
    refuse the second of their backwards.
    """
    state = _changed_unseen(state)
    if grad.numel() and _kernels_take([grad]):
        from .kernels import moments

        def with_kernels() -> None:
            gate = moments.Gate(
                state, training, counts=False, calls=TURN, every=DISTANCE, planned=True
            )
            keep = rows_in(state)
            rows_at = WATCHED + 2 * keep
            places = SEEN_GRADIENTS, GRADIENTS, GRADIENT_NORM, FIRST_BAD_GRADIENT, rows_at
            moments.note_gradient(gate, grad, state[SQUARE], scale, places, keep)

        launch.or_else(with_kernels, lambda: _add_gradient(grad, scale, training, state))
    else:
        _add_gradient(grad, scale, training, state)


def _add_gradient(grad: Tensor, scale: Tensor | None, training: bool, state: Tensor) -> None:
    """Do the work of `add_watched_gradient` in torch operations."""
    new = _begin(training, state, calls=False)
    if new is None or not grad.numel():
        return
    due = _is_next_planned(training, new)
    if due is not False:
        _measure_gradient(grad, scale, new, due)
    new[SEEN_GRADIENTS] += 1
    new[TURN] += 1
    _end(training, state, new)


def _measure_gradient(grad: Tensor, scale: Tensor | None, new: Tensor, due: Any) -> None:
    """Measure a gradient in a state, if the gradient is `due`."""
    before = new.clone()
    norm = norm_of(grad).to(new)
    if scale is not None:
        norm = norm / scale.to(new)
    _keep_row(new, norm, of_gradient=True)

    is_finite = norm < math.inf
    new[GRADIENT_NORM] += torch.where(is_finite, norm, 0.0)
    gradients_before = new[SEEN_GRADIENTS].clone()
    never = torch.full_like(gradients_before, math.inf)
    number = torch.where(is_finite, never, gradients_before)
    new[FIRST_BAD_GRADIENT] = torch.minimum(new[FIRST_BAD_GRADIENT], number)
    new[GRADIENTS] += 1
    new.copy_(if_due(due, new, before))


def _measures_gradient_in_graph(
    grad: Tensor, scale: Tensor | None, state: Tensor, **others: Any
) -> bool:
    """Return whether AOTAutograd can trace into `add_measured_gradient`."""
    return in_graph.fits_kernels(grad, scale, state)


@operator(
    "add_measured_gradient(Tensor grad, Tensor? scale, bool training, int every, int first, "
    "int last, Tensor state) -> ()",
    fake=nothing,
    fits_graph=_measures_gradient_in_graph,
)
def add_measured_gradient(
    grad: Tensor,
    scale: Tensor | None,
    training: bool,
    every: int,
    first: int,
    last: int,
    state: Tensor,
) -> None:
    """Add a gradient to statistics in compiled code; see `add_statistics`."""
    add_statistics(
        grad,
        None,  # mapped
        None,  # batch
        scale,
        training,
        False,  # it is no call
        every,
        first,
        last,
        _changed_unseen(state),
        None,  # alive
        None,  # batches
    )


for _operator in (add_watched_gradient, add_measured_gradient):
    # otherwise torch.fx removes the calls, which have no result and, by their schema, no effect
    torch.fx.has_side_effect(_operator)
