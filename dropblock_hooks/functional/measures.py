"""Measurements of tensors for observers, as functions that add to a state.

Eager observers keep their state in a dict. In compiled code it is one tensor that an operator
changes, so that no Python runs between the operators. `add_statistics` and `add_watched` are these
operators; they call the same functions as the eager observers.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from .._torch import NO_TASK, graph_task
from .kernels import launch
from .masks import wide_dtype
from .operators import operator

KEPT, COUNT, SUM, SQUARES, NORMS, ZEROS, NONFINITE, BINS = range(8)
"""The places in ``state["sums"]``: kept calls, their values, sums of these; shares; the bins."""
ON, TRAINED, EVALUATED, OFF, CALLS, LOOKED, LARGEST, SUMS = range(1, 9)
"""The places in the tensor of `add_statistics`: whether the site is on, in evaluation (0) and in
training (1), calls of the layer by its mode, those in which the attachment was off, those in which
it was on, the values that were measured, the largest magnitude, and where the sums begin.
"""
BAD_CALLS, FIRST_BAD, FIRST_MADE, GRADIENTS, GRADIENT_NORM, FIRST_BAD_GRADIENT, NEAR = range(6, 13)
FIRST_WORSE = 13
"""More places in the tensor of `add_watched`, as the fields of a ``Watched``; times are calls."""
WATCHED = 14  # places in it
_ROW = 4096  # values that are added up in float32
_NEAR = 0.01  # how near to a bound a value is saturated, as a share of the distance of both


def add_measured(
    state: dict[str, Any], x: Tensor, scale: float | Tensor, exponents: tuple[int, int]
) -> None:
    """Add the values of a call, divided by `scale`: moments, shares and octaves.

    The octaves lie between these exponents of 2.
    """

    def with_kernels() -> None:
        from .kernels import moments

        places = moments.Places(KEPT, ZEROS, BINS, TRAINED, OFF, CALLS, LOOKED)
        moments.measure(x, state["sums"], state["largest"], exponents, places, scale)
        state["looked"] += x.numel()

    def with_torch() -> None:
        add_moments(state, x, scale)
        add_shares(state, x.float() / scale, octaves(*exponents))

    if launch.takes(x):
        launch.or_else(with_kernels, with_torch)
    else:
        with_torch()


def add_moments(state: dict[str, Any], x: Tensor, scale: float | Tensor = 1.0) -> None:
    """Add the moments of the values of a call, divided by `scale`."""
    sums, count = state["sums"], x.numel()
    x = x if count else x.new_zeros(1)  # which adds nothing but the call
    low, high = torch.aminmax(x)
    largest = torch.maximum(high, -low).to(sums.dtype)
    total, norm = _sum_and_norm(x, largest)
    total, norm, largest = total / scale, norm / scale, largest / scale
    ones = torch.ones_like(norm)
    found = torch.stack((ones, ones * count, total, norm.square(), norm))
    finite = torch.isfinite(largest)
    sums[KEPT:ZEROS].add_(torch.where(finite, found, 0.0))
    state["largest"].clamp_(min=torch.where(finite, largest, 0.0))


def _sum_and_norm(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    wide = wide_dtype(x.device)
    # on the CPU, torch adds up float32 in float64 ten times slower than in float32: so rows of some
    # thousand values are added up in float32, unless they may overflow or cancel
    if x.device.type == "cpu" and x.dtype.itemsize <= 4 and 1e-12 < float(largest) < 1e15:
        in_memory = x.permute(sorted(range(x.ndim), key=x.stride, reverse=True))
        flat = in_memory.reshape(-1).float()
        whole = flat.numel() // _ROW * _ROW
        rows, rest = flat[:whole].view(-1, _ROW), flat[whole:].double()
        total = rows.sum(1).sum(dtype=wide) + rest.sum()
        norm = torch.hypot(vector_norm(vector_norm(rows, dim=1), dtype=wide), vector_norm(rest))
        if float(norm) ** 2 > 1.01 * float(total) ** 2 / x.numel():
            return total, norm
    return x.sum(dtype=wide), vector_norm(x, dtype=wide)


def add_shares(state: dict[str, Any], x: Tensor, edges: Sequence[float]) -> None:
    """Count in float32 zeros, values that are not finite, and magnitudes by octave: exponent."""
    state["looked"] += x.numel()
    exponents = ((x.view(torch.int32) >> 23) & 255).reshape(-1)  # 127 from 1 to 2
    if x.device.type == "cpu":
        counts = torch.bincount(exponents, minlength=256)
    else:  # bincount would wait for the device
        counts = torch.histc(exponents, 256, 0, 256)
    first = int(math.log2(edges[0])) + 127
    last = first + len(edges) - 1
    zeros = x.numel() - torch.count_nonzero(x)
    found = torch.stack((zeros, counts[255], counts[:first].sum() - zeros))
    bins = counts[first:last], counts[last:255].sum(0, keepdim=True)
    state["sums"][ZEROS:].add_(torch.cat((found, *bins)))


def add_alive(state: dict[str, Any], x: Tensor, zero: float = 0.0) -> None:
    """Note which channels of a call (N, C, ...) were alive: had a magnitude above `zero`."""
    before = state.get("alive")
    if before is not None and before.shape == x.shape[1:2] and before.device == x.device:
        flags: Tensor = before
    else:
        flags = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device)

    def with_torch() -> Tensor:
        return flags | _lives(x, zero)

    def with_kernels() -> Tensor:
        from .kernels import moments

        moments.alive(x, flags, zero)
        return flags

    if x.numel() and launch.takes(x):
        flags = launch.or_else(with_kernels, with_torch)
    elif x.numel() and not (x.device.type == "cpu" and bool(flags.all())):
        flags = with_torch()
    state["alive"] = flags


def _lives(x: Tensor, zero: float) -> Tensor:
    """Which channels of a tensor have a magnitude above `zero`, or NaN."""
    return ~(x.abs().amax([0, *range(2, x.ndim)]) <= zero)


def alive_in_either(before: Tensor | None, now: Tensor) -> Tensor:
    """The channels that were alive before or now; only now, if their number has changed."""
    if before is None or before.shape != now.shape:
        return now
    return before.to(now.device) | now


def octaves(first: int, last: int) -> tuple[float, ...]:
    """The edges of octaves, rising: the powers of 2 with these exponents and those between."""
    return tuple(2.0**exponent for exponent in range(first, last + 1))


def add_batch(batches: Any, x: Tensor) -> Any:
    """The sums over batches of mean, variance and 1 of each channel, with another batch."""
    if x.numel() <= x.shape[1]:  # one value has no variance
        return batches
    wide = x.to(wide_dtype(x.device))
    variance, mean = torch.var_mean(wide, [0, *range(2, x.ndim)])
    return batches + torch.stack((mean, variance, torch.ones_like(mean)))


def near_bounds(x: Tensor, lower: float, upper: float) -> Tensor:
    """The share of values within 1 % of the bounds."""
    edge = _NEAR * (upper - lower)
    at_bounds = (x < lower + edge) | (x > upper - edge)
    return at_bounds.mean(dtype=torch.float32)


def norm_of_arguments(given: Sequence[Tensor]) -> Tensor:
    """A number that is finite if the arguments of a layer are.

    -inf counts in the first argument only, because masks of attention hold it.
    """
    masks = [y for y in given[1:] if y.numel()]
    if not _kernels_take([*given[:1], *masks]):
        return _norm_of_arguments(given)
    from .kernels import moments

    return launch.or_else(
        lambda: moments.largest_of(given[:1], masks)[0], lambda: _norm_of_arguments(given)
    )


def extremes(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Two numbers: one is finite if all values are, the other if no value is NaN or +Inf.

    -Inf may be a mask of logits. On a CPU, the second one is None if all values are finite.
    """
    tensors = [x for x in tensors if x.numel()]
    if not _kernels_take(tensors):
        return _extremes(tensors)
    from .kernels import moments

    return launch.or_else(lambda: moments.largest_of(tensors), lambda: _extremes(tensors))


