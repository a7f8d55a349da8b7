"""Drops blocks, and whole channels and samples, of large tensors on the CPU in eager mode.

Seeds are rare, so the gaps between them are drawn instead of a number for each position.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import is_batched_gradient, is_plain_call
from .masks import Mask, bernoulli, scaled

LEAST = {"blocks": 2**17, "units": 2**18}  # elements, from which the sparse form is faster
_CPU = torch.device("cpu")
_FREQUENT = 0.4  # from this chance on, one draw for each position is faster than one for each gap
_LONG = 64  # contiguous elements, from which writing them costs as much as a pass
_PIECE = 2**17  # elements that stay in the cache
_ROWS = 2**16  # that are written at once
_SHORT = 4096  # elements of a row, up to which gathering rows is faster than a pass over all


def takes(x: Tensor, what: str = "blocks") -> bool:
    """Whether to use the sparse form: for a large plain tensor on a CPU that nothing traces."""
    return (
        not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.numel() >= LEAST[what]
        and is_plain_call(x)
    )


def draw_positions(total: int, chance: float, generator: torch.Generator | None) -> Tensor:
    """Draw some of 0 .. total - 1, each with this chance; ascending, int64."""
    if not 0.0 < chance < _FREQUENT:
        return bernoulli((total,), chance, _CPU, generator).nonzero().view(-1)
    last, parts = -1.0, []
    while last < total:
        mean = (total - last) * chance
        number = int(mean + 4 * math.sqrt(mean)) + 4  # seldom too few
        # the gaps are geometric: floor(log(1 - u) / log(1 - chance)) for a uniform u
        draw = torch.rand(number, dtype=torch.float64, generator=generator, device="cpu")
        gaps = draw.neg_().log1p_().div_(math.log1p(-chance)).floor_().add_(1)
        gaps[0] += last
        parts.append(gaps.cumsum_(0))
        last = parts[-1][-1].item()
    drawn = parts[0] if len(parts) == 1 else torch.cat(parts)
    return drawn[: int(torch.searchsorted(drawn, total))].to(torch.int64)


def draw_units(shape: Sequence[int], chance: float, generator: torch.Generator | None) -> Tensor:
    mask = torch.zeros(tuple(shape), dtype=torch.bool, device="cpu")
    mask.view(-1).index_fill_(0, draw_positions(mask.numel(), chance, generator), True)
    return mask


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


def _count_bits(words: Tensor) -> int:
    """The number of bits that are set in int64 words, which are overwritten."""
    words.sub_((words >> 1).bitwise_and_(0x5555555555555555))
    fours = (words >> 2).bitwise_and_(0x3333333333333333)
    words.bitwise_and_(0x3333333333333333).add_(fours)
    words.add_(words >> 4).bitwise_and_(0x0F0F0F0F0F0F0F0F)
    words.mul_(0x0101010101010101)  # adds up all bytes in the highest byte
    return int(torch.bitwise_right_shift(words, 56, out=words).sum())


def _keep(flat: Tensor, kept: Tensor) -> None:
    """Write 0 where `kept` is 0, also over NaN; vectorized, unlike ``masked_fill_``."""
    numbers = torch.empty(min(_PIECE, len(kept)), dtype=flat.dtype, device="cpu")
    for piece, part in zip(torch.split(flat, _PIECE), torch.split(kept, _PIECE), strict=True):
        factors = numbers[: len(part)].copy_(part)
        torch.ops.aten.threshold_backward.grad_input(piece, factors, 0, grad_input=piece)


def _strides(sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor whose axes lie in this order."""
    strides, step = [0] * len(sizes), 1
    for axis in reversed(order):
        strides[axis], step = step, step * sizes[axis]
    return strides


