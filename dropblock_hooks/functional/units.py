"""Drops whole units (channels, samples) of large tensors on the CPU in eager mode."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .masks import scaled
from .sparse import draw_positions

_SHORT = 4096  # elements of a row, up to which gathering rows is faster than a pass over all


class Units:
    """The units of tensors of one shape. `drawn` is a boolean tensor, True where a unit is kept.

    Args:
        x: a tensor of this shape.
        shape: has a unit for each of its elements, and broadcasts to the shape of `x`.
        summand: whether dropped elements become -0.0 in place of 0.
    """

    def __init__(self, x: Tensor, shape: Sequence[int], summand: bool = False) -> None:
        self.shape, self.summand = tuple(shape), summand
        self.area = x.numel() // math.prod(shape)

    def draw(self, chance: float, generator: torch.Generator | None = None) -> Tensor:
        """Draw each unit with this chance."""
        kept = torch.ones(self.shape, dtype=torch.bool, device="cpu")
        dropped = draw_positions(kept.numel(), chance, generator)
        kept.view(-1).index_fill_(0, dropped, False)
        return kept

    def count(self, drawn: Tensor) -> int:
        """The number of dropped elements."""
        return (drawn.numel() - int(drawn.count_nonzero())) * self.area

    def drop(self, x: Tensor, scale: float | None, drawn: Tensor) -> Tensor:
        """``x * scale`` with 0 in the dropped units."""
        if x.dtype is torch.float32 and x.is_contiguous() and not self.summand:
            rows = _rows(x, drawn)
            if rows is not None and rows.shape[1] <= _SHORT:
                return _gathered(rows, drawn.view(-1), scale).resize_(x.shape)  # not a view
        y, fill = scaled(x, scale), -0.0 if self.summand else 0.0
        rows = _rows(y, drawn)
        if rows is not None:
            rows.index_fill_(0, (~drawn).view(-1).nonzero().view(-1), fill)
        elif self.summand:
            y.masked_fill_(~drawn, fill)
        else:  # vectorized, which masked_fill_ is not
            torch.ops.aten.threshold_backward.grad_input(y, drawn.to(y.dtype), 0, grad_input=y)
        return y


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
