"""The axes of a tensor: the options of a user, and its maps with the channels first.

A `Reader` returns a `View` of a tensor. The constructors of regularizers call `check_axes`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import as_count, check_option
from ..quoting import quote

CHANNELS_FIRST = {1: "NCL", 2: "NCHW", 3: "NCDHW"}
CHANNELS_LAST = {1: "NLC", 2: "NHWC", 3: "NDHWC"}
# the place of the channels; `MIXED` if the autograd graph, or the layers inside a layer, show both
FIRST = "first"
LAST = "last"
MIXED = "mixed"

_TOKENS = (CHANNELS_LAST[1], CHANNELS_FIRST[1])


class View(NamedTuple):
    """How the axes of a tensor are read.

    Attributes:
        layout: ``"NCHW"``, ``"NLC"``, ... or ``"parameter"``; ``""`` if the class reads no axes, or
            the tensor has only samples and channels.
        grid: the size of the map that tokens form. None for a tensor without tokens, and for tokens
            of a class that needs no map of 2 or 3 axes.
        prefix: the number of tokens before the map.
    """

    layout: str
    grid: tuple[int, ...] | None = None
    prefix: int = 0

    def to_maps(self, x: Tensor) -> Tensor:
        """Return the maps of a tensor as (N, C, ...), without the prefix.

        A parameter becomes (1, C, ...).
        """
        if self.layout == "parameter":
            return x.reshape(1, *(x.shape or (1,)))

        if self.layout.endswith("C"):
            x = x.movedim(-1, 1)
        if self.prefix:
            x = x[:, :, self.prefix :]
        if self.grid is not None:
            x = x.reshape(*x.shape[:2], *self.grid)
        return x

    def from_maps(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the maps `y` with the axes and the prefix of `x`: the reverse of `to_maps`."""
        if self.layout == "parameter":
            return y.reshape(x.shape)

        if self.grid is not None:
            y = y.flatten(2)
        channels_last = self.layout.endswith("C")
        if channels_last:
            y = y.movedim(1, -1)
        if self.prefix:
            token_axis = 1 if channels_last else 2
            prefix = x.narrow(token_axis, 0, self.prefix)
            return torch.cat((prefix, y), token_axis)

        # The operation may have stored `y` with its channels first. Then `movedim` has made it
        # non-contiguous, and a later layer could not call ``view`` on it, as it does on `x`.
        return y.contiguous() if channels_last and x.is_contiguous() else y


OF_PARAMETER = View("parameter")
"""The view of a parameter or of its gradient."""
WITH_CHANNELS_FIRST = frozenset(View(layout) for layout in CHANNELS_FIRST.values())
"""The views of tensors that are maps already, so that `View.to_maps` changes nothing."""


def layout_with(side: str, rank: int) -> str:
    """Return the layout with `rank` spatial axes, and the channels `FIRST` or `LAST`."""
    return CHANNELS_FIRST[rank] if side == FIRST else CHANNELS_LAST[rank]


def side_of(layout: str) -> str:
    """Return the place of the channels in a layout: `FIRST` or `LAST`."""
    return LAST if layout.endswith("C") else FIRST


def is_tokens(layout: str, spatial: int | None) -> bool:
    """Return whether a layout has tokens, which must form a map with `spatial` axes."""
    return layout in _TOKENS and spatial is not None and spatial > 1


def check_axes(regularizer: Any) -> None:
    """Raise ValueError for options about axes that the regularizer can't use."""
    spatial = regularizer.spatial
    # tokens have one axis beside samples and channels, and each class may get them
    ranks = [1, 2, 3] if spatial is None else sorted({spatial, 1})
    layouts = ["auto"]
    for rank in ranks:
        layouts += [CHANNELS_FIRST[rank], CHANNELS_LAST[rank]]
    check_option("layout", regularizer.layout, tuple(layouts))

    grid = regularizer.grid
    prefix = regularizer.prefix_tokens
    if grid is None and prefix is None:
        return
    label = regularizer.label
    if spatial in (None, 1):
        raise ValueError(
            "grid and prefix_tokens say which map the tokens form; "
            f"{label} acts on the tokens themselves"
        )
    if prefix is not None:
        as_count("prefix_tokens", prefix, 0)
    if grid is not None:
        _check_grid(grid, spatial, label)


def _check_grid(grid: Any, spatial: int, label: str) -> None:
    if not isinstance(grid, tuple | list) or len(grid) != spatial:
        raise ValueError(f"grid must have {spatial} axes for {label}, got {quote(grid)}")
    for edge in grid:
        as_count("each axis of grid", edge)
