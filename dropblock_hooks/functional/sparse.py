"""Drops blocks, and whole channels and samples, of large tensors on the CPU in eager mode.

Seeds are rare, so the gaps between them are drawn instead of a number for each position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import is_batched_gradient, is_plain_call
from .masks import Mask, bernoulli, scaled

LEAST = {"blocks": 2**17, "units": 2**18}  # elements of a tensor that make the sparse form faster
_CPU = torch.device("cpu")
_FREQUENT = 0.4  # from this chance on, one draw for each position is faster than one for each gap
_LONG = 64  # contiguous elements; it is fast to write at least as many
_PER_START = 32  # with at least as many elements for each block, starts of blocks are stored
_PIECE = 2**17  # elements that stay in the cache
_ROWS = 2**16  # rows that are written at once
_SHORT = 4096  # elements of a row; longer rows are slower to gather than to pass over


def takes(x: Tensor, what: str = "blocks") -> bool:
    """Return whether to use the sparse form, for a large plain tensor on a CPU without a trace."""
    return (
        not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.numel() >= LEAST[what]
        and is_plain_call(x)
    )


def draw_positions(total: int, chance: float, generator: torch.Generator | None) -> Tensor:
    """Draw some of the numbers 0 to total - 1, each with this chance; in rising order, int64."""
    if not 0.0 < chance < _FREQUENT:
        mask = bernoulli((total,), chance, _CPU, generator)
        return mask.nonzero().view(-1)

    parts = []
    last = -1.0
    while last < total:
        mean = (total - last) * chance
        number = int(mean + 4 * math.sqrt(mean)) + 4  # seldom too few
        uniform = torch.rand(number, dtype=torch.float64, generator=generator, device="cpu")

        # the gaps are geometric: floor(log(1 - u) / log(1 - chance)) for a uniform u
        logarithms = uniform.neg_().log1p_()
        ratios = logarithms.div_(math.log1p(-chance))
        gaps = ratios.floor_().add_(1)
        gaps[0] += last

        positions = gaps.cumsum_(0)
        last = positions[-1].item()
        parts.append(positions)

    drawn = parts[0] if len(parts) == 1 else torch.cat(parts)
    number_inside = int(torch.searchsorted(drawn, total))
    return drawn[:number_inside].to(torch.int64)


def draw_units(shape: Sequence[int], chance: float, generator: torch.Generator | None) -> Tensor:
    """Draw a boolean mask of this shape, True with this chance."""
    mask = torch.zeros(tuple(shape), dtype=torch.bool, device="cpu")
    positions = draw_positions(mask.numel(), chance, generator)
    mask.view(-1).index_fill_(0, positions, True)
    return mask


def grow(mask: Tensor, edges: Sequence[int], first: int = 0) -> Tensor:
    """Take the OR over windows by doubling. Each axis from `first` on gets edge - 1 shorter."""
    for axis, edge in enumerate(edges, start=first):
        width = 1
        while width < edge:
            shift = min(width, edge - width)
            length = mask.shape[axis] - shift
            begin = mask.narrow(axis, 0, length)
            end = mask.narrow(axis, shift, length)
            mask = begin | end
            width += shift
    return mask


def _count_bits(words: Tensor) -> int:
    """Return the number of bits that are set in int64 words, which are overwritten.

    The counts of pairs of bits, of 4 bits and of bytes are added up inside each word.
    """
    odd_bits = (words >> 1).bitwise_and_(0x5555555555555555)
    words.sub_(odd_bits)

    upper_pairs = (words >> 2).bitwise_and_(0x3333333333333333)
    words.bitwise_and_(0x3333333333333333).add_(upper_pairs)

    words.add_(words >> 4).bitwise_and_(0x0F0F0F0F0F0F0F0F)

    words.mul_(0x0101010101010101)  # adds up all bytes in the highest byte
    torch.bitwise_right_shift(words, 56, out=words)
    return int(words.sum())


def _zero_dropped(x: Tensor, kept: Tensor) -> None:
    """Write 0 into `x` where `kept`, of the same type, is 0, also over Inf and NaN.

    The backward of a threshold does this. Unlike ``masked_fill_``, it is vectorized.
    """
    torch.ops.aten.threshold_backward.grad_input(x, kept, 0, grad_input=x)


def _zero_dropped_in_pieces(flat: Tensor, kept: Tensor) -> None:
    """Do the work of `_zero_dropped` for `kept` as bytes, which are converted piece by piece."""
    length = min(_PIECE, len(kept))
    buffer = torch.empty(length, dtype=flat.dtype, device="cpu")
    pieces = torch.split(flat, _PIECE)
    kept_pieces = torch.split(kept, _PIECE)

    for piece, kept_piece in zip(pieces, kept_pieces, strict=True):
        numbers = buffer[: len(kept_piece)].copy_(kept_piece)
        _zero_dropped(piece, numbers)


def _strides(sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor whose axes lie in this order.

    An axis that is not in `order` has a stride of 0.
    """
    strides = [0] * len(sizes)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= sizes[axis]
    return strides