def _placed(flat: Tensor, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """From row-major positions in a box of these sizes to sums of coordinate * stride."""
    *outer, inner = range(len(sizes))
    placed = flat if strides[inner] == 1 else flat * strides[inner]
    below, total = sizes[inner], math.prod(sizes)
    for axis in reversed(outer):
        gap = strides[axis] - sizes[inner] * strides[inner]
        if gap and below < total:
            placed = placed.add(torch.div(flat, below, rounding_mode="floor"), alpha=gap)
        below, inner = below * sizes[axis], axis
    return placed


class Blocks:
    """The blocks that fit into tensors of a shape and memory format, with an edge for each axis.

    `drawn` holds the dropped blocks in one of two forms: the places in memory of their first
    elements (int32 or int64), or for each element in memory whether it is kept (uint8). `order`,
    `shape` and `edges` have the outermost axis in memory first. `sides` holds the edges and strides
    of the sides of a block, the longest first, where contiguous sides are joined.

    Blocks that reach across the border of a map are drawn on a larger map, whose border is cut off.
    """

    has_counts = False  # whether `drop` without a scale multiplies by all / kept elements

    def __init__(self, x: Tensor, edges: Sequence[int], across: bool = False) -> None:
        self.order = sorted(range(x.ndim), key=x.stride, reverse=True)
        self.shape, self.edges = [x.shape[a] for a in self.order], [edges[a] for a in self.order]
        self.numel, self.area = x.numel(), math.prod(edges)
        self._of_x = tuple(x.shape), tuple(edges), _strides(x.shape, self.order)
        sides: list[tuple[int, int]] = []
        strides = _strides(self.shape, range(x.ndim))
        for edge, stride in zip(reversed(self.edges), reversed(strides), strict=True):
            if sides and stride == math.prod(sides[-1]):
                sides[-1] = (sides[-1][0] * edge, sides[-1][1])
            elif edge > 1:
                sides.append((edge, stride))
        self.sides = sorted(sides, key=lambda side: -side[0]) or [(1, 1)]
        self.larger: Blocks | None = None
        if across and self.area > 1:
            sizes = [size + 2 * (edge - 1) for size, edge in zip(x.shape, edges, strict=True)]
            strides = _strides(sizes, self.order)
            like = torch.empty_strided(sizes, strides, dtype=x.dtype, device="meta")
            self.larger = Blocks(like, edges)

    def draw(self, chance: float, generator: torch.Generator | None) -> Tensor:
        if self.larger is not None:
            return self._cut_out(self.larger, self.larger.draw(chance, generator))
        shape, edges, strides = self._of_x
        if self.area == 1 and chance >= _FREQUENT:
            drawn = bernoulli(shape, chance, _CPU, generator).permute(self.order)
            return drawn.logical_not().contiguous().view(-1).view(torch.uint8)
        places = [size - edge + 1 for size, edge in zip(shape, edges, strict=True)]
        first = _placed(draw_positions(math.prod(places), chance, generator), places, strides)
        run, stride = self.sides[0]
        share = 1.5 if stride == 1 else 0.2  # of the elements, which are written in a pass over all
        fast = run >= _LONG or len(first) * self.area <= share * self.numel
        if fast and 32 * len(first) <= self.numel:
            return first.to(torch.int32) if self.numel < 2**31 else first
        return self._kept(first)

    def _cut_out(self, larger: "Blocks", drawn: Tensor) -> Tensor:
        """For each element in memory whether it is kept, from blocks of a larger map."""
        kept = drawn if drawn.dtype is torch.uint8 else larger._kept(drawn.to(torch.int64))
        kept = kept.view(larger.shape)
        for axis, edge in enumerate(self.edges):
            kept = kept.narrow(axis, edge - 1, self.shape[axis])
        return kept.contiguous().view(-1)

    def count(self, drawn: Tensor) -> int:
        if drawn.dtype is torch.uint8:
            return self.numel - int(drawn.count_nonzero())
        return self._union(drawn.to(torch.int64))

    def mask(self, drawn: Tensor) -> Tensor:
        kept = drawn if drawn.dtype is torch.uint8 else self._kept(drawn.to(torch.int64))
        axes = sorted(range(len(self.order)), key=self.order.__getitem__)
        return (kept == 0).view(self.shape).permute(axes)

    def drop(self, x: Tensor, scale: float | None, drawn: Tensor) -> Tensor:
        """``x * scale`` with 0 in the dropped blocks; `x` may have another memory format."""
        y = scaled(x, scale)
        laid = y.permute(self.order)
        flat = laid.contiguous().view(-1)
        if drawn.dtype is torch.uint8:
            _keep(flat, drawn)
        else:
            self._fill(flat, drawn.to(torch.int64))
        if not laid.is_contiguous():
            laid.copy_(flat.view(self.shape))
        return y

    def keep(self, noise: Tensor, drawn: Tensor) -> Tensor:
        """The tensor, which is overwritten, with 0 outside of the blocks."""
        return noise.masked_fill_(~self.mask(drawn), 0.0)

    def _fill(self, flat: Tensor, first: Tensor) -> None:
        (run, step), *others = self.sides
        runs = flat.as_strided((self.numel - (run - 1) * step, run), (1, step))
        offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
        for edge, stride in others:
            steps = torch.arange(0, edge * stride, stride, device="cpu")
            offsets = (offsets[:, None] + steps).view(-1)
        for some in torch.split(first, max(1, _ROWS // len(offsets))):
            runs.index_fill_(0, (some[:, None] + offsets).view(-1), 0)

    def _kept(self, first: Tensor) -> Tensor:
        kept = torch.ones(self.numel, dtype=torch.uint8, device="cpu")
        self._fill(kept, first)
        return kept

    def _union(self, first: Tensor) -> int:
        """The number of elements in these blocks: the bit of each first element is set and grown.

        Along an axis where the edge is 1, blocks do not overlap: 64 of its elements make a word.
        """
        axes = range(len(self.shape))
        grid = [size - edge + 1 for size, edge in zip(self.shape, self.edges, strict=True)]
        wide = [axis for axis in axes if self.edges[axis] > 1 and grid[axis] > 1]
        if not wide:
            return len(first) * self.area  # no two can overlap
        lanes = [axis for axis in axes if self.edges[axis] == 1]  # 64 of their elements are a word
        words = -(-math.prod(self.shape[axis] for axis in lanes) // 64)
        # rows of whole words for each place on the wide axes, with a border that growing removes
        sizes = [size + edge - 1 for size, edge in zip(self.shape, self.edges, strict=True)]
        inside, outside = _strides(self.shape, lanes), _strides(sizes, wide)
        strides = [a + b * words * 64 for a, b in zip(inside, outside, strict=True)]
        at = _placed(first, self.shape, strides)
        at = at + sum((self.edges[axis] - 1) * strides[axis] for axis in wide)
        rows = [sizes[axis] for axis in wide]
        masks = torch.zeros(math.prod(rows) * words, dtype=torch.int64, device="cpu")
        masks.index_add_(0, at >> 6, torch.ones_like(at) << (at & 63))
        grown = grow(masks.view(*rows, words), [self.edges[axis] for axis in wide])
        # an axis that a block covers entirely has one place
        whole = math.prod(e for e, g in zip(self.edges, grid, strict=True) if g == 1)
        return _count_bits(grown) * whole


class Units(Mask):
    """One element for each channel or sample."""

    def drop(self, x: Tensor, scale: Any, drawn: Tensor) -> Tensor:
        rows = _rows(x, drawn) if x.dtype is torch.float32 and x.is_contiguous() else None
        if rows is not None and rows.shape[1] <= _SHORT:  # dropped rows are never read
            kept = ~drawn.view(-1)
            chosen = kept.nonzero().view(-1)
            starts = kept.cumsum(0) - kept.to(torch.int64)
            weights = rows.new_full(chosen.shape, 1.0 if scale is None else scale)
            gathered = torch.embedding_bag(rows, chosen, starts, False, 0, False, weights)[0]
            return gathered.resize_(x.shape)  # not a view
        y = scaled(x, scale)
        rows = _rows(y, drawn)
        if rows is not None:
            rows.index_fill_(0, drawn.view(-1).nonzero().view(-1), 0.0)
        else:  # vectorized, which masked_fill_ is not
            torch.ops.aten.threshold_backward.grad_input(y, (~drawn).to(y.dtype), 0, grad_input=y)
        return y


def _rows(y: Tensor, mask: Tensor) -> Tensor | None:
    """The units as rows of a matrix, if each is contiguous and they lie in the order of `mask`."""
    order = sorted(range(y.ndim), key=y.stride, reverse=True)
    decided = [axis for axis in range(y.ndim) if mask.shape[axis] > 1]
    if order[: len(decided)] != decided or not y.permute(order).is_contiguous():
        return None
    return y.permute(order).view(mask.numel(), -1)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float | None, places: Any, drawn: Tensor) -> Tensor:
        ctx.scale, ctx.places = scale, places
        ctx.save_for_backward(drawn)
        return places.drop(x, scale, drawn)  # type: ignore[no-any-return]  # `places` is Any

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if is_batched_gradient(grads[0]):
            raise NotImplementedError(
                "this dropout has no batched gradients (torch.func.vmap, is_grads_batched=True): "
                "compute them one after another"
            )
        return _Drop.apply(grads[0], ctx.scale, ctx.places, *ctx.saved_tensors), *[None] * 3


def drop_drawn(x: Tensor, scale: float | Tensor | None, places: Any, drawn: Tensor) -> Tensor:
    plain = type(places) is Mask
    y: Tensor = places.drop(x, scale, drawn) if plain else _Drop.apply(x, scale, places, drawn)
    return y
