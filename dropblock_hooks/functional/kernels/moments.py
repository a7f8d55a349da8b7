"""Statistics of a tensor on a GPU, in one pass.

    sums += 1, numel, sum(x), sum(x ** 2), sqrt(sum(x ** 2))      unless a value is not finite
    shares += zeros, not finite, and the numbers of magnitudes by octave
    alive |= any(|x| > zero, by channel)

In torch operations, the same are `measures.add_moments`, `add_shares` and `add_alive`.
``functional.measures`` calls these functions:

measure           sums of values, of squares and of norms, the largest magnitude, shares and octaves
alive             which channels had a magnitude above a bound
largest_of_call   the largest magnitudes in the output and the arguments of a layer
square_of         the sum of squares of a tensor
note_call         the numbers that a Watchdog keeps of calls in compiled code
note_gradient     those that it keeps of gradients

A `Gate` decides in compiled code whether a call is measured. The kernels of `tails` and `branch`
have one, too.

The sums of `measure` come from several programs, in float64. Another kernel with a single program
adds them up in a fixed order, and leaves them out if a value was not finite. In `square_of` and
`note_gradient`, the programs add to one number in any order, so its last digits may vary.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .clip import loss_scale, square_sum, squares, tile_of, units_of

_SIZE = 4096  # elements in a step of a program
_PROGRAMS = 256  # the most programs that measure a tensor
_OUTPUT, _GIVEN, _MASK = range(3)  # the roles of tensors in a call of a layer
# what a program of `_measure_kernel` writes: sum, squares, largest magnitude, values not finite
_PARTS = 4


@dataclass(frozen=True)
class Places:
    """Where the numbers of `functional.measures` stand, which can't be imported from here.

    Attributes:
        kept: in the sums, measured calls.
        zeros: in the sums, values that are zero.
        bins: in the sums, the start of the octaves.
        counted: in a state, calls of the layer in this mode.
        off: in a state, calls in which the attachment was switched off.
        all_values: in a state, values that were measured.
    """

    kept: int
    zeros: int
    bins: int
    counted: int
    off: int
    all_values: int


@triton.jit
def is_due(
    state,
    training: tl.constexpr,
    calls_at,
    every,
    GATED: tl.constexpr,
    PLANNED: tl.constexpr = False,
):
    """Return whether the site is on and this call is measured; always, if there is no gate.

    With PLANNED, the state holds the distance of measured calls, at the place `every`. The calls
    that `measures.is_planned` chooses are measured.
    """
    if PLANNED:
        turn = tl.load(state + calls_at).to(tl.int64) + 1
        distance = tl.maximum(tl.load(state + every).to(tl.int64), 1)
        is_power_of_two = (turn & (turn - 1)) == 0
        chosen = is_power_of_two | (turn % distance == 0)
        due = chosen & (tl.load(state + training) > 0)
    elif GATED:
        calls = tl.load(state + calls_at).to(tl.int64)
        due = (calls % every == 0) & (tl.load(state + training) > 0)
    else:
        due = tl.full([], 1, tl.int32) == 1
    return due


@triton.jit
def _sum_and_squares(value, exists):
    """Return the sum and the sum of squares of finite values, in float64.

    They are computed from differences to the mean, so that they are exact also if the mean is much
    larger than the deviation. The values are scaled to magnitudes near 1, so that they can't
    overflow.
    """
    peak = tl.max(tl.abs(value), axis=0).to(tl.float32)
    power = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    divisor = tl.where((power > 0) & (power < float("inf")), power, 1.0)
    share = value / divisor
    number = tl.sum(exists.to(tl.int32), axis=0)
    center = tl.sum(share, axis=0) / tl.maximum(number, 1)
    distance = tl.where(exists, share - center, 0.0)
    rest = tl.sum(distance, axis=0).to(tl.float64)
    spread = tl.sum(distance * distance, axis=0).to(tl.float64)
    wide = divisor.to(tl.float64)
    middle = center.to(tl.float64)
    total = (number * middle + rest) * wide
    square = (spread + 2 * middle * rest + number * middle * middle) * wide * wide
    return total, square


@triton.jit
def _measure_kernel(
    x,
    parts,
    counts,
    scale,
    state,
    calls_at,
    every,
    outer,
    columns,
    programs,
    column_steps,
    x_outer,
    x_column,
    first,
    bins,
    SCALE_ON_DEVICE: tl.constexpr,
    TRAINING: tl.constexpr,
    GATED: tl.constexpr,
    SIZE: tl.constexpr,
    BINS: tl.constexpr,
    WIDE: tl.constexpr,
    BIG: tl.constexpr,
):
    """Measure a part of a tensor.

    The first bins are octaves. The last three count values that are not finite, zeros, and columns
    beyond the tensor.
    """
    program = tl.program_id(0)
    factor = loss_scale(scale, SCALE_ON_DEVICE).to(tl.float32)
    total = tl.full([], 0.0, tl.float64)
    square = tl.full([], 0.0, tl.float64)
    largest = tl.full([], 0.0, WIDE)
    bad = tl.full([], 0, tl.int64)
    number = tl.zeros([BINS], dtype=tl.int32)
    if is_due(state, TRAINING, calls_at, every, GATED):
        for step in range(program, outer * column_steps, programs):
            place, column = tile_of(step, column_steps, SIZE, BIG)
            exists = column < columns
            at = place * x_outer + column * x_column
            value = tl.load(x + at, mask=exists, other=0.0).to(WIDE)
            finite = tl.abs(value) < float("inf")
            bad += tl.sum((exists & (finite == 0)).to(tl.int32), axis=0)
            known = tl.where(finite, value, 0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(known), axis=0))
            of_step, squares_of_step = _sum_and_squares(known, exists)
            total += of_step
            square += squares_of_step

            share = value.to(tl.float32) / factor
            exponent = (share.to(tl.int32, bitcast=True) >> 23) & 255  # 127 for magnitudes 1 to 2
            octave = tl.minimum(tl.maximum(exponent - first + 1, 0), bins - 1)
            octave = tl.where(exponent == 255, bins, octave)
            octave = tl.where(share == 0, bins + 1, octave)
            octave = tl.where(exists, octave, bins + 2)
            number += tl.histogram(octave, BINS)
        tl.store(parts + program * 4, total)
        tl.store(parts + program * 4 + 1, square)
        tl.store(parts + program * 4 + 2, largest.to(tl.float64))
        tl.store(parts + program * 4 + 3, bad.to(tl.float64))
        tl.store(counts + program * BINS + tl.arange(0, BINS), number)


@triton.jit
def _begin_call(state, training: tl.constexpr, counted_at, off_at, COUNTS: tl.constexpr):
    """Count a call of a layer in compiled code; return whether its site is on."""
    on = tl.load(state + training)
    counted = tl.load(state + counted_at)
    off = tl.load(state + off_at)
    tl.debug_barrier()  # all threads have read before one writes
    if COUNTS:
        tl.store(state + counted_at, counted + 1)
        if training:
            tl.store(state + off_at, off + 1 - on)
    return on > 0


@triton.jit
def _add_kernel(
    parts,
    counts,
    # AOTAutograd lets a graph write the changed arguments back in this order. `sums` and `largest`
    # are views of `state`. They come after it, because its new value has their old numbers.
    state,
    sums,
    largest,
    scale,
    n_elements,
    programs,
    every,
    bins,
    kept_at,
    zeros_at,
    bins_at,
    counted_at,
    off_at,
    calls_at,
    all_values_at,
    SCALE_ON_DEVICE: tl.constexpr,
    TRAINING: tl.constexpr,
    GATED: tl.constexpr,
    COUNTS: tl.constexpr,
    BINS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Add the measured numbers of all programs to the sums, and in compiled code to the state."""
    factor = loss_scale(scale, SCALE_ON_DEVICE)
    due = is_due(state, TRAINING, calls_at, every, GATED)
    if GATED:
        calls = tl.load(state + calls_at)
        all_values = tl.load(state + all_values_at)
        on = _begin_call(state, TRAINING, counted_at, off_at, COUNTS)
        if on:
            tl.store(state + calls_at, calls + 1)
        if due:
            tl.store(state + all_values_at, all_values + n_elements)
    if due:
        program = tl.arange(0, PROGRAMS)
        exists = program < programs
        total = tl.sum(tl.load(parts + program * 4, mask=exists, other=0.0), axis=0) / factor
        square = tl.sum(tl.load(parts + program * 4 + 1, mask=exists, other=0.0), axis=0)
        peak = tl.max(tl.load(parts + program * 4 + 2, mask=exists, other=0.0), axis=0) / factor
        bad = tl.sum(tl.load(parts + program * 4 + 3, mask=exists, other=0.0), axis=0)
        norm = tl.sqrt(square) / factor
        if bad == 0:
            column = tl.arange(0, 8)
            added = tl.where(column == 0, 1.0, 0.0).to(tl.float64)
            added = tl.where(column == 1, tl.full([], n_elements, tl.float64), added)
            added = tl.where(column == 2, total, added)
            added = tl.where(column == 3, norm * norm, added)
            added = tl.where(column == 4, norm, added)
            at = sums + kept_at + column
            before = tl.load(at, mask=column < 5, other=0.0)
            tl.store(at, before + added, mask=column < 5)
            tl.store(largest, tl.maximum(tl.load(largest), peak))

        column = tl.arange(0, BINS)
        number = tl.zeros([BINS], dtype=tl.int64)
        for i in range(programs):
            number += tl.load(counts + i * BINS + column)
        zeros = tl.sum(tl.where(column == bins + 1, number, 0), axis=0)
        bad_values = tl.sum(tl.where(column == bins, number, 0), axis=0)
        share = tl.arange(0, 2)
        of_shares = tl.where(share == 0, zeros, bad_values).to(tl.float64)
        at = sums + zeros_at + share
        tl.store(at, tl.load(at) + of_shares)
        inside = column < bins
        at = sums + bins_at + column
        before = tl.load(at, mask=inside, other=0.0)
        tl.store(at, before + number.to(tl.float64), mask=inside)