def _extremes(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """`extremes` with torch operations."""
    largest = _largest_norm(tensors)
    if largest.device.type == "cpu" and largest < math.inf:
        return largest, None
    return largest, _largest_norm([_positive(x) for x in tensors])


def _positive(x: Tensor) -> Tensor:
    """The largest value, at least 0; NaN if there is one."""
    return x.float().amax().clamp(min=0)


def _norm_of_arguments(given: Sequence[Tensor]) -> Tensor:
    masks = [_positive(y) for y in given[1:] if y.numel()]
    return _largest_norm([*given[:1], *masks])


def together(numbers: Sequence[Tensor]) -> Tensor:
    device = numbers[0].device
    return torch.stack([x.to(device, wide_dtype(device)) for x in numbers])


def _kernels_take(tensors: Sequence[Tensor]) -> bool:
    """Whether kernels are used for all tensors, at least one, which are read as float32."""
    takes = all(x.dtype is not torch.float64 and launch.takes(x) for x in tensors)
    return takes and len({x.device for x in tensors}) == 1


def _largest_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return a number that is finite if all values are."""
    norms = [norm_of(x) for x in tensors if x.numel()]
    if len(norms) == 1:
        return norms[0]
    return together(norms).amax() if norms else torch.zeros(())


def norm_of(x: Tensor) -> Tensor:
    """Return the norm; it is finite if all values are, whose squares may not fit into float32."""
    x = x.float() if x.element_size() == 1 else x  # torch has no norm of float8
    fast = x.device.type == "cpu" and x.dtype is not torch.float64
    norm: Tensor = vector_norm(x, dtype=torch.float32 if fast else wide_dtype(x.device))
    if fast and not norm < math.inf:
        norm = vector_norm(x, dtype=torch.float64)
    return norm


def square_of(x: Tensor, scale: float | Tensor = 1.0) -> Tensor | None:
    """The sum of squares of a tensor divided by a scale, by one kernel on a GPU.

    It is None where `norm_of` is needed.
    """
    if not x.numel() or not _kernels_take([x]):
        return None
    from .kernels import moments

    square: Tensor | None = launch.or_else(lambda: moments.square_of(x, scale), lambda: None)
    return square


def _begins(training: bool, state: Tensor, calls: bool) -> Tensor | None:
    """The state to which a call is added: itself, a copy on other devices, or None if it is off.

    On a CPU, a switched-off site and a recomputation end here. Other devices are not read, so there
    `_ends` decides.
    """
    if graph_task() != NO_TASK and calls:
        return None
    on = state[int(training)]
    if calls:
        state[TRAINED if training else EVALUATED] += 1
        if training:
            state[OFF] += 1 - on
    if state.device.type != "cpu":
        return state.clone()
    return state if float(on) else None


def _ends(training: bool, state: Tensor, new: Tensor) -> None:
    if new is not state:
        state.copy_(torch.where(state[int(training)] > 0, new, state))


def _nothing(*given: Any) -> None:
    """The fake implementation of an operator that only changes a state."""


@operator(
    "add_statistics(Tensor x, Tensor? mapped, Tensor? batch, Tensor? scale, bool training, "
    "bool calls, int every, int first, int last, Tensor(a!) state, Tensor(b!)? alive, "
    "Tensor(c!)? batches) -> ()",
    fake=_nothing,
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
        mapped: the same as (N, C, ...), to find dead channels; None without.
        batch: the input of a BatchNorm in training mode; None without.
        scale: the factor of the loss, by which gradients are divided; None is 1.
        training: the mode of the layer.
        calls: True for a call of the layer, False for a gradient.
        every: each n-th call is measured.
        first: the exponent of 2 where the octaves begin.
        last: the exponent of 2 where they end.
        state: the state of the site, which is changed.
        alive: which channels were not zero in all calls; changed.
        batches: see `add_batch`; changed.
    """
    if graph_task() != NO_TASK and calls:
        return
    with_torch = functools.partial(
        _add_statistics, x, mapped, batch, scale, training, calls, every, first, last, state
    )
    if not launch.takes(x):
        with_torch(alive, batches)
        return

    def with_kernels() -> None:
        from .kernels import moments

        mode = TRAINED if training else EVALUATED
        places = moments.Places(KEPT, ZEROS, BINS, mode, OFF, CALLS, LOOKED)
        gate = moments.Gate(state, training, calls, CALLS, every)
        exponents = first, last
        factor = 1.0 if scale is None else scale
        if batch is not None and batches is not None:
            is_due = (state[CALLS] % every == 0) & (state[int(training)] > 0)
            batches.copy_(torch.where(is_due, add_batch(batches, batch), batches))
        if mapped is not None and alive is not None and mapped.numel():
            moments.alive(mapped, alive, 0.0, gate)
        moments.measure(x, state[SUMS:], state[LARGEST], exponents, places, factor, gate=gate)

    launch.or_else(with_kernels, lambda: with_torch(alive, batches))


def _add_statistics(
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
    """`add_statistics` with torch operations."""
    new = _begins(training, state, calls)
    if new is None:
        return
    factor: Any = 1.0 if scale is None else scale.to(state.dtype)
    if x.device.type == "cpu":
        due: Any = float(new[CALLS]) % every == 0
    else:
        due = new[CALLS] % every == 0
    if due is not False:
        before = new.clone()
        named: dict[str, Any] = {"sums": new[SUMS:], "largest": new[LARGEST], "looked": 0}
        add_moments(named, x, factor)
        add_shares(named, x.float() / factor, octaves(first, last))
        new[LOOKED] += named["looked"]
        new.copy_(_if_due(due, new, before))
    new[CALLS] += 1

    if due is not False:
        if mapped is not None and alive is not None:
            flags = {"alive": alive}
            add_alive(flags, mapped)
            alive.copy_(_if_due(due, flags["alive"], alive))
        if batch is not None and batches is not None:
            batches.copy_(_if_due(due, add_batch(batches, batch), batches))
    _ends(training, state, new)


def _if_due(due: Any, new: Tensor, before: Tensor) -> Tensor:
    """The new values where a call is measured; on devices other than a CPU, `due` is a tensor."""
    return new if due is True else torch.where(due, new, before)


@operator("add_call(bool training, Tensor(a!) state) -> ()", fake=_nothing)
@torch.no_grad()
def add_call(training: bool, state: Tensor) -> None:
    """Count a call of a layer whose gradients are measured in compiled code."""
    _begins(training, state, calls=True)


@operator(
    "add_watched(Tensor[] tensors, Tensor[] given, Tensor? mapped, bool training, float[] bounds, "
    " Tensor(a!) state, Tensor(b!)? alive) -> ()",
    fake=_nothing,
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
    """Add a call of a layer to what a Watchdog keeps of it in compiled code.

    Args:
        tensors: the floating-point tensors in the output.
        given: those among the arguments.
        mapped: the first tensor as (N, C, ...), to find dead channels; None without.
        training: the mode of the layer.
        bounds: of the activation, near which values are saturated; empty without.
        state: what is kept, which is changed.
        alive: which channels were not zero in all calls; changed.
    """
    if graph_task() != NO_TASK:
        return
    with_torch = functools.partial(
        _add_watched, tensors, given, mapped, training, bounds, state, alive
    )
    seen = [x for x in (*tensors, *given) if x.numel()]
    if not tensors or not tensors[0].numel() or not _kernels_take(seen):
        with_torch()
        return

    def with_kernels() -> None:
        from .kernels import moments

        gate = moments.Gate(state, training, True, CALLS)
        largest, positive = moments.largest_of([x for x in tensors if x.numel()])
        of_given = norm_of_arguments(given) if given else launch.zeros(state.device)[0]
        near = near_bounds(tensors[0], *bounds) if bounds else None
        if mapped is not None and alive is not None:
            moments.alive(mapped, alive, 1e-12, gate)
        mode = TRAINED if training else EVALUATED
        places = mode, OFF, CALLS, BAD_CALLS, FIRST_BAD, FIRST_MADE, FIRST_WORSE, NEAR
        moments.note_call(gate, largest, of_given, positive, near, places)

    launch.or_else(with_kernels, with_torch)


def _add_watched(
    tensors: Sequence[Tensor],
    given: Sequence[Tensor],
    mapped: Tensor | None,
    training: bool,
    bounds: Sequence[float],
    state: Tensor,
    alive: Tensor | None,
) -> None:
    """`add_watched` with torch operations."""
    new = _begins(training, state, calls=True)
    if new is None:
        return
    call = new[CALLS].clone()
    largest, positive = extremes(tensors)
    norm = largest.to(new)
    bad = ~(norm < math.inf)
    if positive is not None:
        finite_input = norm_of_arguments(given).to(new) < math.inf
        never = torch.full_like(call, math.inf)
        new[BAD_CALLS] += bad
        new[FIRST_BAD] = torch.minimum(new[FIRST_BAD], torch.where(bad, call, never))
        made = torch.where(bad & finite_input, call, never)
        new[FIRST_MADE] = torch.minimum(new[FIRST_MADE], made)
        worse = torch.where(positive.to(new) < math.inf, never, call)
        new[FIRST_WORSE] = torch.minimum(new[FIRST_WORSE], worse)
    new[CALLS] += 1
    if tensors and tensors[0].numel():
        if bounds:
            new[NEAR] += near_bounds(tensors[0], *bounds)
        if mapped is not None and alive is not None:
            flags = {"alive": alive}
            add_alive(flags, mapped, 1e-12)
            alive.copy_(flags["alive"])
    _ends(training, state, new)


@operator(
    "add_watched_gradient(Tensor grad, Tensor? scale, bool training, Tensor state) -> ()",
    fake=_nothing,
)
@torch.no_grad()
def add_watched_gradient(grad: Tensor, scale: Tensor | None, training: bool, state: Tensor) -> None:
    """Add a gradient to what a Watchdog keeps of a layer in compiled code.

    As `add_measured_gradient`, it changes the state, which its schema does not say: autograd would
    refuse the second of two backwards whose forwards came before both.
    """
    state = state.data
    square = square_of(grad)
    if square is not None:
        from .kernels import moments

        gate = moments.Gate(state, training, False, GRADIENTS)
        places = GRADIENTS, GRADIENT_NORM, FIRST_BAD_GRADIENT
        moments.note_gradient(gate, square, 1.0 if scale is None else scale, places)
        return
    new = _begins(training, state, calls=False)
    if new is None or not grad.numel():
        return
    norm = norm_of(grad).to(new)
    if scale is not None:
        norm = norm / scale.to(new)
    finite = norm < math.inf
    time = new[GRADIENTS].clone()
    never = torch.full_like(time, math.inf)
    new[GRADIENT_NORM] += torch.where(finite, norm, 0.0)
    first = torch.where(finite, never, time)
    new[FIRST_BAD_GRADIENT] = torch.minimum(new[FIRST_BAD_GRADIENT], first)
    new[GRADIENTS] += 1
    _ends(training, state, new)


@operator(
    "add_measured_gradient(Tensor grad, Tensor? scale, bool training, int every, int first, "
    "int last, Tensor state) -> ()",
    fake=_nothing,
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
    options = scale, training, False, every, first, last, state.data, None, None
    add_statistics(grad, None, None, *options)


for _operator in (add_watched_gradient, add_measured_gradient):
    torch.fx.has_side_effect(_operator)  # so that no call is left out
