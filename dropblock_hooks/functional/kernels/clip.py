"""Bounds of gradients by norms on a GPU: two kernels, or one for small tensors.

    norm = sqrt(sum(x ** 2))                    of each unit
    y = x * min(1, bound / norm)

In torch operations, the same is `functional.gradients.scale_counted`. ``functional.gradients``
calls `clip`. Other kernels, such as those of `moments`, use its other functions.

squares   sums of squares of parts of a tensor, in float64
clip      y = x * min(1, bound / norm), the norms, and how many elements were changed

Both read a tensor as units: the whole tensor, samples, or channels. Each unit has a norm. The
squares of a unit are added in several parts, so that enough programs run. The parts are added in a
fixed order, so results repeat. If a program reads whole units at once, `clip` adds their squares
itself.

With BIG, a kernel computes places in memory with 64 bits.
"""

import functools
from dataclasses import dataclass
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch

_Kind: TypeAlias = tuple[torch.dtype, bool]
"""The dtype of a tensor, and whether its address is aligned: Triton compiles a form for each."""
_PROGRAMS = 512  # units are split into parts if fewer programs would measure a tensor
_SIZE = 4096  # elements in a step of a program


@triton.jit
def loss_scale(scale, ON_DEVICE: tl.constexpr):
    """Return the factor of the loss in float64, from a number or from a pointer to a tensor."""
    if ON_DEVICE:
        factor = tl.load(scale).to(tl.float64)
    else:
        factor = tl.full([], scale, tl.float64)
    return factor


@triton.jit
def tile_of(step, column_steps, SIZE: tl.constexpr, BIG: tl.constexpr):
    """Return the place on the second axis that a step of a program reads, and its columns.

    The columns of a place take `column_steps` steps.
    """
    place = step // column_steps
    column = step % column_steps * SIZE + tl.arange(0, SIZE)
    if BIG:
        place = place.to(tl.int64)
        column = column.to(tl.int64)
    return place, column


@triton.jit
def square_sum(value):
    """Return the sums of squares of the rows of a float32 tile, in float64.

    Each row is divided by its largest magnitude, because squares could overflow in float32. A row
    with NaN or Inf is not divided.
    """
    magnitude = tl.where(value == value, tl.abs(value), float("inf"))
    peak = tl.max(magnitude, axis=1)
    usable = (peak > 0) & (peak < float("inf"))
    divisor = tl.where(usable, peak, 1.0)
    share = value / divisor[:, None]
    wide = divisor.to(tl.float64)
    return tl.sum(share * share, axis=1).to(tl.float64) * wide * wide


@triton.jit
def _squares_kernel(
    x,
    sums,
    scale,
    units,
    outer,
    columns,
    splits,
    column_steps,
    x_unit,
    x_outer,
    x_column,
    SCALE_ON_DEVICE: tl.constexpr,
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    BIG: tl.constexpr,
):
    """Add up the squares of each unit, in as many parts as there are splits.

    `UnitLayout` explains the sizes and strides. With ADD, all parts of a unit are added to one sum,
    and the values are divided by the factor of the loss.
    """
    program = tl.program_id(0)
    split = program % splits
    unit = program // splits * UNITS + tl.arange(0, UNITS)
    if BIG:
        unit = unit.to(tl.int64)
    total = tl.zeros([UNITS], dtype=tl.float64)
    for step in range(split, outer * column_steps, splits):
        place, column = tile_of(step, column_steps, COLUMNS, BIG)
        exists = (unit < units)[:, None] & (column < columns)[None, :]
        at = (unit * x_unit + place * x_outer)[:, None] + column[None, :] * x_column
        value = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
        total += square_sum(value)
    if ADD:
        factor = loss_scale(scale, SCALE_ON_DEVICE)
        tl.atomic_add(sums + unit, total / factor / factor, mask=unit < units)
    else:
        tl.store(sums + unit * splits + split, total, mask=unit < units)


