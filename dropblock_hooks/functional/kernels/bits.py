"""Masks of one bit per element: 64 to an int64 word, so that to widen, to count and to keep them is
cheap beside a pass over the tensor.
"""

import torch
from torch import Tensor


def grow(words: Tensor, edges: tuple[int, ...]) -> Tensor:
    """OR over a window of these edges on the first axes, by doubling; each axis loses edge - 1."""
    for axis, edge in enumerate(edges):
        width = 1
        while width < edge:
            shift = min(width, edge - width)
            length = words.shape[axis] - shift
            words = words.narrow(axis, 0, length) | words.narrow(axis, shift, length)
            width += shift
    return words


def popcount_(words: Tensor) -> Tensor:
    """The number of bits set in each int64 word, in its place: sums of 2, 4 and 8 bits."""
    words.sub_((words >> 1).bitwise_and_(0x5555555555555555))
    fours = (words >> 2).bitwise_and_(0x3333333333333333)
    words.bitwise_and_(0x3333333333333333).add_(fours)
    words.add_(words >> 4).bitwise_and_(0x0F0F0F0F0F0F0F0F)
    words.mul_(0x0101010101010101)  # the sum of the eights, in the topmost byte
    return torch.bitwise_right_shift(words, 56, out=words)  # at most 64: the sign is clear


def packed_size(numel: int) -> int:
    """How many bytes hold a bit for each element: a multiple of 8, to be read as int64."""
    return -(-numel // 64) * 8


def pack(mask: Tensor) -> Tensor:
    """A flat mask of bytes 0 and 1, a multiple of 64 long, as bits: 8 rows, one for each bit."""
    first, *rows = mask.view(8, -1).unbind()
    packed = first.clone()
    for bit, row in enumerate(rows, start=1):
        packed.bitwise_or_(row << bit)
    return packed


def count(packed: Tensor) -> Tensor:
    """The number of bits set."""
    return popcount_(packed.view(torch.int64).clone()).sum()


def unpack(packed: Tensor) -> Tensor:
    """The flat mask, boolean, that was packed."""
    row_bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device="cpu")
    return (packed & row_bits[:, None]).to(torch.bool).view(-1)


def keep_(flat: Tensor, packed: Tensor) -> None:
    """Put 0 where the bit is clear, NaN or not; a blend of vectors, piece by piece in the cache.

    On a CPU ``masked_fill_`` and ``where`` take one element at a time.
    """
    bytes_ = torch.empty(min(_PIECE, len(packed)), dtype=torch.uint8, device="cpu")
    numbers = torch.empty(len(bytes_), dtype=flat.dtype, device="cpu")
    for bit, row in enumerate(torch.split(flat, len(packed))):
        parts = torch.split(packed, _PIECE)  # of the last row there may be less
        for piece, part in zip(torch.split(row, _PIECE), parts, strict=False):
            length = len(piece)
            torch.bitwise_and(part[:length], 1 << bit, out=bytes_[:length])
            kept = numbers[:length].copy_(bytes_[:length])
            torch.ops.aten.threshold_backward.grad_input(piece, kept, 0, grad_input=piece)


_PIECE = 2**17
