"""Whole units (channels, samples) on the CPU in eager mode: one random number and one bit each."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .masks import scaled
from .sparse import draw_positions, refuse_batched

_SHORT = 4096  # elements of a row, up to which gathering rows is faster than a pass over all


def drop_units(
    x: Tensor,
    p: float,
    scale: float | None,
    shape: Sequence[int],
    summand: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, int]:
    """``x * scale`` with 0 in the dropped units, and the number of dropped units.

    There is a unit for each element of `shape`, which broadcasts to the shape of `x`. A `summand`
    gets -0.0 in place of 0.
    """
    kept = torch.ones(tuple(shape), dtype=torch.bool, device="cpu")
    dropped = draw_positions(kept.numel(), p, generator)
    kept.view(-1).index_fill_(0, dropped, False)
    y: Tensor = _DropUnits.apply(x, scale, kept, summand)
    return y, len(dropped)


class _DropUnits(torch.autograd.Function):
    """Scales `x` and zeroes the units that are not kept. The backward does the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float | None, kept: Tensor, summand: bool) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(kept)
        if x.dtype is torch.float32 and x.is_contiguous() and not summand:
            rows = _rows(x, kept)
            if rows is not None and rows.shape[1] <= _SHORT:
                return _gathered(rows, kept.view(-1), scale).resize_(x.shape)  # not a view
        y, fill = scaled(x, scale), -0.0 if summand else 0.0
        rows = _rows(y, kept)
        if rows is not None:
            rows.index_fill_(0, (~kept).view(-1).nonzero().view(-1), fill)
        elif summand:
            y.masked_fill_(~kept, fill)
        else:  # vectorized, which masked_fill_ is not
            torch.ops.aten.threshold_backward.grad_input(y, kept.to(y.dtype), 0, grad_input=y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batched(grads[0])
        return _DropUnits.apply(grads[0], ctx.scale, *ctx.saved_tensors, False), None, None, None


def _gathered(rows: Tensor, kept: Tensor, scale: float | None) -> Tensor:
    """The rows times their scale, and zeros for dropped rows, which are never read."""
    chosen = kept.nonzero().view(-1)
    starts = kept.cumsum(0) - kept.to(torch.int64)
    weights = rows.new_full(chosen.shape, 1.0 if scale is None else scale)
    bags: Tensor = torch.embedding_bag(rows, chosen, starts, False, 0, False, weights)[0]
    return bags


def _rows(y: Tensor, kept: Tensor) -> Tensor | None:
    """The units as rows of a matrix, if each is contiguous and they lie in the order of `kept`."""
    order = sorted(range(y.ndim), key=y.stride, reverse=True)
    decided = [axis for axis in range(y.ndim) if kept.shape[axis] > 1]
    if order[: len(decided)] != decided or not y.permute(order).is_contiguous():
        return None
    return y.permute(order).view(kept.numel(), -1)