@triton.jit
def _norms_of(sums, unit, units, splits, UNITS: tl.constexpr, SPLITS: tl.constexpr):
    """Return the norms of units from their sums of squares."""
    split = tl.arange(0, SPLITS)
    exists = (unit < units)[:, None] & (split < splits)[None, :]
    parts = tl.load(sums + unit[:, None] * splits + split[None, :], mask=exists, other=0.0)
    return tl.sqrt(tl.sum(parts, axis=1))


@triton.jit
def _clip_kernel(
    x,
    y,
    sums,
    weights,
    norms,
    changed,
    scale,
    bound,
    least,
    units,
    outer,
    columns,
    splits,
    weight_splits,
    column_steps,
    x_unit,
    x_outer,
    x_column,
    y_unit,
    y_outer,
    y_column,
    BY_WEIGHTS: tl.constexpr,
    SCALE_ON_DEVICE: tl.constexpr,
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    WEIGHT_SPLITS: tl.constexpr,
    WHOLE: tl.constexpr,
    BIG: tl.constexpr,
):
    """Clip units, write the norms of the unscaled gradient, and count the changed elements.

    With BY_WEIGHTS, the norms are divided by the norms of the weights, which count as at least
    `least`. Units with a norm above `bound` are clipped. Units whose norm is not finite stay
    unchanged. With WHOLE, each program reads whole units, and adds their squares itself.
    """
    program = tl.program_id(0)
    parts = outer * column_steps
    step = program % parts
    unit = program // parts * UNITS + tl.arange(0, UNITS)
    if BIG:
        unit = unit.to(tl.int64)
    inside = unit < units
    factor = loss_scale(scale, SCALE_ON_DEVICE)

    place, column = tile_of(step, column_steps, COLUMNS, BIG)
    exists = inside[:, None] & (column < columns)[None, :]
    of_x = (unit * x_unit + place * x_outer)[:, None] + column[None, :] * x_column
    of_y = (unit * y_unit + place * y_outer)[:, None] + column[None, :] * y_column
    value = tl.load(x + of_x, mask=exists, other=0.0).to(tl.float32)

    if WHOLE:
        norm = tl.sqrt(square_sum(value))
    else:
        norm = _norms_of(sums, unit, units, splits, UNITS, SPLITS)
    divisor = tl.zeros([UNITS], dtype=tl.float64) + factor  # of the norms that are written
    if BY_WEIGHTS:
        of_weights = _norms_of(weights, unit, units, weight_splits, UNITS, WEIGHT_SPLITS)
        divisor = tl.maximum(of_weights, tl.full([], least, tl.float64)) * factor
    limit = divisor * tl.full([], bound, tl.float64)
    over = (norm > limit) & (norm < float("inf"))
    ratio = tl.where(over, limit / tl.maximum(norm, limit), 1.0)
    # two factors, because float32 would round a very small ratio to 0
    large_part = tl.maximum(ratio, 1e-30)
    first = large_part.to(tl.float32)
    second = (ratio / large_part).to(tl.float32)

    clipped = value * first[:, None] * second[:, None]
    tl.store(y + of_y, clipped.to(y.dtype.element_ty), mask=exists)

    if step == 0:
        tl.store(norms + unit, norm / divisor, mask=inside)
        number = tl.sum((over & inside).to(tl.int64), axis=0) * outer * columns
        tl.atomic_add(changed, number)


