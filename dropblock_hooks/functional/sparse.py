"""Drops elements, blocks, channels and samples of large tensors on the CPU.

``dropblock`` and ``dropout`` use this *sparse form* if `takes` accepts the tensor, in eager mode
and inside the operators of compiled code. They draw once with `Blocks.draw` or `draw_units`, and
hand the result to `drop_drawn`.

Few positions begin a block, so the gaps between them are drawn instead of a number for each
position. Places in a tensor are numbered in the order of its memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._torch import is_batched_gradient, is_plain_call
from .masks import Mask, bernoulli, scaled

Sizes: TypeAlias = Sequence[int]
"""An integer for each axis of a tensor."""
Generator: TypeAlias = torch.Generator | None
"""A source of random numbers; None is torch's global one."""
LEAST = {
    "blocks": 2**17,
    "units": 2**18,
}
"""From so many elements on, the sparse form is faster."""
_CPU = torch.device("cpu")
_FREQUENT = 0.4  # from this chance on, one draw for each position is faster than one for each gap
_LONG_SIDE = 64  # elements; it is fast to write a side of a block with at least as many
_ELEMENTS_PER_START = 32  # with at least as many elements for each block, starts are stored
_PIECE = 2**17  # elements that stay in the cache
_ROWS_AT_ONCE = 2**16  # rows that are written by one operator
_SHORT_ROW = 4096  # elements; longer rows are slower to gather than to pass over


def takes(x: Tensor, what: str = "blocks") -> bool:
    """Return whether to use the sparse form, for a large plain tensor on a CPU without a trace."""
    return (
        not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.numel() >= LEAST[what]
        and is_plain_call(x)
    )


def draw_positions(total: int, chance: float, generator: Generator) -> Tensor:
    """Draw some of the numbers 0 to total - 1, each with this chance.

    Returns them in rising order, as int64.
    """
    if not 0.0 < chance < _FREQUENT:
        mask = bernoulli((total,), chance, _CPU, generator)
        return mask.nonzero().view(-1)

    logarithm_of_miss = math.log1p(-chance)
    parts = []
    last = -1.0
    while last < total:
        mean = (total - last) * chance
        deviation = math.sqrt(mean)
        number = int(mean + 4 * deviation) + 4  # seldom too few
        uniform = torch.rand(
            number,
            dtype=torch.float64,
            generator=generator,
            device="cpu",
        )

        # the gaps are geometric: floor(log(1 - u) / log(1 - chance)) for a uniform u
        logarithms = uniform.neg_().log1p_()
        ratios = logarithms.div_(logarithm_of_miss)
        gaps = ratios.floor_().add_(1)
        gaps[0] += last

        positions = gaps.cumsum_(0)
        last = positions[-1].item()
        parts.append(positions)

    drawn = parts[0] if len(parts) == 1 else torch.cat(parts)
    end = torch.searchsorted(drawn, total)  # the last positions are beyond the total
    inside = drawn[: int(end)]
    return inside.to(torch.int64)


def draw_units(shape: Sizes, chance: float, generator: Generator) -> Tensor:
    """Draw a boolean mask of this shape, True with this chance."""
    sizes = tuple(shape)
    mask = torch.zeros(sizes, dtype=torch.bool, device="cpu")
    flat = mask.view(-1)
    positions = draw_positions(len(flat), chance, generator)
    flat.index_fill_(0, positions, True)
    return mask


def grow(mask: Tensor, edges: Sizes, first: int = 0) -> Tensor:
    """Return for each window of a mask whether a position in it is True.

    The edges are those of a window, for the axes from `first` on. These axes become edge - 1
    shorter. The windows are doubled until they have these edges. Masks of bits work, too.
    """
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

    words.add_(words >> 4)
    words.bitwise_and_(0x0F0F0F0F0F0F0F0F)

    words.mul_(0x0101010101010101)  # adds up all bytes in the highest byte
    torch.bitwise_right_shift(words, 56, out=words)
    return int(words.sum())


def _zero_dropped(x: Tensor, kept: Tensor) -> None:
    """Write 0 into `x` where `kept` is 0, also over Inf and NaN. Both have the same type.

    The backward of a threshold does this. Unlike ``masked_fill_``, it is vectorized.
    """
    write_threshold = torch.ops.aten.threshold_backward.grad_input
    write_threshold(x, kept, 0, grad_input=x)


