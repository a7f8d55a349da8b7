"""Dropout on a GPU, of elements or of units: channels, samples or the whole batch.

    dropped = rand(units) < p
    y = where(dropped, 0, x * factor)

`masks.bernoulli` and `masks.Mask.drop` do the same in torch operations. ``functional.dropout``
calls `draw_elements` and `draw_units`.

Elements are drawn from a seed, and the backward draws them again from the same seed. Units are
drawn once: a byte for each unit says whether it is kept.

An element is dropped if a random number of 16 bits is below p * 2^16. This limit is rounded up or
down at random, so that the rate is exact. A random draw has four numbers of 32 bits, and so eight
such halves.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..masks import Mask
from . import launch
from .blocks import key_of, limit_of, random_bits

_STRIPS = 512  # random draws of a program, each for two strips of 4 elements


@triton.jit
def _limit_of_halves(p, a, b, c, d):
    """Return the limit below which a half drops its element, for the four numbers of a draw.

    The limit is rounded up with the chance that makes the rate exact, to 2^-48. The exclusive or of
    the four numbers decides about the rounding, because it is independent of any two halves. So the
    events that two elements are dropped have a covariance of at most 2^-34.
    """
    scaled = tl.full([], p, tl.float32) * 65536.0
    whole = scaled.to(tl.int32)
    rest = ((scaled - whole.to(tl.float32)) * 4294967296.0).to(tl.int64).to(tl.uint32)
    return whole + ((a ^ b ^ c ^ d) < rest).to(tl.int32)


@triton.jit
def _dropped_halves(first, second, limit):
    """Return four bits for the halves of two random numbers: whether they are below a limit."""
    bits = ((first & 0xFFFF).to(tl.int32) < limit).to(tl.int32)
    bits |= ((first >> 16).to(tl.int32) < limit).to(tl.int32) << 1
    bits |= ((second & 0xFFFF).to(tl.int32) < limit).to(tl.int32) << 2
    bits |= ((second >> 16).to(tl.int32) < limit).to(tl.int32) << 3
    return bits


@triton.jit
def _number_of_four(bits, n_left):
    """Return how many of four bits are set. From the first bit on, only `n_left` elements exist."""
    existing = tl.minimum(tl.maximum(n_left, 0), 4).to(tl.int32)
    bits = bits & ((1 << existing) - 1)
    pairs = bits - ((bits >> 1) & 5)  # the number of bits in each pair, as two bits
    return (pairs & 3) + (pairs >> 2)


@triton.jit(do_not_specialize=["seed"])  # `launch._kind` says why
def _drop_elements_kernel(
    x,
    y,
    dropped,
    seed,
    p,
    factor,
    n_elements,
    SEED_ON_DEVICE: tl.constexpr,
    COUNTS: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
    BIG: tl.constexpr,
):
    """Drop elements, in the order of the memory; each random draw has numbers for eight of them.

    `COUNTS` is set in the forward only.
    """
    key = key_of(seed, SEED_ON_DEVICE)
    program = tl.program_id(0)
    if BIG:
        program = program.to(tl.int64)
    strip = tl.arange(0, SIZE)
    counter = (program * SIZE + strip).to(tl.int64)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = low * 0
    a, b, c, d = tl.philox(key, low, high, zero, zero, n_rounds=7)  # the fewest, see `blocks`
    limit = _limit_of_halves(p, a, b, c, d)

    step = tl.arange(0, 4)[None, :]
    n_dropped = tl.zeros([SIZE], dtype=tl.int32)
    for part in tl.static_range(2):  # a draw has a strip in each half of the program's elements
        if part == 0:
            bits = _dropped_halves(a, b, limit)
        else:
            bits = _dropped_halves(c, d, limit)
        drops = ((bits[:, None] >> step) & 1) != 0
        first = program * (8 * SIZE) + part * (4 * SIZE)
        place = first + strip[:, None] * 4 + step
        exists = place < n_elements
        value = tl.load(x + place, mask=exists, other=0.0).to(WIDE) * tl.full([], factor, WIDE)
        result = tl.where(drops, 0.0, value)
        tl.store(y + place, result.to(y.dtype.element_ty), mask=exists)
        n_dropped += _number_of_four(bits, n_elements - (first + strip * 4))
    if COUNTS:
        tl.atomic_add(dropped, tl.sum(n_dropped, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["seed"])
def _draw_units_kernel(
    kept,
    dropped,
    seed,
    p,
    n_units,
    elements_of_unit,
    SEED_ON_DEVICE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Draw whether each unit is kept, and count the elements of those that are not."""
    key = key_of(seed, SEED_ON_DEVICE)
    limit = limit_of(tl.full([], p, tl.float32), key)
    unit = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    drawn, _, _, _ = random_bits(key, unit)
    exists = unit < n_units
    tl.store(kept + unit, (drawn >= limit).to(tl.int8), mask=exists)
    n_dropped = tl.sum((exists & (drawn < limit)).to(tl.int64), axis=0)
    tl.atomic_add(dropped, n_dropped * elements_of_unit)