@triton.jit
def _alive_kernel(
    x,
    flags,
    state,
    calls_at,
    every,
    zero,
    units,
    outer,
    columns,
    splits,
    column_steps,
    x_unit,
    x_outer,
    x_column,
    TRAINING: tl.constexpr,
    GATED: tl.constexpr,
    PLANNED: tl.constexpr,
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIG: tl.constexpr,
):
    """Set the flags of channels with a magnitude above a bound, or with NaN."""
    program = tl.program_id(0)
    split = program % splits
    unit = program // splits * UNITS + tl.arange(0, UNITS)
    if BIG:
        unit = unit.to(tl.int64)
    inside = unit < units
    known = tl.load(flags + unit, mask=inside, other=1)
    wanted = tl.min(known.to(tl.int32), axis=0) == 0  # a living channel stays alive
    if wanted & is_due(state, TRAINING, calls_at, every, GATED, PLANNED):
        most = tl.full([], zero, tl.float32)  # inductor passes numbers as float64
        some_alive = tl.zeros([UNITS], dtype=tl.int32)
        for step in range(split, outer * column_steps, splits):
            place, column = tile_of(step, column_steps, COLUMNS, BIG)
            exists = inside[:, None] & (column < columns)[None, :]
            at = (unit * x_unit + place * x_outer)[:, None] + column[None, :] * x_column
            value = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
            lives = exists & ((tl.abs(value) <= most) == 0)  # true for NaN
            some_alive = tl.maximum(some_alive, tl.max(lives.to(tl.int32), axis=1))
        living = tl.full([UNITS], 1, tl.int8)
        tl.store(flags + unit, living, mask=inside & (some_alive > 0))


