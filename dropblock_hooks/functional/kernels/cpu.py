"""Blocks on the CPU in eager mode: drawn by their seeds, filled by their place in memory.

Seeds are rare, so the gaps between them are drawn instead of every position, and a box of zeros is
written for each, in a tensor of any memory format. A block is a box with an edge for each axis: of
DropBlock (1, 1, 7, 7), shared by the channels (1, C, 7, 7); a channel of one sample is
(1, 1, H, W), a sample (1, C, H, W), an element (1, 1, 1, 1).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..masks import bernoulli, drop, scaled
from . import bits

_CPU = torch.device("cpu")
LEAST = {"blocks": 2**17, "units": 2**18}  # elements
_FREQUENT = 0.4  # from this chance on, a draw for each position is cheaper than one for each gap
_ROWS = 2**16
_LONG = 64  # elements in a row, from which they are written as fast as by a pass
_DIFFERENTIATING = [torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp]
_INFRASTRUCTURE = [
    getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")
]


def takes(x: Tensor, what: str = "blocks") -> bool:
    """Whether to draw seeds of blocks, or units: of a real tensor on a CPU, in eager mode, and not
    of a small one, for which the fewer operations of the dense form are faster.
    """
    return (
        x.device.type == "cpu"
        and x.numel() >= LEAST[what]
        and type(x) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and all(key in _DIFFERENTIATING for key in _transforms())
        and all(torch._C._get_dispatch_mode(key) is None for key in _INFRASTRUCTURE)
    )


def _transforms() -> list[Any]:
    """The kinds of function transforms (torch.func) that are at work."""
    return [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]


def differentiates_otherwise(x: Tensor) -> bool:
    """Whether derivatives are taken forward, in batches or by torch.func: of torch's operations."""
    return (
        bool(_transforms())
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._functorch.is_legacy_batchedtensor(x)
    )


def draw_positions(total: int, chance: float, generator: torch.Generator | None = None) -> Tensor:
    """Which of the positions 0 .. total - 1 are drawn, each with this chance; ascending, int64.

    The gaps between them are geometric: ``floor(log(1 - u) / log(1 - chance))``, u uniform.
    """
    if chance >= _FREQUENT:
        return bernoulli((total,), chance, _CPU, generator).nonzero().view(-1)
    if chance <= 0.0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    last, parts = -1.0, []
    while last < total:
        number = _reserve((total - last) * chance)
        draw = torch.rand(number, dtype=torch.float64, generator=generator, device="cpu")
        gaps = -draw  # a new tensor: a selective checkpoint may have kept the draw
        gaps.log1p_().div_(math.log1p(-chance)).floor_().add_(1)
        gaps[0] += last
        parts.append(gaps.cumsum_(0))
        last = parts[-1][-1].item()
    drawn = parts[0] if len(parts) == 1 else torch.cat(parts)
    return drawn[: int(torch.searchsorted(drawn, total))].to(torch.int64)


def _reserve(mean: float) -> int:
    """So many gaps that they seldom are too few."""
    return int(mean + 4 * math.sqrt(mean)) + 4