@triton.jit
def _apply_units_kernel(
    x,
    y,
    kept,
    factor,
    n_rows,
    inner,
    n_columns,
    columns,
    x_outer,
    x_inner,
    x_column,
    y_outer,
    y_inner,
    y_column,
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    BIG: tl.constexpr,
):
    """Multiply kept units by a factor, and write 0 in the others.

    A tensor is read as (outer, inner, columns). Each row (outer, inner) is one unit. With LAST, the
    columns are the units of each outer place instead.
    """
    program = tl.program_id(0)
    if BIG:
        program = program.to(tl.int64)
    row = program // n_columns * ROWS + tl.arange(0, ROWS)
    column = program % n_columns * COLUMNS + tl.arange(0, COLUMNS)
    place = row // inner
    within = row % inner
    exists = (row < n_rows)[:, None] & (column < columns)[None, :]
    if LAST:  # loads all, because a mask inside of 16 bytes would split their load
        unit = place[:, None] * columns + column[None, :]
        keeps = tl.load(kept + unit, mask=exists, other=0) != 0
        loaded = exists
    else:  # does not load dropped units
        keeps = (tl.load(kept + row, mask=row < n_rows, other=0) != 0)[:, None] & exists
        loaded = keeps
    of_x = (place * x_outer + within * x_inner)[:, None] + column[None, :] * x_column
    value = tl.load(x + of_x, mask=loaded, other=0.0).to(WIDE) * tl.full([], factor, WIDE)
    if LAST:
        value = tl.where(keeps, value, 0.0)
    of_y = (place * y_outer + within * y_inner)[:, None] + column[None, :] * y_column
    tl.store(y + of_y, value.to(y.dtype.element_ty), mask=exists)


class Elements:
    """Drops elements of tensors, like `sparse.Blocks`; a gradient loses the same elements.

    Args:
        p: chance of an element to be dropped.
        seed: the seed from `launch.draw_seed`.
    """

    def __init__(self, p: float, seed: int | Tensor) -> None:
        self.p = p
        self.seed = seed
        # of the result of the first call, whose elements are drawn in the order of the memory
        self.strides: tuple[int, ...] | None = None

    def count(self, drawn: Tensor) -> Tensor:
        """Return the number of dropped elements, which `drop` has added to `drawn`."""
        return drawn

    def drop(self, x: Tensor, scale: float | None, drawn: Tensor) -> Tensor:
        """Return ``x * scale`` with 0 in the dropped elements.

        The first call, in the forward, counts these in `drawn`.
        """
        y = torch.empty_like(x)
        is_forward = self.strides is None
        if self.strides is None:
            self.strides = y.stride()
        elif y.stride() != self.strides:
            y = torch.empty_strided(x.shape, self.strides, dtype=x.dtype, device=x.device)
        if x.stride() != self.strides:
            x = torch.empty_like(y).copy_(x)
        dropping = _dropping(
            x.numel(), x.dtype, launch.is_aligned(x), is_forward, isinstance(self.seed, Tensor)
        )
        factor = 1.0 if scale is None else scale
        dropping.start(x.device, x, y, drawn, self.seed, self.p, factor)
        return y


@functools.lru_cache(maxsize=4096)
def _dropping(
    n_elements: int, dtype: torch.dtype, is_aligned: bool, counts: bool, seed_on_device: bool
) -> launch.Launch:
    """Return the `Launch` of `_drop_elements_kernel` for so many elements.

    `is_aligned` tells launches apart, because Triton compiles another form for other addresses.
    """
    return launch.Launch(
        _drop_elements_kernel,
        launch.parts(n_elements, 8 * _STRIPS),
        (n_elements,),
        varies=seed_on_device,
        SEED_ON_DEVICE=seed_on_device,
        COUNTS=counts,
        WIDE=launch.wide_type(dtype),
        SIZE=_STRIPS,
        BIG=launch.is_big(n_elements),
    )


class KeptUnits:
    """Drops units of tensors, like `sparse.Blocks`; the mask tells which are kept.

    Args:
        axes: the number of axes at the beginning whose places are units; at most 2.
        dropped: the number of dropped elements.
    """

    def __init__(self, axes: int, dropped: Tensor) -> None:
        self.axes = axes
        self.dropped = dropped

    def count(self, drawn: Tensor) -> Tensor:
        """Return the number of dropped elements, which `draw_units` has counted."""
        return self.dropped

    def drop(self, x: Tensor, scale: float | None, drawn: Tensor) -> Tensor:
        """Return ``x * scale`` with 0 in the units whose number in `drawn` is 0."""
        factor = 1.0 if scale is None else scale
        try:
            return _apply_units(x, self.axes, drawn, factor)
        except launch.KernelError:
            return self._drop_densely(x, scale, drawn)

    def _drop_densely(self, x: Tensor, scale: float | None, drawn: Tensor) -> Tensor:
        """Drop the same units in torch operations."""
        units = x.shape[: self.axes]
        mask = (drawn == 0).view(*units, *[1] * (x.ndim - self.axes))
        return Mask(x.numel()).drop(x, scale, mask)