@triton.jit
def _largest_of(
    x,
    program,
    outer,
    columns,
    programs,
    column_steps,
    x_outer,
    x_column,
    SIZE: tl.constexpr,
    BIG: tl.constexpr,
):
    """Return the largest magnitude and the largest positive value that a program reads.

    Both are Inf if a value is NaN.
    """
    largest = tl.full([], 0.0, tl.float64)
    positive = tl.full([], 0.0, tl.float64)
    for step in range(program, outer * column_steps, programs):
        place, column = tile_of(step, column_steps, SIZE, BIG)
        exists = column < columns
        value = tl.load(x + place * x_outer + column * x_column, mask=exists, other=0.0)
        wide = value.to(tl.float32)
        known = tl.where(wide != wide, float("inf"), wide)
        positive = tl.maximum(positive, tl.max(tl.maximum(known, 0.0), axis=0).to(tl.float64))
        largest = tl.maximum(largest, tl.max(tl.abs(known), axis=0).to(tl.float64))
    return largest, positive


@triton.jit
def _keep_largest(numbers, largest, positive, ROLE: tl.constexpr):
    """Keep the largest values that a program has measured: see `largest_of_call`."""
    if ROLE == 0:
        tl.atomic_max(numbers, largest)
        tl.atomic_max(numbers + 1, positive)
    elif ROLE == 1:
        tl.atomic_max(numbers + 2, largest)
    else:
        tl.atomic_max(numbers + 2, positive)


