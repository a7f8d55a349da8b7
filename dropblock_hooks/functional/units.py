"""Dropout of units: of elements, channels, samples and residual branches.

The functions return the tensor and how many elements were dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .blocks import Blocks, drop_drawn, takes
from .masks import (
    Rate,
    bernoulli,
    check_floating,
    check_mode,
    check_residual,
    drop,
    is_zero,
    keep_scale,
)


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
    if not isinstance(p, Tensor) and takes(x):
        edges = [whole // decided for whole, decided in zip(x.shape, shape, strict=True)]
        blocks = Blocks(x, edges)
        drawn = blocks.draw(p, generator)
        y = drop_drawn(x, scale, blocks, drawn, fill)
        return x.copy_(y) if inplace else y, blocks.count(drawn)
    mask = bernoulli(shape, p, x.device, generator)
    dropped = mask.sum() * (x.numel() // mask.numel())
    return drop(x, mask, scale, inplace, fill), dropped


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
