"""Masks with a bit for each element, packed into bytes that are also read as int64 words."""

from collections.abc import Sequence

import torch
from torch import Tensor

_PIECE = 2**17  # bytes that stay in the cache


def grow(mask: Tensor, edges: Sequence[int], first: int = 0) -> Tensor:
    """OR over windows, by doubling: each axis from `first` on becomes edge - 1 shorter."""
    for axis, edge in enumerate(edges, start=first):
        width = 1
        while width < edge:
            shift = min(width, edge - width)
            length = mask.shape[axis] - shift
            mask = mask.narrow(axis, 0, length) | mask.narrow(axis, shift, length)
            width += shift
    return mask


def popcount_(words: Tensor) -> Tensor:
    """Replace each int64 word by the number of its bits that are set."""
    words.sub_((words >> 1).bitwise_and_(0x5555555555555555))
    fours = (words >> 2).bitwise_and_(0x3333333333333333)
    words.bitwise_and_(0x3333333333333333).add_(fours)
    words.add_(words >> 4).bitwise_and_(0x0F0F0F0F0F0F0F0F)
    words.mul_(0x0101010101010101)  # adds up all bytes in the highest byte
    return torch.bitwise_right_shift(words, 56, out=words)


def pack(mask: Tensor) -> Tensor:
    """Pack a flat uint8 mask of 0 and 1, which is read as 8 rows, one for each bit of a byte."""
    first, *rows = mask.view(8, -1).unbind()
    packed = first.clone()
    for bit, row in enumerate(rows, start=1):
        packed.bitwise_or_(row << bit)
    return packed


def keep_(flat: Tensor, packed: Tensor) -> None:
    """Write 0 into `flat` where the bit is clear, also over NaN.

    This is vectorized, unlike ``masked_fill_`` and ``where``, and runs in the cache of a processor.
    """
    bytes_ = torch.empty(min(_PIECE, len(packed)), dtype=torch.uint8, device="cpu")
    numbers = torch.empty(len(bytes_), dtype=flat.dtype, device="cpu")
    for bit, row in enumerate(torch.split(flat, len(packed))):
        parts = torch.split(packed, _PIECE)  # the last row may be shorter
        for piece, part in zip(torch.split(row, _PIECE), parts, strict=False):
            length = len(piece)
            torch.bitwise_and(part[:length], 1 << bit, out=bytes_[:length])
            kept = numbers[:length].copy_(bytes_[:length])
            torch.ops.aten.threshold_backward.grad_input(piece, kept, 0, grad_input=piece)