@triton.jit
def _largest_kernel(
    x,
    y,
    numbers,
    state,
    turn_at,
    distance_at,
    outer_of_x,
    columns_of_x,
    programs_of_x,
    column_steps_of_x,
    x_outer,
    x_column,
    outer_of_y,
    columns_of_y,
    programs_of_y,
    column_steps_of_y,
    y_outer,
    y_column,
    TRAINING: tl.constexpr,
    PLANNED: tl.constexpr,
    X_ROLE: tl.constexpr,
    Y_ROLE: tl.constexpr,
    X_SIZE: tl.constexpr,
    Y_SIZE: tl.constexpr,
    BIG: tl.constexpr,
):
    """Find the largest values of two tensors with their roles; the second may be missing."""
    program = tl.program_id(0)
    if is_due(state, TRAINING, turn_at, distance_at, PLANNED, PLANNED):
        if program < programs_of_x:
            largest, positive = _largest_of(
                x,
                program,
                outer_of_x,
                columns_of_x,
                programs_of_x,
                column_steps_of_x,
                x_outer,
                x_column,
                X_SIZE,
                BIG,
            )
            _keep_largest(numbers, largest, positive, X_ROLE)
        else:
            largest, positive = _largest_of(
                y,
                program - programs_of_x,
                outer_of_y,
                columns_of_y,
                programs_of_y,
                column_steps_of_y,
                y_outer,
                y_column,
                Y_SIZE,
                BIG,
            )
            _keep_largest(numbers, largest, positive, Y_ROLE)


@triton.jit
def _square_kernel(
    x,
    square,
    state,
    turn_at,
    distance_at,
    outer,
    columns,
    programs,
    column_steps,
    x_outer,
    x_column,
    TRAINING: tl.constexpr,
    SIZE: tl.constexpr,
    BIG: tl.constexpr,
):
    """Add up the squares of a gradient in compiled code, if the gradient is measured."""
    program = tl.program_id(0)
    if is_due(state, TRAINING, turn_at, distance_at, True, True):
        total = tl.zeros([1], dtype=tl.float64)
        for step in range(program, outer * column_steps, programs):
            place, column = tile_of(step, column_steps, SIZE, BIG)
            exists = column < columns
            value = tl.load(x + place * x_outer + column * x_column, mask=exists, other=0.0)
            total += square_sum(value.to(tl.float32)[None, :])
        tl.atomic_add(square + tl.arange(0, 1), total)


@triton.jit
def _keep_row(rows, is_kept, call, value, KEEP: tl.constexpr, WIDTH: tl.constexpr):
    """Add a row behind the others if it `is_kept`, see `measures.rows_in`. The oldest row goes."""
    place = tl.arange(0, WIDTH)
    last = 2 * KEEP - 2  # where the new row begins
    later = tl.load(rows + place + 2, mask=place < last, other=0.0)
    row = tl.where(place == last, call, value)
    tl.debug_barrier()  # all threads have read before one writes
    exists = is_kept & (place < 2 * KEEP)
    tl.store(rows + place, tl.where(place < last, later, row), mask=exists)