# hashed as an object, which is faster; `units_of` returns the same object for the same arguments
@dataclass(frozen=True, eq=False)
class UnitLayout:
    """How a tensor is read as (units, outer, columns); each unit has a norm.

    In kernels, `x_unit`, `x_outer` and `x_column` are the strides of a tensor `x`, and
    `column_steps` is the number of steps that the columns take.

    Attributes:
        units: number of units.
        outer: number of places on the second axis.
        columns: number of places on the third axis.
        strides: the strides of the three axes.
        order: the axes that the second and the third one consist of, the outermost first.
    """

    units: int
    outer: int
    columns: int
    strides: tuple[int, int, int]
    order: tuple[int, ...]

    @functools.cached_property
    def together(self) -> int:
        """How many units a program reads at once. It is 1 unless they are adjacent or short."""
        side_by_side = self.strides[0] < self.strides[2] or self.columns < 16
        return min(32, launch.power_of_two(self.units)) if side_by_side else 1

    @functools.cached_property
    def step(self) -> int:
        """The number of columns that a program reads at once."""
        return min(_SIZE // self.together, launch.power_of_two(self.columns))

    @functools.cached_property
    def steps(self) -> int:
        """How many steps the columns take."""
        return launch.parts(self.columns, self.step)

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether a program reads whole units at once."""
        return self.outer * self.steps == 1

    @functools.cached_property
    def splits(self) -> int:
        """The number of programs for each group of units."""
        groups = launch.parts(self.units, self.together)
        wanted = max(1, _PROGRAMS // groups)
        return min(wanted, self.outer * self.steps)


@functools.lru_cache(maxsize=4096)
def units_of(
    shape: tuple[int, ...], strides: tuple[int, ...], axis: int | None
) -> UnitLayout | None:
    """Return how a tensor is read, or None if the other axes can't be read as two axes.

    With an `axis`, each place on it is a unit. If `axis` is None, the whole tensor is one unit.
    """
    axes = [i for i, size in enumerate(shape) if size > 1 and i != axis]
    axes.sort(key=lambda i: (strides[i], -i))  # the innermost one first
    joined: list[tuple[int, int]] = []
    for i in axes:
        if joined and strides[i] == joined[-1][0] * joined[-1][1]:
            joined[-1] = (joined[-1][0], joined[-1][1] * shape[i])
        else:
            joined.append((strides[i], shape[i]))
    if len(joined) > 2:
        return None
    joined += [(0, 1)] * (2 - len(joined))
    (column_stride, columns), (outer_stride, outer) = joined
    units = 1 if axis is None else shape[axis]
    unit_stride = 0 if axis is None else strides[axis]
    order = tuple(reversed(axes))
    return UnitLayout(units, outer, columns, (unit_stride, outer_stride, column_stride), order)


def squares(
    x: Tensor,
    axis: int | None = None,
    add: bool = False,
    scale: float | Tensor = 1.0,
) -> Tensor:
    """Return the sums of squares of each unit of a tensor, in float64.

    The shape is (units, parts of a unit), or (units,) with `add`.

    Args:
        x: the tensor.
        axis: the axis of the units; None for the whole tensor.
        add: True gives each unit one part. Its last digits may differ from run to run, because the
            order of the additions may differ.
        scale: the divisor of the values; used with `add` only.
    """
    read = units_of(tuple(x.shape), x.stride(), axis)
    if read is None:
        return squares(x.contiguous(), axis, add, scale)
    if add:
        sums = launch.zeros(x.device, read.units).view(torch.float64)  # 0 has the same bits
    else:
        sums = torch.empty((read.units, read.splits), dtype=torch.float64, device=x.device)
    kind = x.dtype, launch.is_aligned(x)
    squaring = _squaring(read, kind, isinstance(scale, Tensor), add, launch.is_big(0, x))
    squaring.start(x.device, x, sums, scale)
    return sums


def clip(
    x: Tensor,
    bound: float,
    axis: int | None = None,
    scale: float | Tensor = 1.0,
    weights: Tensor | None = None,
    least: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Clip units; return the new tensor, the number of changed elements, and the norms.

    Args:
        x: the gradient.
        bound: the largest norm; with `weights`, as a share of the norm of the weights of a unit.
        axis: the axis of the units; None for the whole tensor.
        scale: the factor of the loss. The norms are divided by it.
        weights: the parameter, of the same shape; None if the bound does not depend on it. The
            norms are divided by the norms of its units.
        least: the smallest norm of weights.
    """
    parts_of_weight = None
    if weights is not None:
        squares_of_weights = squares(weights, axis)
        parts_of_weight = squares_of_weights.shape[1]

    y = torch.empty_like(x)
    kind = x.dtype, launch.is_aligned(x)
    is_on_device = isinstance(scale, Tensor)
    plan = _plan(x.shape, x.stride(), y.stride(), kind, axis, parts_of_weight, is_on_device)
    if plan is None:
        clipped, changed, norms = clip(x.contiguous(), bound, axis, scale, weights, least)
        return y.copy_(clipped), changed, norms

    device = x.device
    norms = torch.empty(plan.units, dtype=torch.float64, device=device)
    sums = norms  # any tensor, because a program that reads whole units computes the sums
    if plan.squaring is not None:
        sums = torch.empty(plan.sums, dtype=torch.float64, device=device)
        plan.squaring.start(device, x, sums, 1.0)

    of_weights = sums if weights is None else squares_of_weights  # without weights, any tensor
    changed = launch.count(device)
    plan.clipping.start(device, x, y, sums, of_weights, norms, changed, scale, bound, least)
    return y, changed, norms


@dataclass(frozen=True)
class _Plan:
    """How tensors with the same shape, strides and kind are clipped.

    Attributes:
        units: the number of units.
        sums: the number of sums of squares.
        squaring: the start of `_squares_kernel`; None if one kernel is enough.
        clipping: the start of `_clip_kernel`.
    """

    units: int
    sums: int
    squaring: launch.Launch | None
    clipping: launch.Launch


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...],
    x_strides: tuple[int, ...],
    y_strides: tuple[int, ...],
    kind: _Kind,
    axis: int | None,
    parts_of_weight: int | None,
    scale_on_device: bool,
) -> _Plan | None:
    """Return how a tensor is clipped; None if it and its result have no common layout of units."""
    shape = tuple(shape)
    read = units_of(shape, x_strides, axis)
    written = units_of(shape, y_strides, axis)
    if read is None or written is None or _shape(read) != _shape(written):
        return None

    squaring = None
    if not read.is_whole:
        is_x_big = launch.is_far(0, shape, x_strides)
        squaring = _squaring(read, kind, False, False, is_x_big)
    is_big = launch.is_far(0, shape, x_strides, y_strides)
    clipping = _clipping(read, written, parts_of_weight, scale_on_device, is_big)
    return _Plan(read.units, read.units * read.splits, squaring, clipping)


