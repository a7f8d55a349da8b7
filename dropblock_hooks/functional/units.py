"""Dropout of units: of elements, channels, samples and residual branches.

The functions return the tensor and how many elements were dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import check_residual
from .kernels.cpu import Blocks, differentiates_otherwise, draw_positions, drop_drawn, takes
from .masks import Rate, bernoulli, drop, is_zero, keep_scale, scaled

_LARGE = 64  # elements of a unit, from which a number for each is less than a bit of each element
_SELDOM = 0.15  # up to this share it is cheaper to write zeros than not to read
_ROW = 4096  # elements: longer rows would make a long program of the gathering


def drop_shape(
    x: Tensor,
    p: Rate,
    shape: Sequence[int],
    *,
    rescale: bool = True,
    inplace: bool = False,
    fill: float = 0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | int]:
    """Dropout with one decision per element of `shape`, which broadcasts to that of `x`."""
    if is_zero(p) or x.numel() == 0:
        return x, 0
    scale = keep_scale(p) if rescale else None
    if not isinstance(p, Tensor) and not torch.compiler.is_compiling():
        edges = [whole // part for whole, part in zip(x.shape, shape, strict=True)]
        area = math.prod(edges)
        if area >= _LARGE and takes(x, "units"):
            dropped = draw_positions(math.prod(shape), p, generator)
            factors = keep_scale(p if rescale else 0.0).repeat(tuple(shape))
            factors.view(-1).index_fill_(0, dropped, 0.0)
            y = _drop_units(x, scale, factors, dropped, fill)
            return x.copy_(y) if inplace else y, len(dropped) * area
        if area < _LARGE and math.copysign(1.0, fill) > 0 and takes(x):
            blocks = Blocks(x, edges)
            drawn = blocks.draw(p, generator)
            y = drop_drawn(x, scale, blocks, drawn)
            return x.copy_(y) if inplace else y, blocks.count(drawn)
    mask = bernoulli(shape, p, x.device, generator)
    dropped = mask.sum() * (x.numel() // mask.numel())
    return drop(x, mask, scale, inplace, fill), dropped


class _DropUnits(torch.autograd.Function):
    """``x * scale``, and `fill` in dropped units; its gradient is the same of the gradient.

    `factors` holds the scale of each unit, 0 for those that are dropped, and broadcasts to `x`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, factors: Tensor, dropped: Tensor, fill: float
    ) -> Tensor:
        ctx.save_for_backward(scale, factors, dropped)
        return _without(x, scale, factors, dropped, fill)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale, factors, dropped = ctx.saved_tensors
        return _drop_units(grads[0], scale, factors, dropped, 0.0), None, None, None, None


def _drop_units(
    x: Tensor, scale: Tensor | None, factors: Tensor, dropped: Tensor, fill: float
) -> Tensor:
    if differentiates_otherwise(x):
        return drop(x, factors == 0, scale, fill=fill)
    y: Tensor = _DropUnits.apply(x, scale, factors, dropped, fill)
    return y


def _without(
    x: Tensor, scale: Tensor | None, factors: Tensor, dropped: Tensor, fill: float
) -> Tensor:
    """The product, by what is cheapest; Inf and NaN must not come through."""
    positive = math.copysign(1.0, fill) > 0
    if positive and _adds_rows(x, factors):
        rows = x.view(factors.numel(), -1)
        if len(dropped) > _SELDOM * len(rows):
            return _gathered(rows, factors.view(-1)).resize_(x.shape)  # not a view
        if _sums_are_finite(rows, dropped):
            return x * factors
    y = scaled(x, scale)
    rows_of_y = _rows(y, factors)
    if rows_of_y is not None:
        rows_of_y.index_fill_(0, dropped, fill)
    elif positive:  # a blend of vectors, which masked_fill_ is not
        torch.ops.aten.threshold_backward.grad_input(y, factors.to(y.dtype), 0, grad_input=y)
    else:
        y.masked_fill_(factors == 0, fill)
    return y


def _rows(x: Tensor, factors: Tensor) -> Tensor | None:
    """The units as rows of a matrix, if each lies in one piece and in the order of the factors."""
    order = sorted(range(x.ndim), key=x.stride, reverse=True)
    decided = [axis for axis in range(x.ndim) if factors.shape[axis] > 1]
    if order[: len(decided)] != decided or not x.permute(order).is_contiguous():
        return None
    return x.permute(order).view(factors.numel(), -1)


def _adds_rows(x: Tensor, factors: Tensor) -> bool:
    """Whether units are rows that can be added up fast."""
    return x.dtype is torch.float32 and x.is_contiguous() and x.numel() <= _ROW * factors.numel()


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


def drop_channels(x: Tensor, p: Rate, **options: object) -> tuple[Tensor, Tensor | int]:
    """Dropout of whole channels of a tensor (N, C, ...)."""
    return drop_shape(x, p, (*x.shape[:2], *[1] * (x.ndim - 2)), **options)  # type: ignore[arg-type]


def drop_samples(
    x: Tensor, p: Rate, mode: str = "row", **options: object
) -> tuple[Tensor, Tensor | int]:
    """Dropout of whole samples (``"row"``) or of the whole batch at once (``"batch"``)."""
    if x.ndim == 0:
        raise ValueError("needs a tensor with an axis of samples, got a 0-D tensor")
    first = x.shape[0] if mode == "row" else 1
    return drop_shape(x, p, (first, *[1] * (x.ndim - 1)), **options)  # type: ignore[arg-type]


def drop_residual(
    block: Tensor, shortcut: Tensor, p: Rate, mode: str = "row", **options: object
) -> tuple[Tensor, Tensor | int]:
    """``shortcut + drop(block - shortcut)``: a dropped sample is its shortcut, to the bit."""
    check_residual(block, shortcut)
    if is_zero(p) or block.numel() == 0:
        return block, 0
    wide = torch.promote_types(block.dtype, torch.float32)
    difference = block.to(wide) - shortcut.to(wide)
    # -0.0 is what leaves any number as it is in a sum, -0.0 too
    branch, dropped = drop_samples(difference, p, mode, fill=-0.0, **options)
    return branch.add_(shortcut).to(block.dtype), dropped  # in place: the block's memory format
