"""The size of a residual branch and of its shortcut on a GPU: two kernels.

    sums += sum((y - x) ** 2), sum(x ** 2)      unless one of them is not finite

In torch operations, the same is `functional.residual.branch_squares`. ``functional.residual`` calls
`add`.

_branch_kernel       the sums of squares of a part of the values, in float64
_add_branch_kernel   adds the sums of all programs to those of earlier calls, in a fixed order
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .clip import square_sum, tile_of, units_of
from .moments import Gate, is_due

_SIZE = 4096  # elements in a step of a program
_PROGRAMS = 256  # the most programs that measure a call


@triton.jit
def _branch_kernel(
    y,
    x,
    parts,
    state,
    calls_at,
    every,
    outer,
    columns,
    programs,
    column_steps,
    y_outer,
    y_column,
    x_outer,
    x_column,
    TRAINING: tl.constexpr,
    GATED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    BIG: tl.constexpr,
):
    """Write the sums of squares of a part of the branch and of the shortcut."""
    program = tl.program_id(0)
    branch_sum = tl.zeros([1], dtype=tl.float64)
    shortcut_sum = tl.zeros([1], dtype=tl.float64)
    if is_due(state, TRAINING, calls_at, every, GATED):
        for step in range(program, outer * column_steps, programs):
            place, column = tile_of(step, column_steps, SIZE, BIG)
            exists = column < columns
            of_y = place * y_outer + column * y_column
            of_x = place * x_outer + column * x_column
            output = tl.load(y + of_y, mask=exists, other=0.0).to(WIDE)
            shortcut = tl.load(x + of_x, mask=exists, other=0.0).to(WIDE)
            branch_sum += square_sum((output - shortcut)[None, :])
            shortcut_sum += square_sum(shortcut[None, :])
        at = parts + program * 2 + tl.arange(0, 1)
        tl.store(at, branch_sum)
        tl.store(at + 1, shortcut_sum)


@triton.jit
def _add_branch_kernel(
    parts,
    sums,
    state,
    calls_at,
    every,
    programs,
    TRAINING: tl.constexpr,
    GATED: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Add the sums of all programs to those of the calls before."""
    if is_due(state, TRAINING, calls_at, every, GATED):
        program = tl.arange(0, PROGRAMS)
        exists = program < programs
        at = parts + program * 2
        branch_sum = tl.sum(tl.load(at, mask=exists, other=0.0), axis=0)
        shortcut_sum = tl.sum(tl.load(at + 1, mask=exists, other=0.0), axis=0)
        if branch_sum + shortcut_sum < float("inf"):  # False for NaN
            column = tl.arange(0, 2)
            added = tl.where(column == 0, branch_sum, shortcut_sum)
            tl.store(sums + column, tl.load(sums + column) + added)


class _Pair(NamedTuple):
    """How programs read two tensors of the same shape together.

    Attributes:
        programs: the number of programs.
        size: the number of columns that a program reads at once.
        places: the arguments of `_branch_kernel` from `outer` to `x_column`.
    """

    programs: int
    size: int
    places: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _pair_of(
    shape: tuple[int, ...], y_strides: tuple[int, ...], x_strides: tuple[int, ...]
) -> _Pair | None:
    """Return how two tensors are read; None if they must be copied first."""
    y = units_of(shape, y_strides, None)
    x = units_of(shape, x_strides, None)
    if y is None or x is None:
        return None
    if (y.outer, y.columns, y.order) != (x.outer, x.columns, x.order):
        return None  # their elements lie in another order
    size = min(_SIZE, launch.power_of_two(y.columns))
    steps = launch.parts(y.columns, size)
    programs = min(_PROGRAMS, y.outer * steps)
    # without the first stride, because the whole tensor is one unit
    places = y.outer, y.columns, programs, steps, *y.strides[1:], *x.strides[1:]
    return _Pair(programs, size, places)


def add(y: Tensor, x: Tensor, sums: Tensor, gate: Gate | None = None) -> None:
    """Add the squares of a branch and of its shortcut to two sums: two kernels.

    Args:
        y: the output of a block.
        x: its input, of the same shape. If a value is not finite, nothing is added.
        sums: the two sums, in float64; changed.
        gate: decides in compiled code whether the call is measured.
    """
    shape = tuple(y.shape)
    pair = _pair_of(shape, y.stride(), x.stride())
    if pair is None:
        y = y.contiguous()
        x = x.contiguous()
        pair = _pair_of(shape, y.stride(), x.stride())
        assert pair is not None  # `units_of` can read a contiguous tensor
    parts = torch.empty(pair.programs * 2, dtype=torch.float64, device=y.device)

    passed = gate or Gate.unread(parts)  # kernels get arguments even without a gate
    launch.start(
        _branch_kernel,
        pair.programs,
        y.device,
        y,
        x,
        parts,
        passed.state,
        passed.calls,
        passed.every,
        *pair.places,
        TRAINING=int(passed.training),
        GATED=gate is not None,
        SIZE=pair.size,
        WIDE=launch.wide(y),
        BIG=launch.is_big(0, y, x),
    )
    launch.start(
        _add_branch_kernel,
        1,
        y.device,
        parts,
        sums,
        passed.state,
        passed.calls,
        passed.every,
        pair.programs,
        TRAINING=int(passed.training),
        GATED=gate is not None,
        PROGRAMS=launch.power_of_two(pair.programs),
    )
