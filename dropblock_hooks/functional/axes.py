"""The axes of a tensor: views with the channels first, and back."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CHANNELS_FIRST = {1: "NCL", 2: "NCHW", 3: "NCDHW"}
CHANNELS_LAST = {1: "NLC", 2: "NHWC", 3: "NDHWC"}
PARAMETER = "parameter"
LAYOUTS = (*CHANNELS_FIRST.values(), *CHANNELS_LAST.values())
_TOKENS = CHANNELS_FIRST[1], CHANNELS_LAST[1]


class Form(NamedTuple):
    """How the axes of one tensor are to be read.

    Attributes:
        layout: ``"NCHW"``, ``"NLC"``, ...; "" where no axis has a name.
        grid: for tokens that form a map: its size.
        prefix: for tokens: how many at the front are not of the map.
        unrolled: the strides by which the tokens of a map were reordered; () is row by row.
    """

    layout: str
    grid: tuple[int, ...] | None = None
    prefix: int = 0
    unrolled: tuple[tuple[int, ...], ...] = ()


def accepted(spatial: int | None) -> tuple[str, ...]:
    """The layouts that a regularizer with this many spatial axes can take (None: any)."""
    if spatial is None:
        return LAYOUTS
    own = CHANNELS_FIRST[spatial], CHANNELS_LAST[spatial]
    return own if spatial == 1 else (*own, *reversed(_TOKENS))


def is_tokens(layout: str, spatial: int | None) -> bool:
    """Whether the map is folded into one axis of tokens."""
    return layout in _TOKENS and spatial is not None and spatial > 1


def is_last(layout: str) -> bool:
    """Whether the channels are the last axis."""
    return layout.endswith("C")


def are_numbers(size: Sequence[int]) -> bool:
    """Whether no edge is a symbol, as in make_fx."""
    return all(isinstance(edge, int) for edge in size)


def as_map(x: Tensor, form: Form) -> Tensor:
    """What is regularized of `x`, as (N, C, ...): a view where there is one, or `x` itself.

    A parameter is one sample, (1, C, ...): the channels that it gives are its first axis.
    """
    if form.layout == PARAMETER:
        return x.reshape(1, *(x.shape or (1,)))
    x = x.movedim(-1, 1) if form.layout.endswith("C") else x
    if form.prefix:
        x = x[:, :, form.prefix :]
    if form.grid is None:
        return x
    return _unfold(x, form.grid, form.unrolled)


def put_back(y: Tensor, x: Tensor, form: Form) -> Tensor:
    """`x` with the map `y` in the place that `as_map` took it from; the prefix is left as it is."""
    if form.layout == PARAMETER:
        return y.reshape(x.shape)
    if form.grid is not None:
        y = _fold(y, form.grid, form.unrolled)
    last = form.layout.endswith("C")
    y = y.movedim(1, -1) if last else y
    if form.prefix:
        axis = 1 if last else 2
        return torch.cat((x.narrow(axis, 0, form.prefix), y), axis)
    # not every operation keeps the order in memory, on which the layers behind may rely
    return y.contiguous() if last and x.is_contiguous() else y


def _unfold(x: Tensor, grid: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> Tensor:
    """Tokens (N, C, L) as a map.

    Unrolled tokens (Hiera) come as (N, C, s1..., s2..., rest...): the finest stride is outermost.
    """
    if not strides:
        return x.reshape(*x.shape[:2], *grid)
    parts = x.reshape(*x.shape[:2], *_parts(grid, strides))
    return parts.permute(0, 1, *_order(len(grid), len(strides))).reshape(*x.shape[:2], *grid)


def _fold(y: Tensor, grid: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> Tensor:
    """The inverse of `_unfold`."""
    if not strides:
        return y.flatten(2)
    order = _order(len(grid), len(strides))
    parts = _parts(grid, strides)
    inside = y.reshape(*y.shape[:2], *(parts[axis - 2] for axis in order))
    inverse = [order.index(axis) + 2 for axis in range(2, 2 + len(order))]
    return inside.permute(0, 1, *inverse).flatten(2)


def _parts(grid: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    # a list: torch.compile takes no generator there
    cut = [math.prod([stride[axis] for stride in strides]) for axis in range(len(grid))]
    rest = [edge // step for edge, step in zip(grid, cut, strict=True)]
    return (*(step for stride in strides for step in stride), *rest)


def _order(spatial: int, levels: int) -> list[int]:
    """The axes of the parts, coarse to fine, of one spatial axis after the other."""
    return [
        2 + level * spatial + axis for axis in range(spatial) for level in range(levels, -1, -1)
    ]