class Blocks:
    """Where blocks can lie in tensors of one shape.

    Attributes:
        shape: of the tensor.
        edges: of each block, one per axis.
        grid: how many places there are for a block, per axis.
        order: the axes as they lie in memory, the outermost first.
    """

    def __init__(self, x: Tensor, edges: Sequence[int]) -> None:
        self.shape, self.edges = tuple(x.shape), tuple(edges)
        self.grid = tuple(s - e + 1 for s, e in zip(self.shape, edges, strict=True))
        self.order = sorted(range(x.ndim), key=x.stride, reverse=True)
        self.numel, self.area = x.numel(), math.prod(edges)

    def draw(self, chance: float, generator: torch.Generator | None = None) -> Tensor:
        """What is dropped, each block that fits with this chance.

        The first elements of the blocks, counted row by row; or (uint8) what is kept, a bit per
        element as they lie in memory: whichever takes less room and time.
        """
        places = math.prod(self.grid)
        if self.area == 1 and chance >= _FREQUENT:
            kept = self._bytes(0)
            self._view(kept).copy_(~bernoulli(self.shape, chance, _CPU, generator))
            return bits.pack(kept)
        drawn = draw_positions(places, chance, generator)
        first = _placed(drawn, self.grid, _strides(self.shape, range(len(self.shape))))
        if self._few(len(first)):
            return first.to(torch.int32) if self.numel < 2**31 else first
        return bits.pack(self._kept(first))

    def _few(self, blocks: int) -> bool:
        """Whether to keep blocks and write each, or else bits, with a pass over all elements."""
        if 32 * blocks > self.numel:
            return False  # bits are smaller
        run, stride = self._sides(_strides(self.shape, self.order))[0]
        share = 1.5 if stride == 1 else 0.4  # of the elements written, in the time of a pass
        return run >= _LONG or blocks * self.area <= share * self.numel

    def count(self, drawn: Tensor, per_sample: bool = False) -> Tensor:
        """The number of elements that are dropped, or for each sample; overlaps count once."""
        if drawn.dtype is not torch.uint8:
            return count_union(self, drawn.to(torch.int64), per_sample)
        if not per_sample:
            return self.numel - bits.count(drawn)
        kept = self._view(bits.unpack(drawn)).view(torch.uint8)  # a sum of booleans is slow
        axes = tuple(range(1, kept.ndim))
        return self.numel // self.shape[0] - kept.sum(axes, dtype=torch.int32).to(torch.int64)

    def mask(self, drawn: Tensor) -> Tensor:
        """What is dropped, as a boolean tensor."""
        if drawn.dtype is torch.uint8:
            return ~self._view(bits.unpack(drawn))
        return self._view(self._kept(drawn.to(torch.int64))) == 0

    def clear(self, y: Tensor, drawn: Tensor) -> None:
        """Put 0 in place of what is dropped."""
        if drawn.dtype is not torch.uint8:
            self._fill(y, drawn.to(torch.int64))
        elif self._in_order(y):
            bits.keep_(y.as_strided((self.numel,), (1,)), drawn)
        else:
            y.masked_fill_(self.mask(drawn), 0.0)

    def _fill(self, y: Tensor, first: Tensor) -> None:
        """Write zeros into the blocks, by their longest side."""
        (run, step), *others = self._sides(y.stride())
        reach = sum((s - 1) * stride for s, stride in zip(self.shape, y.stride(), strict=True))
        runs = y.as_strided((reach - (run - 1) * step + 1, run), (1, step))
        offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
        for edge, stride in others:
            steps = torch.arange(0, edge * stride, stride, device="cpu")
            offsets = (offsets[:, None] + steps).view(-1)
        first = _placed(first, self.shape, y.stride())
        for some in torch.split(first, max(1, _ROWS // len(offsets))):
            runs.index_fill_(0, (some[:, None] + offsets).view(-1), 0)

    def _sides(self, strides: Sequence[int]) -> list[tuple[int, int]]:
        """Edge and stride of the sides of a block, the longest first, what lies in a row joined."""
        sides: list[tuple[int, int]] = []
        for axis in reversed(self.order):
            edge, stride = self.edges[axis], strides[axis]
            if edge == 1:
                continue
            if sides and stride == math.prod(sides[-1]):
                sides[-1] = (sides[-1][0] * edge, sides[-1][1])
            else:
                sides.append((edge, stride))
        return sorted(sides, key=lambda side: -side[0]) or [(1, 1)]

    def _in_order(self, y: Tensor) -> bool:
        """Whether a tensor of our shape lies in memory as we count."""
        sides = zip(self.shape, y.stride(), _strides(self.shape, self.order), strict=True)
        return all(stride == ours for size, stride, ours in sides if size > 1)

    def _kept(self, first: Tensor) -> Tensor:
        """A byte for each element as they lie in memory, 0 in the blocks, up to what is packed."""
        kept = self._bytes(1)
        self._fill(self._view(kept), first)
        return kept

    def _bytes(self, value: int) -> Tensor:
        """A byte for each element, and zeros behind, up to what is packed."""
        size = 8 * bits.packed_size(self.numel)
        kept = torch.full((size,), value, dtype=torch.uint8, device="cpu")
        kept[self.numel :] = 0
        return kept

    def _view(self, flat: Tensor) -> Tensor:
        """Our shape, of elements as they lie in memory."""
        return flat.as_strided(self.shape, _strides(self.shape, self.order))


def count_union(blocks: Blocks, first: Tensor, per_sample: bool) -> Tensor:
    """How many elements lie in these blocks, by masks of a bit.

    A lane is an element of the axes that no block extends over; 64 lanes make a word. What is seen
    of a block is the one element where it begins, which is then widened.
    """
    shape, edges, grid = blocks.shape, blocks.edges, blocks.grid
    axes = range(len(shape))
    wide = [axis for axis in axes if edges[axis] > 1 and grid[axis] > 1]
    if not (wide or per_sample):
        return torch.tensor(len(first) * blocks.area, device="cpu")  # they can't overlap
    outer = [*wide, 0] if per_sample else wide
    lanes = [axis for axis in axes if edges[axis] == 1 and axis not in outer]
    number = math.prod(shape[axis] for axis in lanes)
    width = 64 if number >= 64 else 1
    words = -(-number // width)
    # where a block begins, in bits: its lane, in rows of whole words for each place on outer axes,
    # behind a border that the widening takes off again
    sizes = [size + edge - 1 for size, edge in zip(shape, edges, strict=True)]
    inside, outside = _strides(shape, lanes), _strides(sizes, outer)
    strides = [a + b * words * width for a, b in zip(inside, outside, strict=True)]
    at = _placed(first, shape, strides) + sum((edges[axis] - 1) * strides[axis] for axis in wide)
    total = words * math.prod(sizes[axis] for axis in outer)
    if width == 64:
        masks = torch.zeros(total, dtype=torch.int64, device="cpu")
        masks.index_add_(0, at >> 6, torch.ones_like(at) << (at & 63))
    else:
        masks = torch.zeros(total, dtype=torch.uint8, device="cpu").index_fill_(0, at, 1)
    masks = masks.view(*(sizes[axis] for axis in wide), shape[0] if per_sample else 1, words)
    masks = bits.grow(masks, tuple(edges[axis] for axis in wide))
    counts = bits.popcount_(masks) if width == 64 else masks
    counted = counts.view(-1, *counts.shape[-2:]).sum((0, 2), dtype=torch.int64)
    counted = counted * math.prod(e for e, g in zip(edges, grid, strict=True) if g == 1)
    return counted if per_sample else counted.sum()


def _strides(sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """Of a tensor of these sizes whose axes lie in this order, without gaps."""
    strides, step = [0] * len(sizes), 1
    for axis in reversed(order):
        strides[axis], step = step, step * sizes[axis]
    return strides


def _placed(flat: Tensor, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The sums of coordinate * stride of elements of a box, which are counted row by row.

    It takes a division only for an axis at which the strides leave a gap.
    """
    *outer, inner = range(len(sizes))
    placed = flat if strides[inner] == 1 else flat * strides[inner]
    below, total = sizes[inner], math.prod(sizes)
    for axis in reversed(outer):
        gap = strides[axis] - sizes[inner] * strides[inner]
        if gap and below < total:
            placed = placed.add(torch.div(flat, below, rounding_mode="floor"), alpha=gap)
        below, inner = below * sizes[axis], axis
    return placed


class _DropBlocks(torch.autograd.Function):
    """``x * scale`` but for what is dropped; its gradient is the same of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, blocks: Blocks, drawn: Tensor) -> Tensor:
        y = scaled(x, scale)
        blocks.clear(y, drawn)
        ctx.blocks = blocks
        ctx.save_for_backward(scale, drawn)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale, drawn = ctx.saved_tensors
        return drop_drawn(grads[0], scale, ctx.blocks, drawn), None, None, None


def drop_drawn(x: Tensor, scale: Tensor | None, blocks: Blocks, drawn: Tensor) -> Tensor:
    """``x * scale``, and 0 where `drawn` drops; differentiable at will."""
    if differentiates_otherwise(x):
        return drop(x, blocks.mask(drawn), scale)
    dropped: Tensor = _DropBlocks.apply(x, scale, blocks, drawn)
    return dropped