def _zero_dropped_in_pieces(flat: Tensor, kept: Tensor) -> None:
    """Do the work of `_zero_dropped` for `kept` as bytes, which are converted piece by piece."""
    length = min(_PIECE, len(kept))
    buffer = torch.empty(length, dtype=flat.dtype, device="cpu")
    pieces = torch.split(flat, _PIECE)
    kept_pieces = torch.split(kept, _PIECE)

    for piece, kept_piece in zip(pieces, kept_pieces, strict=True):
        numbers = buffer[: len(kept_piece)]
        numbers.copy_(kept_piece)
        _zero_dropped(piece, numbers)


def _strides(sizes: Sizes, order: Sizes) -> list[int]:
    """Return the strides of a contiguous tensor whose axes lie in this order.

    An axis that is not in `order` has a stride of 0.
    """
    strides = [0] * len(sizes)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= sizes[axis]
    return strides


def _offsets(positions: Tensor, sizes: Sizes, strides: Sizes) -> Tensor:
    """Return the sum of coordinate * stride of each row-major position in a box of these sizes."""
    *outer, inner = range(len(sizes))
    total = math.prod(sizes)

    offsets = positions
    if strides[inner] != 1:
        offsets = positions * strides[inner]
    below = sizes[inner]  # the number of positions in one step of the axis

    for axis in reversed(outer):
        # so far, `offsets` counts a step of this axis as `sizes[inner]` steps of the axis inside it
        added = sizes[inner] * strides[inner]
        correction = strides[axis] - added
        if correction and below < total:  # otherwise all outer axes have size 1, and no steps
            steps = torch.div(positions, below, rounding_mode="floor")
            offsets = offsets.add(steps, alpha=correction)
        below *= sizes[axis]
        inner = axis
    return offsets


class _Side(NamedTuple):
    """A side of a block: its number of elements, and the distance of neighbors in memory."""

    edge: int
    stride: int

    @property
    def reach(self) -> int:
        """The distance in memory from the first element of the side to the place behind it."""
        return self.edge * self.stride


def _sides(edges: Sizes, strides: Sizes) -> list[_Side]:
    """Return the sides of a block with more than one element, the longest first.

    If one step along a side is as long as the whole side inside it, both are joined.
    """
    sides: list[_Side] = []
    for axis in reversed(range(len(edges))):
        edge = edges[axis]
        stride = strides[axis]
        inner = sides[-1] if sides else None
        if inner is not None and stride == inner.reach:
            joined = inner.edge * edge
            sides[-1] = _Side(joined, inner.stride)
        elif edge > 1:
            side = _Side(edge, stride)
            sides.append(side)

    if not sides:
        return [_Side(1, 1)]
    return sorted(sides, key=lambda side: -side.edge)


def _order_in_memory(x: Tensor) -> list[int]:
    """Return the axes of a tensor, the outermost one in memory first."""
    axes = range(x.ndim)
    return sorted(axes, key=x.stride, reverse=True)


