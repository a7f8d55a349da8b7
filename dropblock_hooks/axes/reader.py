"""Reads the tensors of a layer, by integers only so that torch.compile can trace it."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..checkpointing import NO_TASK, graph_task
from ..tables import shown
from .facts import Facts
from .graph import UNTOLD, channels_of
from .grids import Grid, Grids
from .view import CHANNELS_FIRST, FIRST, LAST, MIXED, View, is_tokens, layout_with, side_of

Shape = Sequence[int]

_RECURRENT = ("RNN", "LSTM", "GRU")
_ASKED = 3  # calls with one shape, in which the autograd graph is followed


class Reader:
    """Reads the tensors of a layer, or of a parameter, which has no facts."""

    def __init__(
        self, regularizer: Any, facts: Facts | None, grids: Grids, spatial: int | None = None
    ) -> None:
        self.options, self.facts, self.grids = regularizer, facts or Facts(), grids
        self.auto = regularizer.layout == "auto"
        self._spatial = spatial = spatial or regularizer.spatial
        self._channels = regularizer.channelwise or spatial is not None
        self._samples = (regularizer.samplewise or self._channels) and self.auto
        self._of_parameter = facts is None
        self.last = View("parameter") if self._of_parameter else None  # of the last tensor
        self.sure: View | None = None  # how all maps are read, if the layer's own type decides
        if self.facts.own == FIRST and self.auto and spatial in (2, 3):
            self.sure = View(CHANNELS_FIRST[spatial])
        self._sides: dict[int, str] = {}  # where the channels are, by the number of axes
        self._views: dict[torch.Size, View] = {}  # the answers; for tokens, of the last forward
        self._asked: Counter[torch.Size] = Counter()

    def view(self, x: Tensor) -> View:
        """How the axes of a tensor are read; a ValueError if that can't be known."""
        if self._of_parameter:
            return View("parameter")
        if is_compiling():  # no side effects, and no hash of a traced size
            view = self._by_rules(x.shape, self._sides.get(x.ndim, ""))
            return self._with_grid(x.shape, view) if is_tokens(view.layout, self._spatial) else view
        known = self._views.get(x.shape)
        view = known if known and self._asked[x.shape] >= _ASKED else self._read(x)
        if self._spatial and is_tokens(view.layout, self._spatial):
            again = graph_task() != NO_TASK  # a recomputation, with the map of the last forward
            view = known if known and again else self._with_grid(x.shape, view)
        self._views[x.shape] = self.last = view
        return view

    def map_of(self, x: Tensor) -> Tensor | None:
        """A tensor as (N, C, h, w), whatever is needed otherwise; None where it holds no map."""
        reader = Reader(self.options, self.facts, self.grids, 2)
        reader._sides.update(self._sides)
        try:
            return reader.view(x).take(x)
        except ValueError:
            return None  # vectors, tokens of no known grid, a layout of other axes

    def remember(self, layout: str) -> None:
        """Take over a layout that a dry run found, for compiled code."""
        if self.auto and len(layout) > 2:
            self._sides.setdefault(len(layout), side_of(layout))

    def _read(self, x: Tensor) -> View:
        """Ask the rules about a tensor, and compare with earlier calls of the layer."""
        follow = self._channels and self.auto and not self.facts.own
        seen = channels_of(x) if follow else ""
        if seen in ("", UNTOLD):
            seen = self._sides.get(x.ndim, seen)
        view = self._by_rules(x.shape, seen)
        if self.auto and view.layout:
            before = self._sides.setdefault(x.ndim, side_of(view.layout))
            if before != side_of(view.layout):
                raise ValueError(
                    f"calls of this layer have different layouts: shape {tuple(x.shape)} is "
                    f"{view.layout}, earlier ones were {layout_with(before, x.ndim - 2)}; use a "
                    "layer of its own at each place, or say layout= for all"
                )
        self._asked[x.shape] += 1 if follow else _ASKED
        return view

    def _by_rules(self, shape: Shape, seen: str) -> View:
        """The view without the grid of tokens; `seen` is an answer of `channels_of`."""
        options, spatial, facts = self.options, self._spatial, self.facts
        if self._samples:
            self._check_samples(shape)
        if not self._channels:
            return View("" if self.auto else options.layout)
        layout = options.layout
        rank = len(layout) - 2
        if self.auto:
            rank = len(shape) - 2 if spatial is None or len(shape) == 3 else spatial
        if rank == 0:
            return View("")  # samples and channels
        expected = CHANNELS_FIRST.get(rank, "") if self.auto else layout
        if not expected or len(shape) != rank + 2:
            tokens = " or tokens (N, L, C)" if self.auto and spatial in (2, 3) else ""
            tensor = f"a {rank + 2}-D tensor ({', '.join(expected)}){tokens}"
            needed = tensor if expected else "an axis of channels in 2 to 5"
            raise ValueError(f"needs {needed}, got shape {tuple(shape)}")
        if self.auto:
            layout = layout_with(self._side(shape, seen), rank)
            # a layer whose channels are first gives maps, and a Linear has channels beside any axes
            if rank > 1 and not (facts.own and (not spatial or side_of(layout) == FIRST)):
                self._check_map(shape, layout)
        elif facts.own == FIRST and side_of(layout) != FIRST:
            raise ValueError(
                f"layout={layout!r} contradicts the layer: a {facts.type_name} gives "
                f"{layout_with(FIRST, rank)}, here of shape {tuple(shape)}"
            )
        if (options.grid is not None or options.prefix_tokens) and not is_tokens(layout, spatial):
            raise ValueError(
                f"grid= and prefix_tokens= are for tokens, and do not fit {layout} of shape "
                f"{tuple(shape)}"
            )
        return View(layout)

    def _check_samples(self, shape: Shape) -> None:
        facts, why = self.facts, ""
        if facts.batched > len(shape):
            why = f"no axis of samples, since a batch of this layer has {facts.batched} axes"
        elif len(shape) == 3 and facts.samples_second and facts.own != FIRST:
            why = f"the model has a {facts.samples_second} with batch_first=False"
        elif len(shape) == 3 and facts.type_name in _RECURRENT and self.options.index in (1, -1):
            why = "the state of a recurrent layer has its layers on axis 0"
        if why:
            where = f"axis 0 of shape {tuple(shape)} may not be the batch axis"
            raise ValueError(f"{where}: {why}; say layout= if it is")

    def _side(self, shape: Shape, seen: str) -> str:
        """Where the channels are: by the layer, the graph, its feature stage, or inner layers."""
        facts = self.facts
        side = facts.own or ("" if seen == UNTOLD else seen)
        if not side and (shape[1] == facts.stage) != (shape[-1] == facts.stage):
            side = FIRST if shape[1] == facts.stage else LAST
        elif not side and not facts.inside:
            side = FIRST  # torch's own order, if no layer of the model has another
        elif not side and facts.inside == FIRST and shape[1] in facts.widths:
            permutes = facts.norms_last or seen == UNTOLD  # code around these layers, likely
            side = "" if permutes and shape[-1] in facts.widths else FIRST
        elif not side and facts.inside == FIRST and self._is_joined(shape, seen):
            side = FIRST
        elif not side and facts.inside == LAST and shape[-1] in facts.widths:
            side = "" if shape[1] in facts.widths else LAST
        if side not in (FIRST, LAST) and facts.inside == MIXED:
            side = self._by_surroundings(shape)
        if side in (FIRST, LAST):
            return side
        front, back = (layout_with(each, len(shape) - 2) for each in (FIRST, LAST))
        raise ValueError(
            f"can't tell the channels of shape {tuple(shape)}: {front} or {back} (the autograd "
            "graph of this forward and the layers inside do not show it); say which with layout=. "
            "Without a graph, as under torch.compile, attach(..., example_input=) may help"
        )

    def _is_joined(self, shape: Shape, seen: str) -> bool:
        """Whether maps with channels first were joined along them, as by a block of DenseNet.

        Then there are more channels than in any layer inside. A permuted map would have as many in
        the last axis.
        """
        facts = self.facts
        if facts.norms_last or facts.reorders or seen == UNTOLD:
            return False
        return shape[1] > max((*facts.widths, *shape[2:]))

    def _by_surroundings(self, shape: Shape) -> str:
        """Where the channels are in a model with layers of both kinds, such as a plain CNN."""
        facts = self.facts
        if facts.norms_last or facts.reorders:
            return ""  # code around the layers may move the axes
        first = shape[1] in facts.first_widths
        last = shape[-1] in facts.last_widths
        if first and (facts.around == FIRST or not last):
            return FIRST
        if first and len(shape) == 4 and shape[2] == shape[3] != shape[1]:
            return FIRST  # a square map, whose edge is the width of a linear layer by chance
        if last and not first and facts.around == LAST:
            return LAST
        return ""

    def _check_map(self, shape: Shape, layout: str) -> None:
        """Raise ValueError for axes beside samples and channels that may be no map."""
        heads, last = self.facts.heads, side_of(layout) == LAST
        axes = tuple(shape[1:-1] if last else shape[2:])
        met, stages = self.grids.of(len(axes))
        why = ""
        if heads is not None and heads in (shape[1:3] if last else shape[1:2]):
            why = f"an axis is as long as the attention around it has heads ({heads})"
        elif last and stages and axes not in met and axes not in stages:  # windows, blocks of a map
            why = f"the model's maps are {_listed((*met, *stages))}"
        if why:
            raise ValueError(
                f"shape {tuple(shape)} seems to be {layout}, but {shown(axes)} may be no map: "
                f"{why}; say layout={layout!r} if it is one"
            )

    def _with_grid(self, shape: Shape, view: View) -> View:
        """The view of tokens, with the grid that they form and the prefix before them."""
        options, length = self.options, shape[1 if side_of(view.layout) == LAST else 2]
        prefixes = self.facts.prefixes
        if options.prefix_tokens is not None:
            prefixes = (options.prefix_tokens,)
        met, stages = self.grids.of(self._spatial or 0, shape[0])
        known = _fitting(met, length, prefixes) or _fitting(stages, length, prefixes)
        given, said = known, ""
        if options.grid is not None:
            given = _fitting([options.grid], length, prefixes)
            given = [each for each in given if not known or each in known]
            said = f", not {shown(options.grid)}"
        if len(given) == 1:
            return View(view.layout, *given[0])
        ways = " or ".join(f"{shown(grid)} with {n} in front" for grid, n in known)
        ways = ways or (f"maps of {_listed(met)}" if met else "no known grid")
        axes = "(height, width)" if self._spatial == 2 else "(depth, height, width)"
        raise ValueError(
            f"shape {tuple(shape)}: its {length} tokens (L), {' or '.join(map(str, prefixes))} of "
            f"them before the map, must form one of the maps of this forward: {ways}{said}; say "
            f"grid=, {axes}, and prefix_tokens="
        )


def _fitting(grids: Iterable[Grid], length: int, prefixes: Iterable[int]) -> list[tuple[Grid, int]]:
    """The different grids, and prefixes, that make this number of tokens."""
    found: list[tuple[Grid, int]] = []
    for pair in itertools.product(grids, prefixes):
        if math.prod(pair[0]) + pair[1] == length and pair not in found:
            found.append(pair)
    return found


def _listed(grids: Iterable[Grid]) -> str:
    return ", ".join(dict.fromkeys(map(shown, grids)))
