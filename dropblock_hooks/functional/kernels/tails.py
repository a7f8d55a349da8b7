"""Kurtosis, outliers and the largest magnitudes of channels on a GPU: two kernels.

    n, mean, sum((x - mean) ** k) for k = 2, 3, 4
    outliers = sum(|x - mean| > 6 * std)
    peaks = max(|x|, by channel)

``functional.outliers`` calls `add`. Its `with_call` does the same in torch operations.

tails    the moments of a part of the values, and the peaks in it
beyond   the moments of all values, then the outliers; the kernel adds all numbers to the state

Each kernel reads the tensor once. The powers are those of distances from the mean of a tile, in
float32. So they are exact also if the mean is much larger than the deviation. Sums of tiles are
added in float64, in a fixed order, so results repeat. A call with NaN or Inf changes nothing: its
fourth moment is not finite.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .clip import tile_of, units_of
from .moments import Gate, is_due

_SIZE = 4096  # elements in a step of a program
_PROGRAMS = 256  # the most programs that measure a tensor
_MOMENTS = 5  # numbers of a program: the number of values, their mean, and the sums of the powers
_PEAKS = 1024  # the peaks that a program reads at once


@triton.jit
def _moved(count, mean, second, third, fourth, center):
    """Return the sums of the powers of the distances from a center instead of the mean."""
    step = mean - center
    of_mean = count * step * step
    moved_third = third + step * (3 * second + of_mean)
    moved_fourth = fourth + step * (4 * third + step * (6 * second + of_mean))
    return second + of_mean, moved_third, moved_fourth


@triton.jit
def _joined(count, mean, second, third, fourth, count_b, mean_b, second_b, third_b, fourth_b):
    """Return the moments of two sets of values together, of which the second is not empty."""
    both = count + count_b
    center = (count * mean + count_b * mean_b) / both
    second, third, fourth = _moved(count, mean, second, third, fourth, center)
    second_b, third_b, fourth_b = _moved(count_b, mean_b, second_b, third_b, fourth_b, center)
    return both, center, second + second_b, third + third_b, fourth + fourth_b


@triton.jit
def _total(value):
    """Return the sum of a tile."""
    return tl.sum(tl.sum(value, axis=1), axis=0)


@triton.jit
def _moments_of_tile(value, exists):
    """Return the moments of a tile, in float64.

    The values are scaled to magnitudes near 1, so that their powers can't overflow. If a value is
    NaN or Inf, the fourth moment is Inf.
    """
    magnitude = tl.where(value == value, tl.abs(value), float("inf"))
    peak = tl.max(tl.max(magnitude, axis=1), axis=0)
    is_finite = peak < float("inf")
    # the power of two below the peak, from 2^-126 to 2^126, and its inverse; both are exact. A
    # smaller peak, which has no exponent bits, is not scaled.
    bits = peak.to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.where(bits > 0, tl.minimum(bits, 0x7E800000), 0x3F800000)
    divisor = bits.to(tl.float32, bitcast=True)
    factor = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    share = tl.where(is_finite, value * factor, 0.0)
    number = _total(exists.to(tl.int32))
    center = _total(share) / number
    distance = tl.where(exists, share - center, 0.0)
    square = distance * distance
    first = _total(distance).to(tl.float64)
    second = _total(square).to(tl.float64)
    third = _total(square * distance).to(tl.float64)
    fourth = _total(square * square).to(tl.float64)

    # the center was rounded: move the powers to the mean
    count = number.to(tl.float64)
    rest = first / count
    fourth -= rest * (4 * third - rest * (6 * second - 3 * rest * first))
    third -= rest * (3 * second - 2 * rest * first)
    second -= rest * first
    wide = divisor.to(tl.float64)
    square_of_wide = wide * wide
    mean = (center.to(tl.float64) + rest) * wide
    second *= square_of_wide
    third *= square_of_wide * wide
    fourth = tl.where(is_finite, fourth * square_of_wide * square_of_wide, float("inf"))
    return count, mean, second, third, fourth


@triton.jit
def _tile_at(
    group,
    step,
    units,
    columns,
    column_steps,
    x_unit,
    x_outer,
    x_column,
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIG: tl.constexpr,
):
    """Return where the elements of a tile lie, and which of them exist."""
    unit = group * UNITS + tl.arange(0, UNITS)
    if BIG:
        unit = unit.to(tl.int64)
    place, column = tile_of(step, column_steps, COLUMNS, BIG)
    exists = (unit < units)[:, None] & (column < columns)[None, :]
    at = (unit * x_unit + place * x_outer)[:, None] + column[None, :] * x_column
    return at, exists


@triton.jit
def _tails_kernel(
    x,
    parts,
    peaks,
    state,
    calls_at,
    every,
    units,
    outer,
    columns,
    groups,
    together,
    splits,
    column_steps,
    x_unit,
    x_outer,
    x_column,
    TRAINING: tl.constexpr,
    GATED: tl.constexpr,
    HAS_PEAKS: tl.constexpr,
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    BIG: tl.constexpr,
):
    """Write the moments of a part of the values, and the largest magnitudes of its channels.

    `_tiles_of` tells which part a program reads.
    """
    program = tl.program_id(0)
    split = program % splits
    count = tl.full([], 0.0, tl.float64)
    mean = tl.full([], 0.0, tl.float64)
    second = tl.full([], 0.0, tl.float64)
    third = tl.full([], 0.0, tl.float64)
    fourth = tl.full([], 0.0, tl.float64)
    if is_due(state, TRAINING, calls_at, every, GATED):
        for group in range(program // splits, groups, together):
            peak = tl.zeros([UNITS], dtype=WIDE)
            for step in range(split, outer * column_steps, splits):
                at, exists = _tile_at(
                    group,
                    step,
                    units,
                    columns,
                    column_steps,
                    x_unit,
                    x_outer,
                    x_column,
                    UNITS,
                    COLUMNS,
                    BIG,
                )
                value = tl.load(x + at, mask=exists, other=0.0).to(WIDE)
                if HAS_PEAKS:
                    peak = tl.maximum(peak, tl.max(tl.abs(value), axis=1))
                count_b, mean_b, second_b, third_b, fourth_b = _moments_of_tile(value, exists)
                count, mean, second, third, fourth = _joined(
                    count,
                    mean,
                    second,
                    third,
                    fourth,
                    count_b,
                    mean_b,
                    second_b,
                    third_b,
                    fourth_b,
                )
            if HAS_PEAKS:
                unit = group * UNITS + tl.arange(0, UNITS)
                tl.store(peaks + split * units + unit, peak.to(tl.float64), mask=unit < units)
        part = parts + program * 5  # `_MOMENTS`, a global that a kernel can't read
        tl.store(part, count)
        tl.store(part + 1, mean)
        tl.store(part + 2, second)
        tl.store(part + 3, third)
        tl.store(part + 4, fourth)


@triton.jit
def _moments_of_parts(parts, programs, PROGRAMS: tl.constexpr):
    """Return the moments of the values of all programs."""
    program = tl.arange(0, PROGRAMS)
    exists = program < programs
    part = parts + program * 5
    counts = tl.load(part, mask=exists, other=0.0)
    means = tl.load(part + 1, mask=exists, other=0.0)
    seconds = tl.load(part + 2, mask=exists, other=0.0)
    thirds = tl.load(part + 3, mask=exists, other=0.0)
    fourths = tl.load(part + 4, mask=exists, other=0.0)
    count = tl.sum(counts, axis=0)
    mean = tl.sum(counts * means, axis=0) / count
    seconds, thirds, fourths = _moved(counts, means, seconds, thirds, fourths, mean)
    return count, mean, tl.sum(seconds, axis=0), tl.sum(thirds, axis=0), tl.sum(fourths, axis=0)


@triton.jit
def _add_peaks(
    peaks_of_call,
    peaks,
    program,
    programs,
    units,
    splits,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Add the peaks of the splits to those of the calls before. Programs share the channels."""
    split = tl.arange(0, SPLITS)
    for first in range(program * CHUNK, units, programs * CHUNK):
        unit = first + tl.arange(0, CHUNK)
        inside = unit < units
        exists = inside[:, None] & (split < splits)[None, :]
        at = split[None, :] * units + unit[:, None]
        peak = tl.max(tl.load(peaks_of_call + at, mask=exists, other=0.0), axis=1)
        before = tl.load(peaks + unit, mask=inside, other=0.0)
        tl.store(peaks + unit, tl.maximum(before, peak), mask=inside)


