"""Reads the tensors of one layer: asks the rules about each new shape, and remembers answers."""

from collections import Counter

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..checkpointing import NO_TASK, graph_task
from ..tables import shown
from .facts import Facts
from .graph import UNTOLD, channels_of
from .grids import Grids
from .options import AxisOptions
from .rules import check_samples, view_of, with_grid
from .view import (
    CHANNELS_FIRST,
    FIRST,
    LAYOUTS,
    NAMELESS,
    PARAMETER,
    View,
    is_tokens,
    layout_with,
    side_of,
)

_MOST_SHAPES = 256
_ASKED = 3  # calls with one shape, in which the autograd graph is followed


class Reader:
    """Reads the tensors of one layer.

    Args:
        options: what the user says.
        facts: what the model tells about the layer; None for a parameter.
        grids: the sizes of maps in this forward.
        spatial: number of spatial axes that are needed; None for none.
        channels: whether the channels are needed.
        samples: whether axis 0 must be that of the samples.
        index: which element of the layer's output the tensors are.

    Attributes:
        last: how the last tensor was read; None before the first.
    """

    def __init__(
        self,
        options: AxisOptions,
        facts: Facts | None,
        grids: Grids,
        *,
        spatial: int | None = None,
        channels: bool = True,
        samples: bool = True,
        index: int | str | None = None,
    ) -> None:
        self.options, self.facts, self.grids = options, facts, grids
        self._spatial, self._index = spatial, index
        self._channels = channels or spatial is not None
        self._samples = (samples or self._channels) and options.auto
        self.last: View | None = None if facts else PARAMETER
        self._sides: dict[int, str] = {}  # where the channels are, by the number of axes
        self._views: dict[torch.Size, View] = {}  # of tokens, without their grids
        self._asked: Counter[torch.Size] = Counter()
        self._maps: dict[torch.Size, set[View]] = {}  # of forwards since the last recomputation
        self._repeated = False

    @property
    def needs_grids(self) -> bool:
        """Whether it may need the sizes of maps in this forward: where tokens form a map."""
        tokens = self.options.auto or is_tokens(self.options.layout, self._spatial)
        return self.facts is not None and (self._spatial or 0) > 1 and tokens

    def view(self, x: Tensor) -> View:
        """How the axes of a tensor are read.

        Raises:
            ValueError: if that can't be known.
        """
        facts = self.facts
        if facts is None:
            return PARAMETER
        if is_compiling():  # no side effects, and no hash of a traced size
            if facts.own == FIRST and self.options.auto and x.ndim - 2 == self._spatial != 1:
                return View(CHANNELS_FIRST[x.ndim - 2])  # the rules take longer to trace
            view = self._decided(facts, x, self._sides.get(x.ndim, ""))
            tokens = is_tokens(view.layout, self._spatial)
            return self._with_grid(facts, x, view) if tokens else view
        view = self._views.get(x.shape) or self._read(facts, x)
        if self._spatial and is_tokens(view.layout, self._spatial):
            view = self._map_of_this_image(facts, x, view)
        self.last = view
        return view

    def map_of(self, x: Tensor) -> Tensor | None:
        """A tensor as (N, C, h, w), whatever is needed otherwise; None where it holds no map."""
        reader = Reader(self.options, self.facts, self.grids, spatial=2, index=self._index)
        reader._sides.update(self._sides)
        try:
            return reader.view(x).take(x)
        except ValueError:
            return None  # vectors, tokens of no known grid, a layout of other axes

    def remember(self, layout: str) -> None:
        """Take over a layout that a dry run found, for compiled code."""
        if self.options.auto and layout in LAYOUTS:
            self._sides.setdefault(len(layout), side_of(layout))

    def _decided(self, facts: Facts, x: Tensor, seen: str) -> View:
        if self._samples:
            check_samples(facts, x.shape, self._index)
        if not self._channels:
            return NAMELESS if self.options.auto else View(self.options.layout)
        return view_of(self.options, self._spatial, facts, x.shape, seen, self.grids)

    def _read(self, facts: Facts, x: Tensor) -> View:
        """Ask the rules about a tensor, and compare with its other calls."""
        follow = self._channels and self.options.auto and not facts.own
        seen = channels_of(x) if follow else ""
        if seen in ("", UNTOLD):
            seen = self._sides.get(x.ndim, seen)
        view = self._decided(facts, x, seen)
        if self.options.auto and view.layout:
            before = self._sides.setdefault(x.ndim, side_of(view.layout))
            if before != side_of(view.layout):
                raise ValueError(
                    f"calls of this layer have different layouts: shape {tuple(x.shape)} is "
                    f"{view.layout}, earlier ones were {layout_with(before, x.ndim - 2)}; use a "
                    "layer of its own at each place, or say layout= for all"
                )
        if len(self._asked) >= _MOST_SHAPES:
            self._views, self._asked, self._maps = {}, Counter(), {}
        self._asked[x.shape] += 1
        if self._asked[x.shape] >= _ASKED or not follow:
            self._views[x.shape] = view
        return view

    def _with_grid(self, facts: Facts, x: Tensor, view: View) -> View:
        return with_grid(view, self.options, self._spatial or 0, facts, x.shape, self.grids)

    def _map_of_this_image(self, facts: Facts, x: Tensor, view: View) -> View:
        """The map of tokens; in a recomputation, that of the forward which it repeats."""
        recomputing = graph_task() != NO_TASK
        maps = self._maps.setdefault(x.shape, set())
        if recomputing and len(maps) > 1:
            sizes = " or ".join(shown(each.grid or ()) for each in sorted(maps))
            raise ValueError(
                f"shape {tuple(x.shape)}: forwards of different images came before this "
                f"recomputation, so its tokens can be {sizes}; run each backward before the next "
                "forward, or say grid="
            )
        if recomputing and maps:
            self._repeated = True
            return next(iter(maps))
        if self._repeated:
            self._maps, self._repeated = {}, False
        found = self._with_grid(facts, x, view)
        self._maps.setdefault(x.shape, set()).add(found)
        return found
