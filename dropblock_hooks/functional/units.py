"""Drops whole units (channels, samples) of large tensors on the CPU in eager mode."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .masks import Mask, scaled
from .sparse import draw_positions

_SHORT = 4096  # elements of a row, up to which gathering rows is faster than a pass over all


class Units(Mask):
    """A mask with one element for each unit."""

    def draw(
        self, shape: Sequence[int], chance: float, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw each unit with this chance; there is one for each element of the shape."""
        mask = torch.zeros(tuple(shape), dtype=torch.bool, device="cpu")
        mask.view(-1).index_fill_(0, draw_positions(mask.numel(), chance, generator), True)
        return mask

    def drop(self, x: Tensor, scale: float | Tensor | None, drawn: Tensor) -> Tensor:
        """``x * scale`` with another value in the dropped units."""
        summand = math.copysign(1.0, self.fill) < 0  # filled with -0.0
        if x.dtype is torch.float32 and x.is_contiguous() and not summand:
            rows = _rows(x, drawn)
            if rows is not None and rows.shape[1] <= _SHORT:
                return _gathered(rows, ~drawn.view(-1), scale).resize_(x.shape)  # not a view
        y = scaled(x, scale)
        rows = _rows(y, drawn)
        if rows is not None:
            rows.index_fill_(0, drawn.view(-1).nonzero().view(-1), self.fill)
        elif summand:
            y.masked_fill_(drawn, self.fill)
        else:  # vectorized, which masked_fill_ is not
            torch.ops.aten.threshold_backward.grad_input(y, (~drawn).to(y.dtype), 0, grad_input=y)
        return y


def _gathered(rows: Tensor, kept: Tensor, scale: Any) -> Tensor:
    """The rows times their scale, and zeros for dropped rows, which are never read."""
    chosen = kept.nonzero().view(-1)
    starts = kept.cumsum(0) - kept.to(torch.int64)
    weights = rows.new_full(chosen.shape, 1.0 if scale is None else scale)
    bags: Tensor = torch.embedding_bag(rows, chosen, starts, False, 0, False, weights)[0]
    return bags


def _rows(y: Tensor, mask: Tensor) -> Tensor | None:
    """The units as rows of a matrix, if each is contiguous and they lie in the order of `mask`."""
    order = sorted(range(y.ndim), key=y.stride, reverse=True)
    decided = [axis for axis in range(y.ndim) if mask.shape[axis] > 1]
    if order[: len(decided)] != decided or not y.permute(order).is_contiguous():
        return None
    return y.permute(order).view(mask.numel(), -1)