@functools.lru_cache(maxsize=4096)
def _squaring(
    read: UnitLayout, kind: _Kind, scale_on_device: bool, add: bool, is_big: bool
) -> launch.Launch:
    """Return the start of `_squares_kernel` for tensors of one kind that are read alike."""
    return launch.Launch(
        _squares_kernel,
        launch.parts(read.units, read.together) * read.splits,
        (read.units, read.outer, read.columns, read.splits, read.steps, *read.strides),
        varies=scale_on_device,  # the dtype of a scale in a tensor is not known here
        SCALE_ON_DEVICE=scale_on_device,
        UNITS=read.together,
        COLUMNS=read.step,
        ADD=add,
        BIG=is_big,
    )


def _clipping(
    read: UnitLayout,
    written: UnitLayout,
    parts_of_weight: int | None,
    scale_on_device: bool,
    is_big: bool,
) -> launch.Launch:
    """Return the start of `_clip_kernel` for tensors of one kind, read alike and written alike."""
    weight_sums = 1 if parts_of_weight is None else parts_of_weight
    numbers = (
        read.units,
        read.outer,
        read.columns,
        read.splits,
        weight_sums,
        read.steps,
        *read.strides,
        *written.strides,
    )
    return launch.Launch(
        _clip_kernel,
        launch.parts(read.units, read.together) * read.outer * read.steps,
        numbers,
        varies=scale_on_device,  # the dtype of a scale in a tensor is not known here
        BY_WEIGHTS=parts_of_weight is not None,
        SCALE_ON_DEVICE=scale_on_device,
        UNITS=read.together,
        COLUMNS=read.step,
        SPLITS=launch.power_of_two(read.splits),
        WEIGHT_SPLITS=launch.power_of_two(weight_sums),
        WHOLE=read.is_whole,
        BIG=is_big,
    )


def _shape(read: UnitLayout) -> tuple[int, int, int, tuple[int, ...]]:
    return read.units, read.outer, read.columns, read.order