def draw_elements(
    x: Tensor, p: float, generator: torch.Generator | None
) -> tuple[Elements, Tensor]:
    """Return the object that drops elements of a tensor, and the count of the dropped ones."""
    return Elements(p, launch.draw_seed(x.device, generator)), launch.count(x.device)


def draw_units(
    x: Tensor, axes: int, p: float, generator: torch.Generator | None
) -> tuple[KeptUnits, Tensor]:
    """Draw the units on the first axes; return the object that drops them, and which are kept."""
    n_units = math.prod(x.shape[:axes])
    kept = torch.empty(n_units, dtype=torch.int8, device=x.device)
    dropped = launch.count(x.device)
    seed = launch.draw_seed(x.device, generator)
    drawing = _drawing(n_units, x.numel() // n_units, isinstance(seed, Tensor))
    drawing.start(x.device, kept, dropped, seed, p)
    return KeptUnits(axes, dropped), kept


@functools.lru_cache(maxsize=4096)
def _drawing(n_units: int, elements_of_unit: int, seed_on_device: bool) -> launch.Launch:
    """Return the `Launch` of `_draw_units_kernel` for so many units."""
    size = min(1024, launch.power_of_two(n_units))
    return launch.Launch(
        _draw_units_kernel,
        launch.parts(n_units, size),
        (n_units, elements_of_unit),
        varies=seed_on_device,
        SEED_ON_DEVICE=seed_on_device,
        SIZE=size,
    )


def _apply_units(x: Tensor, axes: int, kept: Tensor, factor: float) -> Tensor:
    y = torch.empty_like(x)
    applying = _applying(x.shape, x.stride(), y.stride(), axes, x.dtype, launch.alignment(x, kept))
    if applying is None:
        return y.copy_(_apply_units(x.contiguous(), axes, kept, factor))
    applying.start(x.device, x, y, kept, factor)
    return y


@functools.lru_cache(maxsize=4096)
def _applying(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    new_strides: tuple[int, ...],
    axes: int,
    dtype: torch.dtype,
    alignment: int,
) -> launch.Launch | None:
    """Return the `Launch` of `_apply_units_kernel`; None if it can't read the strides.

    `alignment` tells launches apart, because Triton compiles another form for other addresses.
    """
    read = rows_of(tuple(shape), strides, axes)
    written = rows_of(tuple(shape), new_strides, axes)
    if read is None or written is None or read.last != written.last:
        return None
    n_rows = read.outer * read.inner
    columns = min(1024, launch.power_of_two(read.columns))
    rows = max(1, 4096 // columns)
    n_columns = launch.parts(read.columns, columns)
    return launch.Launch(
        _apply_units_kernel,
        launch.parts(n_rows, rows) * n_columns,
        (n_rows, read.inner, n_columns, read.columns, *read.strides, *written.strides),
        varies=False,
        LAST=read.last,
        ROWS=rows,
        COLUMNS=columns,
        WIDE=launch.wide_type(dtype),
        BIG=launch.is_far(n_rows * columns, shape, strides, new_strides),
    )


@dataclass(frozen=True)
class Rows:
    """How a tensor is read as (outer, inner, columns).

    Attributes:
        outer: number of places on the first axis.
        inner: number of places on the second axis.
        columns: number of places on the third axis.
        strides: the strides of the three axes.
        last: whether the columns are the units of each outer place; otherwise each row is a unit.
    """

    outer: int
    inner: int
    columns: int
    strides: tuple[int, int, int]
    last: bool = False


@functools.lru_cache(maxsize=4096)
def rows_of(shape: tuple[int, ...], strides: tuple[int, ...], axes: int) -> Rows | None:
    """Return how a tensor of units is read; None if its axes don't form rows."""
    # with fewer than two axes of units, axes of size 1 in front take their place
    sizes = (*(1,) * (2 - axes), *shape)
    steps = (*(0,) * (2 - axes), *strides)
    # the axes of a sample may lie in another order, as in channels_last
    inside = _together(sizes[2:], steps[2:], any_order=axes < 2)
    if inside is None:
        return None
    number, step = inside
    if axes == 2 and sizes[1] > 1 and steps[1] < step:  # channels_last
        return Rows(sizes[0], number, sizes[1], (steps[0], step, steps[1]), last=True)
    return Rows(sizes[0], sizes[1], number, (steps[0], steps[1], step))


def _together(
    sizes: tuple[int, ...], strides: tuple[int, ...], any_order: bool
) -> tuple[int, int] | None:
    """Join several axes; return the size and the stride, or None if that is impossible.

    With `any_order`, the axes may lie in the memory in another order.
    """
    axes = [(step, size) for size, step in zip(sizes, strides, strict=True) if size > 1]
    if any_order:
        axes.sort(reverse=True)
    number = 1
    for i, (step, size) in enumerate(axes):
        number *= size
        if i + 1 < len(axes) and step != axes[i + 1][0] * axes[i + 1][1]:
            return None
    return number, axes[-1][0] if axes else 1