@triton.jit
def _beyond_kernel(
    x,
    parts,
    peaks_of_call,
    moments,
    outliers,
    peaks,
    state,
    calls_at,
    every,
    units,
    outer,
    columns,
    groups,
    together,
    splits,
    column_steps,
    x_unit,
    x_outer,
    x_column,
    programs,
    TRAINING: tl.constexpr,
    GATED: tl.constexpr,
    HAS_PEAKS: tl.constexpr,
    OUTLIERS_BEHIND: tl.constexpr,
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    BIG: tl.constexpr,
    DEVIATIONS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Add the outliers of a part of the values, the moments and the peaks to those before."""
    program = tl.program_id(0)
    split = program % splits
    if is_due(state, TRAINING, calls_at, every, GATED):
        count, mean, second, third, fourth = _moments_of_parts(parts, programs, PROGRAMS)
        if fourth < float("inf"):
            limit = (DEVIATIONS * tl.sqrt(second / count)).to(WIDE)
            # two numbers, because float32 would round the mean
            center = mean.to(WIDE)
            rest = (mean - center.to(tl.float64)).to(WIDE)
            number = tl.full([], 0, tl.int64)
            for group in range(program // splits, groups, together):
                for step in range(split, outer * column_steps, splits):
                    at, exists = _tile_at(
                        group,
                        step,
                        units,
                        columns,
                        column_steps,
                        x_unit,
                        x_outer,
                        x_column,
                        UNITS,
                        COLUMNS,
                        BIG,
                    )
                    value = tl.load(x + at, mask=exists, other=0.0).to(WIDE)
                    distance = tl.abs((value - center) - rest)
                    number += _total((exists & (distance > limit)).to(tl.int32))
            if OUTLIERS_BEHIND:
                tl.atomic_add(moments + 5, number.to(tl.float64))
            else:
                tl.atomic_add(outliers, number.to(tl.float64))
            if HAS_PEAKS:
                _add_peaks(peaks_of_call, peaks, program, programs, units, splits, CHUNK, SPLITS)
            if program == 0:
                count_b = tl.load(moments)
                mean_b = tl.load(moments + 1)
                second_b = tl.load(moments + 2)
                third_b = tl.load(moments + 3)
                fourth_b = tl.load(moments + 4)
                tl.debug_barrier()  # all threads have read before one writes
                count, mean, second, third, fourth = _joined(
                    count_b,
                    mean_b,
                    second_b,
                    third_b,
                    fourth_b,
                    count,
                    mean,
                    second,
                    third,
                    fourth,
                )
                tl.store(moments, count)
                tl.store(moments + 1, mean)
                tl.store(moments + 2, second)
                tl.store(moments + 3, third)
                tl.store(moments + 4, fourth)


class _Tiles(NamedTuple):
    """How programs read a tensor in tiles of several channels, or of one unit.

    Attributes:
        units: the number of channels; 1 if they are not known.
        programs: the number of programs.
        splits: the number of programs that read the same channels.
        places: the numbers of the kernels that tell where.
        height: the channels in a tile.
        width: the columns in a tile.
    """

    units: int
    programs: int
    splits: int
    places: tuple[int, ...]
    height: int
    width: int


@functools.lru_cache(maxsize=4096)
def _tiles_of(shape: tuple[int, ...], strides: tuple[int, ...], axis: int | None) -> _Tiles | None:
    """Return how a tensor is read; None if it must be copied first."""
    read = units_of(shape, strides, axis)
    if read is None:
        return None
    width = read.step
    # small maps: a tile has more channels, so that there are fewer tiles
    fitting = min(launch.power_of_two(read.units), _SIZE // width)
    height = max(read.together, fitting)

    groups = launch.parts(read.units, height)
    together = min(groups, _PROGRAMS)  # the groups that are read at the same time
    splits = min(_PROGRAMS // together, read.outer * read.steps)
    places = (
        read.units,
        read.outer,
        read.columns,
        groups,
        together,
        splits,
        read.steps,
        *read.strides,
    )
    return _Tiles(read.units, together * splits, splits, places, height, width)


def add(
    x: Tensor,
    mapped: Tensor | None,
    moments: Tensor,
    outliers: Tensor | None,
    peaks: Tensor | None,
    deviations: float,
    gate: Gate | None = None,
) -> None:
    """Add a tensor to the moments, the outliers and the peaks: two kernels.

    Args:
        x: the tensor. If a value is not finite, nothing is added.
        mapped: the same as (N, C, ...); None if the channels are not known.
        moments: the number of values, their mean, and the sums of the powers; changed.
        outliers: the number of outliers, in float64; changed. None: it stands behind the moments.
            A graph changes one tensor without copies, but not two parts of a tensor.
        peaks: the largest magnitude of each channel, in float64; changed. None finds none.
        deviations: the distance in standard deviations beyond which a value is an outlier.
        gate: decides in compiled code whether the call is measured.
    """
    axis = None
    if mapped is None:
        peaks = None
    elif peaks is not None:
        x = mapped
        axis = 1
    tiles = _tiles_of(tuple(x.shape), x.stride(), axis)
    if tiles is None:
        x = x.contiguous()
        tiles = _tiles_of(tuple(x.shape), x.stride(), axis)
        assert tiles is not None  # it can read a contiguous tensor
    parts = torch.empty(tiles.programs * _MOMENTS, dtype=torch.float64, device=x.device)
    peaks_of_call = parts
    if peaks is not None:
        number = tiles.splits * tiles.units
        peaks_of_call = torch.empty(number, dtype=torch.float64, device=x.device)

    splits = launch.power_of_two(tiles.splits)
    passed = gate or Gate.unread(parts)
    launch.start(
        _tails_kernel,
        tiles.programs,
        x.device,
        x,
        parts,
        peaks_of_call,
        passed.state,
        passed.calls,
        passed.every,
        *tiles.places,
        TRAINING=int(passed.training),
        GATED=gate is not None,
        HAS_PEAKS=peaks is not None,
        UNITS=tiles.height,
        COLUMNS=tiles.width,
        WIDE=launch.wide(x),
        BIG=launch.is_big(0, x),
    )
    launch.start(
        _beyond_kernel,
        tiles.programs,
        x.device,
        x,
        parts,
        peaks_of_call,
        moments,
        parts if outliers is None else outliers,
        parts if peaks is None else peaks,
        passed.state,
        passed.calls,
        passed.every,
        *tiles.places,
        tiles.programs,
        TRAINING=int(passed.training),
        GATED=gate is not None,
        HAS_PEAKS=peaks is not None,
        OUTLIERS_BEHIND=outliers is None,
        UNITS=tiles.height,
        COLUMNS=tiles.width,
        WIDE=launch.wide(x),
        BIG=launch.is_big(0, x),
        DEVIATIONS=deviations,
        PROGRAMS=launch.power_of_two(tiles.programs),
        CHUNK=max(1, _PEAKS // splits),
        SPLITS=splits,
    )
