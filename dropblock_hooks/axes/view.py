"""The axes of a tensor: the options of a user, and its maps with the channels first."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import as_count, check_option
from ..quoting import quote

CHANNELS_FIRST = {1: "NCL", 2: "NCHW", 3: "NCDHW"}
CHANNELS_LAST = {1: "NLC", 2: "NHWC", 3: "NDHWC"}
FIRST, LAST, MIXED = "first", "last", "mixed"

_TOKENS = CHANNELS_LAST[1], CHANNELS_FIRST[1]


class View(NamedTuple):
    """How the axes of a tensor are read."""

    layout: str  # "NCHW", "NLC", ..., or "parameter"; "" where no axis has a name
    grid: tuple[int, ...] | None = None  # the size of the map that tokens form
    prefix: int = 0  # the number of tokens before the map

    def take(self, x: Tensor) -> Tensor:
        """The maps of a tensor as (N, C, ...), without the prefix; a parameter as (1, C, ...)."""
        if self.layout == "parameter":
            return x.reshape(1, *(x.shape or (1,)))
        x = x.movedim(-1, 1) if self.layout.endswith("C") else x
        if self.prefix:
            x = x[:, :, self.prefix :]
        return x if self.grid is None else x.reshape(*x.shape[:2], *self.grid)

    def put(self, y: Tensor, x: Tensor) -> Tensor:
        """`x` with the maps `y` in the place that `take` took them from; the prefix is kept."""
        if self.layout == "parameter":
            return y.reshape(x.shape)
        y = y if self.grid is None else y.flatten(2)
        last = self.layout.endswith("C")
        y = y.movedim(1, -1) if last else y
        if self.prefix:
            axis = 1 if last else 2
            return torch.cat((x.narrow(axis, 0, self.prefix), y), axis)
        # not every operation keeps the order in memory, on which the layers behind may rely
        return y.contiguous() if last and x.is_contiguous() else y


def layout_with(side: str, rank: int) -> str:
    return (CHANNELS_FIRST if side == FIRST else CHANNELS_LAST)[rank]


def side_of(layout: str) -> str:
    return LAST if layout.endswith("C") else FIRST


def is_tokens(layout: str, spatial: int | None) -> bool:  # which form a map together
    return layout in _TOKENS and spatial is not None and spatial > 1


def check_axes(regularizer: Any) -> None:
    layout, grid, prefix = regularizer.layout, regularizer.grid, regularizer.prefix_tokens
    spatial, label = regularizer.spatial, regularizer.label
    ranks = [1, 2, 3] if spatial is None else sorted({spatial, 1})
    known = [each[rank] for rank in ranks for each in (CHANNELS_FIRST, CHANNELS_LAST)]
    check_option("layout", layout, ("auto", *known))
    if grid is None and prefix is None:
        return
    if spatial in (None, 1):
        raise ValueError(f"grid and prefix_tokens are for tokens; {label} needs no map")
    as_count("prefix_tokens", 0 if prefix is None else prefix, 0)
    if grid is not None and not (isinstance(grid, tuple | list) and len(grid) == spatial):
        raise ValueError(f"grid must have {spatial} axes for {label}, got {quote(grid)}")
    for edge in grid or ():
        as_count("each axis of grid", edge)