@triton.jit
def _note_call_kernel(
    state,  # before its view `numbers`; see `_add_kernel`
    numbers,
    near,
    counted_at,
    off_at,
    calls_at,
    bad_calls_at,
    first_bad_at,
    first_made_at,
    first_worse_at,
    near_at,
    measured_at,
    rows_at,
    turn_at,
    distance_at,
    TRAINING: tl.constexpr,
    HAS_NEAR: tl.constexpr,
    KEEP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add a call to the state of a Watchdog in compiled code, and set `numbers` to 0."""
    due = is_due(state, TRAINING, turn_at, distance_at, True, True)
    calls = tl.load(state + calls_at)
    bad_calls = tl.load(state + bad_calls_at)
    first_bad = tl.load(state + first_bad_at)
    first_made = tl.load(state + first_made_at)
    first_worse = tl.load(state + first_worse_at)
    near_before = tl.load(state + near_at)
    measured = tl.load(state + measured_at)
    turn = tl.load(state + turn_at)
    infinite = float("inf")
    largest = tl.load(numbers)
    bad = (largest < infinite) == 0
    worse = (tl.load(numbers + 1) < infinite) == 0
    made = bad & (tl.load(numbers + 2) < infinite)
    on = _begin_call(state, TRAINING, counted_at, off_at, True)
    if on:
        tl.store(state + calls_at, calls + 1)
        tl.store(state + turn_at, turn + 1)
    if KEEP > 0:
        is_kept = due & (largest < infinite) & (first_bad == infinite)
        _keep_row(state + rows_at, is_kept, turn + 1, largest, KEEP, WIDTH)
    if due:
        tl.store(state + measured_at, measured + 1)
        if bad:
            tl.store(state + bad_calls_at, bad_calls + 1)
            tl.store(state + first_bad_at, tl.minimum(first_bad, calls))
        if made:
            tl.store(state + first_made_at, tl.minimum(first_made, calls))
        if worse:
            tl.store(state + first_worse_at, tl.minimum(first_worse, calls))
        if HAS_NEAR:
            tl.store(state + near_at, near_before + tl.load(near).to(tl.float64))
        zero = tl.full([], 0.0, tl.float64)
        tl.store(numbers, zero)
        tl.store(numbers + 1, zero)
        tl.store(numbers + 2, zero)


@triton.jit
def _note_gradient_kernel(
    state,  # before its view `square`; see `_add_kernel`
    square,
    scale,
    seen_at,
    gradients_at,
    norm_at,
    first_bad_at,
    rows_at,
    turn_at,
    distance_at,
    TRAINING: tl.constexpr,
    SCALE_ON_DEVICE: tl.constexpr,
    KEEP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add a gradient to the state of a Watchdog in compiled code, and set `square` to 0."""
    due = is_due(state, TRAINING, turn_at, distance_at, True, True)
    on = tl.load(state + TRAINING)
    seen = tl.load(state + seen_at)
    turn = tl.load(state + turn_at)
    gradients = tl.load(state + gradients_at)
    norms = tl.load(state + norm_at)
    first_bad = tl.load(state + first_bad_at)
    norm = tl.sqrt(tl.load(square)) / loss_scale(scale, SCALE_ON_DEVICE)
    finite = norm < float("inf")
    tl.debug_barrier()  # all threads have read before one writes
    if on > 0:
        tl.store(state + seen_at, seen + 1)
        tl.store(state + turn_at, turn + 1)
    if KEEP > 0:
        is_kept = due & finite & (first_bad == float("inf"))
        _keep_row(state + rows_at, is_kept, turn + 1, norm, KEEP, WIDTH)
    if due:
        tl.store(state + gradients_at, gradients + 1)
        tl.store(square, tl.full([], 0.0, tl.float64))
        if finite:
            tl.store(state + norm_at, norms + norm)
        else:
            tl.store(state + first_bad_at, tl.minimum(first_bad, seen))


@dataclass(frozen=True)
class Gate:
    """The state of a site in compiled code: whether it is on, and which calls are measured.

    Attributes:
        state: the numbers of the site; see `functional.measures`. The first two tell whether the
            site is on in evaluation mode, and in training mode.
        training: the mode of the layer, which is the place of one of these two.
        counts: True for a call of the layer, False for a gradient.
        calls: the place of the number of calls in which the site was on.
        every: each n-th of these calls is measured.
        planned: whether a Watchdog plans the calls. Then `calls` is the place of the number of
            calls since the beginning, and `every` is the place of the distance of measured calls.
    """

    state: Tensor
    training: bool
    counts: bool
    calls: int
    every: int = 1
    planned: bool = False

    @classmethod
    def unread(cls, tensor: Tensor) -> "Gate":
        """Return what a kernel is given, and does not read, if a call has no gate."""
        return cls(tensor, training=False, counts=False, calls=0)


class _Steps(NamedTuple):
    """How several programs read a tensor as one unit of a `UnitLayout`.

    Attributes:
        programs: the number of programs that read the tensor.
        size: the number of columns that a program reads at once.
        places: the arguments from `outer` to `x_column` of the kernels.
    """

    programs: int
    size: int
    places: tuple[int, int, int, int, int, int]


@functools.lru_cache(maxsize=4096)
def _steps_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> _Steps | None:
    """Return how a tensor is read; None if it must be copied first."""
    layout = units_of(shape, strides, None)
    if layout is None:
        return None
    size = min(_SIZE, launch.power_of_two(layout.columns))
    steps = launch.parts(layout.columns, size)
    programs = 0
    if math.prod(shape):
        programs = min(_PROGRAMS, layout.outer * steps)
    _, outer_stride, column_stride = layout.strides
    places = layout.outer, layout.columns, programs, steps, outer_stride, column_stride
    return _Steps(programs, size, places)


def _one_unit(x: Tensor) -> tuple[Tensor, _Steps]:
    """Return a tensor, or a copy, that programs read as one unit, and how they read it."""
    steps = _steps_of(tuple(x.shape), x.stride())
    if steps is None:
        x = x.contiguous()
        steps = _steps_of(tuple(x.shape), x.stride())
        assert steps is not None  # a contiguous tensor is one row
    return x, steps


def measure(
    x: Tensor,
    sums: Tensor,
    largest: Tensor,
    exponents: tuple[int, int],
    places: Places,
    scale: float | Tensor = 1.0,
    gate: Gate | None = None,
) -> None:
    """Add a tensor to statistics: two kernels.

    Args:
        x: the tensor. If a value is not finite, all moments are left out.
        sums: in float64; changed.
        largest: the largest magnitude so far, in float64; changed.
        exponents: the exponents of 2 where the octaves begin and end.
        places: the places of the numbers.
        scale: the factor of the loss, by which values are divided.
        gate: decides in compiled code whether the call is measured, and counts the call.
    """
    first, last = exponents
    bins = last - first + 2
    width = launch.power_of_two(bins + 3)
    x, unit = _one_unit(x)
    programs = unit.programs
    rows = max(programs, 1)
    parts = torch.empty(rows * _PARTS, dtype=torch.float64, device=x.device)
    counts = torch.empty(rows * width, dtype=torch.int32, device=x.device)

    passed = gate or Gate.unread(sums)
    on_device = isinstance(scale, Tensor)
    launch.start(
        _measure_kernel,
        programs,
        x.device,
        x,
        parts,
        counts,
        scale,
        passed.state,
        passed.calls,
        passed.every,
        *unit.places,
        first + 127,
        bins,
        SCALE_ON_DEVICE=on_device,
        TRAINING=int(passed.training),
        GATED=gate is not None,
        SIZE=unit.size,
        BINS=width,
        WIDE=launch.wide(x),
        BIG=launch.is_big(0, x),
    )
    launch.start(
        _add_kernel,
        1,
        x.device,
        parts,
        counts,
        passed.state,
        sums,
        largest,
        scale,
        x.numel(),
        programs,
        passed.every,
        bins,
        places.kept,
        places.zeros,
        places.bins,
        places.counted,
        places.off,
        passed.calls,
        places.all_values,
        SCALE_ON_DEVICE=on_device,
        TRAINING=int(passed.training),
        GATED=gate is not None,
        COUNTS=passed.counts,
        BINS=width,
        PROGRAMS=launch.power_of_two(rows),
    )


def alive(x: Tensor, flags: Tensor, zero: float, gate: Gate | None = None) -> None:
    """Set the flags of the channels of a tensor (N, C, ...) with a magnitude above `zero`.

    Args:
        x: the tensor; NaN counts.
        flags: a boolean for each channel; changed.
        zero: the largest magnitude of a channel that is not alive.
        gate: whether the site is on, in compiled code.
    """
    read = units_of(tuple(x.shape), x.stride(), 1)
    if read is None:
        x = x.contiguous()
        read = units_of(tuple(x.shape), x.stride(), 1)
        assert read is not None  # a contiguous tensor has three axes

    passed = gate or Gate.unread(flags)
    launch.start(
        _alive_kernel,
        launch.parts(read.units, read.together) * read.splits if x.numel() else 0,
        x.device,
        x,
        flags if launch.is_traced() else flags.view(torch.int8),  # inductor has no such view
        passed.state,
        passed.calls,
        passed.every,
        zero,
        read.units,
        read.outer,
        read.columns,
        read.splits,
        read.steps,
        *read.strides,
        TRAINING=int(passed.training),
        GATED=gate is not None,
        PLANNED=passed.planned,
        UNITS=read.together,
        COLUMNS=read.step,
        BIG=launch.is_big(0, x),
    )


def largest_of_call(
    outputs: Sequence[Tensor], given: Sequence[Tensor], numbers: Tensor, gate: Gate | None = None
) -> None:
    """Find three numbers of a call of a layer, in float64: one kernel for each two tensors.

    They are the largest magnitude and the largest positive value in the outputs, and the largest
    magnitude in the arguments. Of the arguments after the first one, which may be masks of
    attention, only positive values count. A number is Inf if a value is NaN.

    Args:
        outputs: the floating-point tensors in the output.
        given: the floating-point tensors among the arguments.
        numbers: the three numbers, which must be 0 before.
        gate: in compiled code, whether the call is measured.
    """
    roles = [*((x, _OUTPUT) for x in outputs), *((x, _GIVEN) for x in given[:1])]
    roles += [(x, _MASK) for x in given[1:]]
    parts = [(*_one_unit(x), role) for x, role in roles if x.numel()]
    passed = gate or Gate.unread(numbers)
    for first in range(0, len(parts), 2):
        pair = parts[first : first + 2]
        x, of_x, role_of_x = pair[0]
        y, of_y, role_of_y = pair[-1]
        is_alone = len(pair) == 1
        launch.start(
            _largest_kernel,
            of_x.programs + (0 if is_alone else of_y.programs),
            numbers.device,
            x,
            y,
            numbers,
            passed.state,
            passed.calls,
            passed.every,
            *of_x.places,
            *of_y.places,
            TRAINING=int(passed.training),
            PLANNED=gate is not None,  # only a Watchdog has a gate here, and plans its calls
            X_ROLE=role_of_x,
            Y_ROLE=role_of_y,
            X_SIZE=of_x.size,
            Y_SIZE=of_y.size,
            BIG=launch.is_big(0, x, y),
        )


def square_of(x: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return the sum of squares of a tensor divided by a scale, in float64, by one kernel."""
    return squares(x, add=True, scale=scale).view(())


def note_call(gate: Gate, numbers: Tensor, near: Tensor | None, at: Any, keep: int) -> None:
    """Add a call to the state of a Watchdog in compiled code.

    Args:
        gate: the state.
        numbers: the numbers from `largest_of_call`.
        near: the share of values near their bounds; None for layers without bounds.
        at: the places of ten numbers: calls of the layer in this mode; calls while switched off;
            calls while switched on; measured calls with NaN or Inf; the first of these; the first
            of these with a finite input; the first call with NaN or +Inf, because -Inf may be a
            mask; shares near bounds; all measured calls; the rows.
        keep: the number of rows.
    """
    launch.start(
        _note_call_kernel,
        1,
        gate.state.device,
        gate.state,
        numbers,
        numbers if near is None else near,
        *at,
        gate.calls,
        gate.every,
        TRAINING=int(gate.training),
        HAS_NEAR=near is not None,
        KEEP=keep,
        WIDTH=launch.power_of_two(2 * keep),
    )


def note_gradient(
    gate: Gate, grad: Tensor, square: Tensor, scale: Tensor | None, at: Any, keep: int
) -> None:
    """Add a gradient to the state of a Watchdog in compiled code: two kernels.

    Args:
        gate: the state.
        grad: the gradient.
        square: the sum of the squares of the gradient; 0 before and after.
        scale: the factor of the loss, by which the norm is divided; None is 1.
        at: the places of five numbers: gradients, measured gradients, the sum of their norms, the
            first gradient with NaN or Inf, and the rows.
        keep: the number of rows.
    """
    grad, unit = _one_unit(grad)
    launch.start(
        _square_kernel,
        unit.programs,
        grad.device,
        grad,
        square,
        gate.state,
        gate.calls,
        gate.every,
        *unit.places,
        TRAINING=int(gate.training),
        SIZE=unit.size,
        BIG=launch.is_big(0, grad),
    )
    launch.start(
        _note_gradient_kernel,
        1,
        gate.state.device,
        gate.state,
        square,
        1.0 if scale is None else scale,
        *at,
        gate.calls,
        gate.every,
        TRAINING=int(gate.training),
        SCALE_ON_DEVICE=scale is not None,
        KEEP=keep,
        WIDTH=launch.power_of_two(2 * keep),
    )
