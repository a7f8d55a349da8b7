"""Units on the CPU in eager mode: whole channels, or samples, by a factor for each.

Where the units are rows of a matrix, what is dropped is written, or never read, row by row.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..masks import drop, nothing, scaled
from .cpu import differentiates_otherwise

_SELDOM = 0.15  # up to this share it is cheaper to write zeros than not to read
_ROW = 4096  # elements: longer rows would make a long program of the gathering


def drop_units(
    x: Tensor, scale: Tensor | None, shape: Sequence[int], dropped: Tensor, summand: bool = False
) -> Tensor:
    """``x * scale``, and `nothing` in the units of these positions; differentiable at will.

    There is a unit for each element of `shape`, which broadcasts to that of `x`.
    """
    factors = torch.ones((), dtype=torch.float32, device="cpu") if scale is None else scale
    factors = factors.repeat(tuple(shape))
    factors.view(-1).index_fill_(0, dropped, 0.0)
    return _drop(x, scale, factors, dropped, summand)


class _DropUnits(torch.autograd.Function):
    """``x * scale``, and nothing in dropped units; its gradient is the same of the gradient.

    `factors` holds the scale of each unit, 0 for those that are dropped, and broadcasts to `x`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, factors: Tensor, dropped: Tensor, summand: bool
    ) -> Tensor:
        ctx.save_for_backward(scale, factors, dropped)
        return _without(x, scale, factors, dropped, summand)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _drop(grads[0], *ctx.saved_tensors), None, None, None, None


def _drop(
    x: Tensor, scale: Tensor | None, factors: Tensor, dropped: Tensor, summand: bool = False
) -> Tensor:
    if differentiates_otherwise(x):
        return drop(x, factors == 0, scale, fill=nothing(summand))
    y: Tensor = _DropUnits.apply(x, scale, factors, dropped, summand)
    return y


def _without(
    x: Tensor, scale: Tensor | None, factors: Tensor, dropped: Tensor, summand: bool
) -> Tensor:
    """The product, by what is cheapest; Inf and NaN must not come through."""
    in_rows = not summand and x.dtype is torch.float32 and x.is_contiguous()
    if in_rows and x.numel() <= _ROW * factors.numel():  # short ones, which are added up fast
        rows = x.view(factors.numel(), -1)
        if len(dropped) > _SELDOM * len(rows):
            return _gathered(rows, factors.view(-1)).resize_(x.shape)  # not a view
        if _sums_are_finite(rows, dropped):
            return x * factors
    y = scaled(x, scale)
    rows_of_y = _rows(y, factors)
    if rows_of_y is not None:
        rows_of_y.index_fill_(0, dropped, nothing(summand))
    elif summand:
        y.masked_fill_(factors == 0, nothing(summand))
    else:  # a blend of vectors, which masked_fill_ is not
        torch.ops.aten.threshold_backward.grad_input(y, factors.to(y.dtype), 0, grad_input=y)
    return y


def _rows(x: Tensor, factors: Tensor) -> Tensor | None:
    """The units as rows of a matrix, if each lies in one piece and in the order of the factors."""
    order = sorted(range(x.ndim), key=x.stride, reverse=True)
    decided = [axis for axis in range(x.ndim) if factors.shape[axis] > 1]
    if order[: len(decided)] != decided or not x.permute(order).is_contiguous():
        return None
    return x.permute(order).view(factors.numel(), -1)


def _sums_are_finite(rows: Tensor, chosen: Tensor) -> bool:
    """False if Inf or NaN is in these rows, or a sum overflows: reading is cheaper than writing."""
    step = len(chosen) // torch.get_num_threads() + 1
    starts = torch.arange(0, len(chosen), step, device="cpu")
    ones = torch.ones(len(chosen), dtype=torch.float32, device="cpu")
    return bool(_bags(rows, chosen, starts, ones).isfinite().all())


def _gathered(rows: Tensor, factors: Tensor) -> Tensor:
    """The rows times their factors, zeros for those of 0, which are never read."""
    kept = factors != 0
    starts = kept.cumsum(0) - kept.to(torch.int64)
    return _bags(rows, kept.nonzero().view(-1), starts, factors[kept])


def _bags(rows: Tensor, chosen: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of the chosen rows; one ends where the next one starts."""
    sums: Tensor = torch.embedding_bag(rows, chosen, starts, False, 0, False, weights)[0]
    return sums