def _starts_per_axis(sizes: Sizes, edges: Sizes) -> list[int]:
    """Return the number of positions on each axis where a block may begin."""
    numbers = []
    for size, edge in zip(sizes, edges, strict=True):
        numbers.append(size - edge + 1)
    return numbers


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

    # whether `drop` computes the factor (all / kept elements) itself if no scale is given;
    # `drop_blocks` asks this
    has_counts = False

    def __init__(
        self,
        x: Tensor,
        edges: Sizes,
        across: bool = False,
        order: list[int] | None = None,
    ) -> None:
        self.order = order or _order_in_memory(x)
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

    def _on_larger_map(self, x: Tensor, edges: Sizes) -> Blocks:
        """Return the blocks of a larger map, which has room for blocks across the border.

        The order of its axes is handed on, because strides do not tell it of an axis of size 1.
        """
        sizes = []
        for size, edge in zip(x.shape, edges, strict=True):
            border = edge - 1
            sizes.append(size + 2 * border)
        like = torch.empty(sizes, device="meta")
        return Blocks(like, edges, order=self.order)

    def draw(self, chance: float, generator: Generator) -> Tensor:
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
        if not self._writes_each_block(starts):
            return self._kept(starts)
        if _ELEMENTS_PER_START * len(starts) > self.numel:
            return self._kept(starts)
        if self.numel < 2**31:
            return starts.to(torch.int32)
        return starts

    def _writes_each_block(self, starts: Tensor) -> bool:
        """Return whether it is faster to write each block into the tensor itself.

        The other way writes the blocks into bytes, and then passes over all elements.
        """
        longest = self.sides[0]
        if longest.edge >= _LONG_SIDE:
            return True

        largest_share = 0.2  # of the elements; above it, a pass is faster
        if longest.stride == 1:
            largest_share = 1.5
        written = len(starts) * self.area
        return written <= largest_share * self.numel

    def _draw_starts(self, chance: float, generator: Generator) -> Tensor:
        """Return the places in memory where blocks begin."""
        starts_per_axis = _starts_per_axis(self._shape_of_x, self._edges_of_x)
        total = math.prod(starts_per_axis)
        positions = draw_positions(total, chance, generator)
        return _offsets(positions, starts_per_axis, self._strides_of_x)

    def _cut_out(self, larger: Blocks, drawn: Tensor) -> Tensor:
        """Return for each element in memory whether it is kept, from blocks of the larger map."""
        flat = larger._as_kept(drawn)
        kept = flat.view(larger.shape)
        for axis, edge in enumerate(self.edges):
            border = edge - 1
            length = self.shape[axis]
            kept = kept.narrow(axis, border, length)
        return kept.contiguous().view(-1)

    def count(self, drawn: Tensor) -> int:
        """Return the number of dropped elements."""
        if drawn.dtype is torch.uint8:
            kept = drawn.count_nonzero()
            return self.numel - int(kept)
        starts = drawn.to(torch.int64)
        return self._count_covered(starts)

    def mask(self, drawn: Tensor) -> Tensor:
        """Return a boolean mask in the shape of the tensor, True where an element is dropped."""
        dropped = self._as_kept(drawn) == 0
        in_memory = dropped.view(self.shape)
        axes = [self.order.index(axis) for axis in range(len(self.order))]
        return in_memory.permute(axes)

    def drop(self, x: Tensor, scale: float | None, drawn: Tensor) -> Tensor:
        """Return ``x * scale`` with 0 in the dropped blocks; `x` may have any memory format."""
        y = scaled(x, scale)
        in_memory_order = y.permute(self.order)
        flat = in_memory_order.contiguous().view(-1)

        if drawn.dtype is torch.uint8:
            _zero_dropped_in_pieces(flat, drawn)
        else:
            starts = drawn.to(torch.int64)
            self._zero_blocks(flat, starts)

        if not in_memory_order.is_contiguous():  # then `flat` is a copy
            result = flat.view(self.shape)
            in_memory_order.copy_(result)
        return y

    def keep(self, noise: Tensor, drawn: Tensor) -> Tensor:
        """Keep the noise in the blocks, and write 0 elsewhere; return the changed tensor."""
        outside = ~self.mask(drawn)
        return noise.masked_fill_(outside, 0.0)

    def _zero_blocks(self, flat: Tensor, starts: Tensor) -> None:
        """Write 0 into the blocks that begin at these places of a tensor in the order of memory.

        A view has a row for each place where a block may begin. The row is the longest side of this
        block, so rows overlap. A block is several of these rows.
        """
        longest, *others = self.sides
        last = (longest.edge - 1) * longest.stride
        shape = (self.numel - last, longest.edge)
        strides = (1, longest.stride)
        rows = flat.as_strided(shape, strides)

        # from the start of a block to each of its rows
        offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
        for side in others:
            steps = torch.arange(0, side.reach, side.stride, device="cpu")
            offsets = _sums_of_pairs(offsets, steps)

        blocks_at_once = _ROWS_AT_ONCE // len(offsets)
        for some_starts in torch.split(starts, max(1, blocks_at_once)):
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
        starts = drawn.to(torch.int64)
        return self._kept(starts)

    def _count_covered(self, starts: Tensor) -> int:
        """Return the number of elements in the blocks that begin at these places in memory.

        Blocks may overlap. So the bit of each start is set, the bits grow to blocks, and are
        counted. Along an axis that a block covers entirely, one bit stands for all elements.
        """
        starts_per_axis = _starts_per_axis(self.shape, self.edges)
        overlapping = []
        elements_per_bit = 1
        for axis, edge in enumerate(self.edges):
            if starts_per_axis[axis] == 1:
                elements_per_bit *= edge
            elif edge > 1:
                overlapping.append(axis)
        if not overlapping:
            return len(starts) * self.area

        words = self._words_of(starts, overlapping)
        edges = [self.edges[axis] for axis in overlapping]
        grown = grow(words, edges)
        return _count_bits(grown) * elements_per_bit

    def _words_of(self, starts: Tensor, overlapping: Sizes) -> Tensor:
        """Return words of 64 bits, in which the bits of the starts are set.

        An axis of edge 1 is packed: blocks can't overlap along it, so its elements follow each
        other in the words of the last axis. An axis along which blocks overlap is an axis of the
        result. It has a border of edge - 1 in front, so that growing gives it its size again. An
        axis that a block covers entirely is left out.
        """
        packed = []
        bits_of_row = 1
        bordered = []
        for axis, edge in enumerate(self.edges):
            size = self.shape[axis]
            bordered.append(size + edge - 1)
            if edge == 1:
                packed.append(axis)
                bits_of_row *= size
        words_per_row = (bits_of_row + 63) // 64

        strides_in_row = _strides(self.shape, packed)
        strides_of_rows = _strides(bordered, overlapping)
        bits_per_row = words_per_row * 64
        strides = []
        for in_row, of_rows in zip(strides_in_row, strides_of_rows, strict=True):
            stride = in_row + of_rows * bits_per_row
            strides.append(stride)

        border = 0
        sizes = []
        for axis in overlapping:
            edge = self.edges[axis]
            border += (edge - 1) * strides[axis]
            sizes.append(bordered[axis])
        numbers = _offsets(starts, self.shape, strides) + border  # of the bits

        number_of_words = math.prod(sizes) * words_per_row
        words = torch.zeros(number_of_words, dtype=torch.int64, device="cpu")
        values = torch.ones_like(numbers) << (numbers & 63)
        words.index_add_(0, numbers >> 6, values)  # each bit comes once, so a sum is an OR
        return words.view(*sizes, words_per_row)


