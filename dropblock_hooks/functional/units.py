"""Dropout of units: of elements, channels, samples and residual branches.

The functions return the tensor and how many elements were dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .blocks import Blocks, differentiates_otherwise, draw_positions, drop_drawn, takes
from .masks import (
    Rate,
    bernoulli,
    check_floating,
    check_mode,
    check_residual,
    drop,
    is_zero,
    keep_scale,
    scaled,
)

_LARGE = 32  # elements of a unit, from which a byte for each is less than a bit for each element
_SELDOM = 0.15  # up to this share it is cheaper to write zeros than not to read
_ROW = 4096  # elements: longer rows would make a long program of the gathering


def drop_shape(
    x: Tensor,
    p: Rate,
    shape: Sequence[int],
    *,
    rescale: bool = True,
    inplace: bool = False,
    fill: float = 0.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | int]:
    """Dropout with one decision per element of `shape`, which broadcasts to that of `x`."""
    check_floating(x)
    if is_zero(p) or x.numel() == 0:
        return x, 0
    scale = keep_scale(p) if rescale else None
    area = math.prod(whole // part for whole, part in zip(x.shape, shape, strict=True))
    if not isinstance(p, Tensor) and takes(x):
        if area >= _LARGE:
            mask = torch.zeros(tuple(shape), dtype=torch.bool)
            drawn = draw_positions(mask.numel(), p, generator)
            mask.view(-1).index_fill_(0, drawn, True)
            y = _drop_units(x, scale, mask, fill)
            return x.copy_(y) if inplace else y, len(drawn) * area
        if math.copysign(1.0, fill) > 0:
            blocks = Blocks(x, [w // part for w, part in zip(x.shape, shape, strict=True)])
            drawn = blocks.draw(p, generator)
            y = drop_drawn(x, scale, blocks, drawn)
            return x.copy_(y) if inplace else y, blocks.count(drawn)
    mask = bernoulli(shape, p, x.device, generator)
    dropped = mask.sum() * (x.numel() // mask.numel())
    return drop(x, mask, scale, inplace, fill), dropped


class _DropUnits(torch.autograd.Function):
    """``x * scale``, filled where a mask, which broadcasts, is true; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, mask: Tensor, fill: float) -> Tensor:
        ctx.save_for_backward(scale, mask)
        return _without(x, scale, mask, fill)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale, mask = ctx.saved_tensors
        return _drop_units(grads[0], scale, mask, 0.0), None, None, None


def _drop_units(x: Tensor, scale: Tensor | None, mask: Tensor, fill: float) -> Tensor:
    if differentiates_otherwise():
        return drop(x, mask, scale, fill=fill)
    dropped: Tensor = _DropUnits.apply(x, scale, mask, fill)
    return dropped


def _without(x: Tensor, scale: Tensor | None, mask: Tensor, fill: float) -> Tensor:
    """The product, by what is cheapest: rows of zeros, no look at dropped rows, or a blend."""
    dropped = mask.view(-1).nonzero().view(-1)
    positive = math.copysign(1.0, fill) > 0
    if positive and len(dropped) > _SELDOM * mask.numel() and _gathers(x, mask):
        return _gathered(x.view(mask.numel(), -1), scale, mask).resize_(x.shape)  # not a view
    y = scaled(x, scale)
    rows = _rows(y, mask)
    if rows is not None:
        rows.index_fill_(0, dropped, fill)
    elif positive:
        kept = (~mask).to(y.dtype)
        torch.ops.aten.threshold_backward.grad_input(y, kept, 0, grad_input=y)
    else:
        y.masked_fill_(mask, fill)
    return y


def _gathers(x: Tensor, mask: Tensor) -> bool:
    """Whether rows can be gathered fast."""
    return x.dtype is torch.float32 and x.is_contiguous() and x.numel() <= _ROW * mask.numel()


def _rows(x: Tensor, mask: Tensor) -> Tensor | None:
    """The units as rows of a matrix, if each lies in one piece and in the order of the mask."""
    order = sorted(range(x.ndim), key=x.stride, reverse=True)
    decided = [axis for axis in range(x.ndim) if mask.shape[axis] > 1]
    if order[: len(decided)] != decided or not x.permute(order).is_contiguous():
        return None
    return x.permute(order).view(mask.numel(), -1)


def _gathered(rows: Tensor, scale: Tensor | None, mask: Tensor) -> Tensor:
    """The rows times `scale`, zeros for those that are masked: sums of one row, or of none."""
    kept = (~mask.view(-1)).to(torch.int64)
    chosen = kept.nonzero().view(-1)
    starts = kept.cumsum(0) - kept
    weights = torch.ones(1) if scale is None else scale.view(1)
    return torch.embedding_bag(
        rows, chosen, starts, False, 0, False, weights.expand(len(chosen)).contiguous()
    )[0]


def drop_channels(x: Tensor, p: Rate, **options: object) -> tuple[Tensor, Tensor | int]:
    """Dropout of whole channels of a tensor (N, C, ...)."""
    return drop_shape(x, p, (*x.shape[:2], *[1] * (x.ndim - 2)), **options)  # type: ignore[arg-type]


def drop_samples(
    x: Tensor, p: Rate, mode: str = "row", **options: object
) -> tuple[Tensor, Tensor | int]:
    """Dropout of whole samples (``"row"``) or of the whole batch at once (``"batch"``)."""
    check_mode(mode)
    if x.ndim == 0:
        raise ValueError("needs a tensor with an axis of samples, got a 0-D tensor")
    first = x.shape[0] if mode == "row" else 1
    return drop_shape(x, p, (first, *[1] * (x.ndim - 1)), **options)  # type: ignore[arg-type]


def drop_residual(
    block: Tensor, shortcut: Tensor, p: Rate, mode: str = "row", **options: object
) -> tuple[Tensor, Tensor | int]:
    """``shortcut + drop(block - shortcut)``: a dropped sample is its shortcut, to the bit."""
    check_residual(block, shortcut)
    check_floating(block)
    if is_zero(p) or block.numel() == 0:
        return block, 0
    wide = torch.promote_types(block.dtype, torch.float32)
    difference = block.to(wide) - shortcut.to(wide)
    # -0.0 is what leaves any number as it is in a sum, -0.0 too
    branch, dropped = drop_samples(difference, p, mode, fill=-0.0, **options)
    return branch.add_(shortcut).to(block.dtype), dropped  # in place: the block's memory format