def _offsets(positions: Tensor, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Return the sum of coordinate * stride of each row-major position in a box of these sizes."""
    *outer, inner = range(len(sizes))
    offsets = positions if strides[inner] == 1 else positions * strides[inner]
    below = sizes[inner]  # the number of positions in one step of the axis
    total = math.prod(sizes)

    for axis in reversed(outer):
        # so far, a step of this axis counts as all steps of the axis inside it
        correction = strides[axis] - sizes[inner] * strides[inner]
        if correction and below < total:
            steps = torch.div(positions, below, rounding_mode="floor")
            offsets = offsets.add(steps, alpha=correction)
        below *= sizes[axis]
        inner = axis
    return offsets


class _Side(NamedTuple):
    """A side of a block: its number of elements, and the distance of neighbors in memory."""

    edge: int
    stride: int


def _sides(edges: Sequence[int], strides: Sequence[int]) -> list[_Side]:
    """Return the sides of a block with more than one element, the longest first.

    A side that begins in memory where the side inside it ends is joined with that side.
    """
    sides: list[_Side] = []
    for edge, stride in zip(reversed(edges), reversed(strides), strict=True):
        inner = sides[-1] if sides else None
        if inner is not None and stride == inner.edge * inner.stride:
            sides[-1] = _Side(inner.edge * edge, inner.stride)
        elif edge > 1:
            sides.append(_Side(edge, stride))

    if not sides:
        return [_Side(1, 1)]
    return sorted(sides, key=lambda side: -side.edge)


def _order_in_memory(x: Tensor) -> list[int]:
    """Return the axes of a tensor, the outermost one in memory first."""
    return sorted(range(x.ndim), key=x.stride, reverse=True)


def _places(sizes: Sequence[int], edges: Sequence[int]) -> list[int]:
    """Return the number of places on each axis where a block may begin."""
    return [size - edge + 1 for size, edge in zip(sizes, edges, strict=True)]


def _sums_of_pairs(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums of all pairs of elements of two vectors, as a vector."""
    sums = a[:, None] + b
    return sums.view(-1)


class Blocks:
    """The blocks that fit into tensors of a shape and memory format, with an edge for each axis.

    `drawn` holds the dropped blocks in one of two forms, which differ in their types:

    int32 or int64  the places in memory of the first elements of the blocks
    uint8           whether each element is kept, in the order of memory

    `order`, `shape` and `edges` have the outermost axis in memory first. Positions are drawn in the
    order of the axes of the tensor, so equal seeds give equal masks in all memory formats.

    Blocks that reach across the border of a map are drawn on a larger map, whose border is cut off.
    """

    has_counts = False  # whether `drop` without a scale multiplies by all / kept elements

    def __init__(self, x: Tensor, edges: Sequence[int], across: bool = False) -> None:
        self.order = _order_in_memory(x)
        self.shape = [x.shape[axis] for axis in self.order]
        self.edges = [edges[axis] for axis in self.order]
        self.numel = x.numel()
        self.area = math.prod(edges)
        strides = _strides(self.shape, range(x.ndim))
        self.sides = _sides(self.edges, strides)

        self._shape_of_x = tuple(x.shape)
        self._edges_of_x = tuple(edges)
        self._strides_of_x = _strides(x.shape, self.order)

        self.larger: Blocks | None = None
        if across and self.area > 1:
            self.larger = self._on_larger_map(x, edges)

    def _on_larger_map(self, x: Tensor, edges: Sequence[int]) -> Blocks:
        """Return the blocks of a larger map, which has room for blocks across the border."""
        sizes = []
        for size, edge in zip(x.shape, edges, strict=True):
            border = edge - 1
            sizes.append(size + 2 * border)
        strides = _strides(sizes, self.order)
        like = torch.empty_strided(sizes, strides, dtype=x.dtype, device="meta")
        return Blocks(like, edges)

    def draw(self, chance: float, generator: torch.Generator | None) -> Tensor:
        """Draw blocks, each with this chance, in the form that is written faster."""
        if self.larger is not None:
            drawn = self.larger.draw(chance, generator)
            return self._cut_out(self.larger, drawn)

        if self.area == 1 and chance >= _FREQUENT:
            dropped = bernoulli(self._shape_of_x, chance, _CPU, generator)
            kept = dropped.permute(self.order).logical_not()
            in_memory = kept.contiguous().view(-1)
            return in_memory.view(torch.uint8)

        starts = self._draw_starts(chance, generator)
        if not self._is_written_alone(starts) or _PER_START * len(starts) > self.numel:
            return self._kept(starts)
        if self.numel < 2**31:
            return starts.to(torch.int32)
        return starts

    def _is_written_alone(self, starts: Tensor) -> bool:
        """Return whether to write each block is faster than a pass over all elements."""
        longest = self.sides[0]
        if longest.edge >= _LONG:
            return True
        most = 1.5 if longest.stride == 1 else 0.2  # as a share of the elements
        return len(starts) * self.area <= most * self.numel

    def _draw_starts(self, chance: float, generator: torch.Generator | None) -> Tensor:
        """Return the places in memory where blocks begin."""
        places = _places(self._shape_of_x, self._edges_of_x)
        positions = draw_positions(math.prod(places), chance, generator)
        return _offsets(positions, places, self._strides_of_x)

    def _cut_out(self, larger: Blocks, drawn: Tensor) -> Tensor:
        """Return for each element in memory whether it is kept, from blocks of a larger map."""
        kept = larger._as_kept(drawn).view(larger.shape)
        for axis, edge in enumerate(self.edges):
            kept = kept.narrow(axis, edge - 1, self.shape[axis])
        return kept.contiguous().view(-1)

    def count(self, drawn: Tensor) -> int:
        """Return the number of dropped elements."""
        if drawn.dtype is torch.uint8:
            return self.numel - int(drawn.count_nonzero())
        return self._count_covered(drawn.to(torch.int64))

    def mask(self, drawn: Tensor) -> Tensor:
        """Return a boolean mask in the shape of the tensor, True where an element is dropped."""
        dropped = self._as_kept(drawn) == 0
        in_memory = dropped.view(self.shape)
        axes = sorted(range(len(self.order)), key=self.order.__getitem__)
        return in_memory.permute(axes)

    def drop(self, x: Tensor, scale: float | None, drawn: Tensor) -> Tensor:
        """Return ``x * scale`` with 0 in the dropped blocks; `x` may have any memory format."""
        y = scaled(x, scale)
        laid = y.permute(self.order)
        flat = laid.contiguous().view(-1)

        if drawn.dtype is torch.uint8:
            _zero_dropped_in_pieces(flat, drawn)
        else:
            self._zero_blocks(flat, drawn.to(torch.int64))

        if not laid.is_contiguous():  # then `flat` is a copy
            laid.copy_(flat.view(self.shape))
        return y

    def keep(self, noise: Tensor, drawn: Tensor) -> Tensor:
        """Write 0 into a tensor outside of the blocks; return the tensor."""
        return noise.masked_fill_(~self.mask(drawn), 0.0)

    def _zero_blocks(self, flat: Tensor, starts: Tensor) -> None:
        """Write 0 into the blocks that begin at these places of a tensor in the order of memory.

        The longest side of a block is a row of a view with overlapping rows.
        """
        longest, *others = self.sides
        number_of_rows = self.numel - (longest.edge - 1) * longest.stride
        shape = (number_of_rows, longest.edge)
        rows = flat.as_strided(shape, (1, longest.stride))

        # from the start of a block to each of its rows
        offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
        for edge, stride in others:
            steps = torch.arange(0, edge * stride, stride, device="cpu")
            offsets = _sums_of_pairs(offsets, steps)

        blocks_at_once = max(1, _ROWS // len(offsets))
        for some_starts in torch.split(starts, blocks_at_once):
            indices = _sums_of_pairs(some_starts, offsets)
            rows.index_fill_(0, indices, 0)

    def _kept(self, starts: Tensor) -> Tensor:
        """Return for each element in memory whether it is kept, from the starts of blocks."""
        kept = torch.ones(self.numel, dtype=torch.uint8, device="cpu")
        self._zero_blocks(kept, starts)
        return kept

    def _as_kept(self, drawn: Tensor) -> Tensor:
        """Return for each element in memory whether it is kept, from either form."""
        if drawn.dtype is torch.uint8:
            return drawn
        return self._kept(drawn.to(torch.int64))

    def _count_covered(self, starts: Tensor) -> int:
        """Return the number of elements in the blocks that begin at these places in memory.

        The bit of each start is set, and the bits grow to blocks.
        """
        places = _places(self.shape, self.edges)
        overlapping = []
        covered = 1  # the elements along axes that a block covers entirely, which have one bit
        for axis, edge in enumerate(self.edges):
            if places[axis] == 1:
                covered *= edge
            elif edge > 1:
                overlapping.append(axis)
        if not overlapping:
            return len(starts) * self.area

        bits = self._bits_of(starts, overlapping)
        grown = grow(bits, [self.edges[axis] for axis in overlapping])
        return _count_bits(grown) * covered

    def _bits_of(self, starts: Tensor, overlapping: Sequence[int]) -> Tensor:
        """Return words with the bits of the starts; the last axis has the words of a row.

        Along an axis where the edge is 1, blocks do not overlap: 64 of its elements make a word.
        There is a row for each place on the axes where blocks overlap, with a border that growing
        removes.
        """
        packed = [axis for axis in range(len(self.shape)) if self.edges[axis] == 1]
        bits_of_row = math.prod(self.shape[axis] for axis in packed)
        words = (bits_of_row + 63) // 64

        bordered = [size + edge - 1 for size, edge in zip(self.shape, self.edges, strict=True)]
        strides_in_row = _strides(self.shape, packed)
        strides_of_rows = _strides(bordered, overlapping)
        strides = []
        for in_row, of_rows in zip(strides_in_row, strides_of_rows, strict=True):
            strides.append(in_row + of_rows * words * 64)

        border = 0
        for axis in overlapping:
            border += (self.edges[axis] - 1) * strides[axis]
        bits = _offsets(starts, self.shape, strides) + border

        rows = [bordered[axis] for axis in overlapping]
        number_of_words = math.prod(rows) * words
        masks = torch.zeros(number_of_words, dtype=torch.int64, device="cpu")
        values = torch.ones_like(bits) << (bits & 63)
        masks.index_add_(0, bits >> 6, values)
        return masks.view(*rows, words)


class UnitMask(Mask):
    """Applies a mask that has one element for each channel or sample."""

    def drop(self, x: Tensor, scale: Any, drawn: Tensor) -> Tensor:
        if x.dtype is torch.float32 and x.is_contiguous():
            rows = _rows(x, drawn)
            if rows is not None and rows.shape[1] <= _SHORT:
                flat = drawn.view(-1)
                gathered = _gather_kept(rows, scale, flat)
                return gathered.resize_(x.shape)  # not a view

        y = scaled(x, scale)
        rows = _rows(y, drawn)
        if rows is not None:
            dropped = drawn.view(-1).nonzero().view(-1)
            rows.index_fill_(0, dropped, 0.0)
        else:
            _zero_dropped(y, (~drawn).to(y.dtype))
        return y


def _gather_kept(rows: Tensor, scale: float | None, dropped: Tensor) -> Tensor:
    """Return ``rows * scale`` with 0 in the dropped rows, which are never read.

    The rows are summed in bags. A bag holds one kept row, or no row, so that its sum is 0.
    """
    kept = ~dropped
    chosen = kept.nonzero().view(-1)
    ends = kept.cumsum(0)
    starts = ends - kept.to(torch.int64)
    factor = 1.0 if scale is None else scale
    weights = rows.new_full(chosen.shape, factor)
    # by position: scale_grad_by_freq, mode (0 is a sum), sparse, per_sample_weights
    sums: Tensor
    sums, *_ = torch.embedding_bag(rows, chosen, starts, False, 0, False, weights)
    return sums


def _rows(y: Tensor, mask: Tensor) -> Tensor | None:
    """Return the units as rows of a matrix; None if memory has another order than `mask`."""
    order = _order_in_memory(y)
    decided = [axis for axis in range(y.ndim) if mask.shape[axis] > 1]
    if order[: len(decided)] != decided:
        return None

    laid = y.permute(order)
    if not laid.is_contiguous():
        return None
    return laid.view(mask.numel(), -1)


class _Drop(torch.autograd.Function):
    """Drops blocks or units; the backward drops and scales the gradient alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float | None, places: Any, drawn: Tensor) -> Tensor:
        ctx.scale = scale
        ctx.places = places
        ctx.save_for_backward(drawn)
        y: Tensor = places.drop(x, scale, drawn)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if is_batched_gradient(grad):
            raise NotImplementedError(
                "this dropout has no batched gradients (torch.func.vmap, is_grads_batched=True): "
                "compute them one after another"
            )
        (drawn,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second backward may come
            dropped = _Drop.apply(grad, ctx.scale, ctx.places, drawn)
        else:
            dropped = ctx.places.drop(grad, ctx.scale, drawn)
        return dropped, None, None, None


def drop_drawn(x: Tensor, scale: float | Tensor | None, places: Any, drawn: Tensor) -> Tensor:
    """Return ``x * scale`` with 0 in the dropped places.

    The backward of a plain `Mask` is torch's own.
    """
    y: Tensor
    if type(places) is Mask:
        y = places.drop(x, scale, drawn)
    else:
        y = _Drop.apply(x, scale, places, drawn)
    return y