class UnitMask(Mask):
    """Applies a mask that has one element for each channel or sample."""

    def drop(self, x: Tensor, scale: Any, drawn: Tensor) -> Tensor:
        if x.dtype is torch.float32 and x.is_contiguous():
            rows = _rows(x, drawn)
            if rows is not None and rows.shape[1] <= _SHORT_ROW:
                flat = drawn.view(-1)
                gathered = _gather_kept(rows, scale, flat)
                # not `view`, because autograd refuses to change a view from a Function in place
                return gathered.resize_(x.shape)

        y = scaled(x, scale)
        rows = _rows(y, drawn)
        if rows is not None:
            flat = drawn.view(-1)
            dropped = flat.nonzero().view(-1)
            rows.index_fill_(0, dropped, 0.0)
        else:
            kept = (~drawn).to(y.dtype)
            _zero_dropped(y, kept)
        return y


def _gather_kept(rows: Tensor, scale: float | None, dropped: Tensor) -> Tensor:
    """Return ``rows * scale`` with 0 in the dropped rows, which are never read.

    The rows are summed in bags, one for each row of the result. A bag holds the row if it is kept,
    or no row, so that its sum is 0.
    """
    kept = ~dropped
    chosen = kept.nonzero().view(-1)
    ends = kept.cumsum(0)
    starts = ends - kept.to(torch.int64)  # where each bag begins in `chosen`
    factor = 1.0 if scale is None else scale
    weights = rows.new_full(chosen.shape, factor)
    sums: Tensor
    sums, *_ = torch.embedding_bag(
        rows,
        chosen,
        starts,
        scale_grad_by_freq=False,
        mode=0,  # a sum
        sparse=False,
        per_sample_weights=weights,
    )
    return sums


def _rows(y: Tensor, mask: Tensor) -> Tensor | None:
    """Return the units as rows of a matrix; None if memory has another order than `mask`."""
    order = _order_in_memory(y)
    axes_of_units = []
    for axis, size in enumerate(mask.shape):
        if size > 1:
            axes_of_units.append(axis)
    outermost = order[: len(axes_of_units)]
    if outermost != axes_of_units:
        return None

    in_memory_order = y.permute(order)
    if not in_memory_order.is_contiguous():
        return None
    units = mask.numel()
    return in_memory_order.view(units, -1)


class _Drop(torch.autograd.Function):
    """Drops blocks or units; the backward drops and scales the gradient alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float | None, applier: Any, drawn: Tensor) -> Tensor:
        ctx.scale = scale
        ctx.applier = applier
        ctx.save_for_backward(drawn)
        y: Tensor = applier.drop(x, scale, drawn)
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
            dropped = _Drop.apply(grad, ctx.scale, ctx.applier, drawn)
        else:
            dropped = ctx.applier.drop(grad, ctx.scale, drawn)
        return dropped, None, None, None


def drop_drawn(x: Tensor, scale: float | Tensor | None, applier: Any, drawn: Tensor) -> Tensor:
    """Return ``x * scale`` with 0 in the drawn blocks, units or elements.

    Args:
        x: the tensor.
        scale: the factor of the kept elements.
        applier: an object whose `drop` knows what `drawn` means, such as `Blocks` or a `Mask`. The
            backward of a plain `Mask` is torch's own.
        drawn: the blocks, units or elements that were drawn.
    """
    y: Tensor
    if type(applier) is Mask:
        y = applier.drop(x, scale, drawn)
    else:
        y = _Drop.apply(x, scale, applier, drawn)
    return y
