"""Reads the axes of a layer's tensors.

Each site has a `Reader`, and asks it for the axes of each tensor that it regularizes.

Compiled code reads them from integers only, without the autograd graph, so torch.compile can trace
it.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .._torch import NO_TASK, graph_task
from ..quoting import with_article
from ..registry import name_of, registered
from ..tables import shown
from .facts import Facts
from .graph import UNKNOWN, channels_of
from .grids import Grid, Grids
from .view import CHANNELS_FIRST, FIRST, LAST, MIXED, View, is_tokens, layout_with, side_of

Shape = Sequence[int]

_RECURRENT = ("RNN", "LSTM", "GRU")
_ASKED = 3  # the graph is followed in so many calls with the same shape


class Reader:
    """Reads the axes of the tensors of a layer or a parameter.

    Attributes:
        options: the regularizer, for its options about axes.
        facts: the facts about the layer. A parameter has none.
        grids: the maps in this forward.
        auto: whether the rules decide the layout, because the options do not state it.
        last: the view of the last tensor, or None.
        sure: the view that every map gets, if the type of the layer decides it; or None. Compiled
            code asks it before the rules.
    """

    def __init__(
        self,
        regularizer: Any,
        facts: Facts | None,
        grids: Grids,
        spatial: int | None = None,
        of_parameter: bool = False,
    ) -> None:
        self.options = regularizer
        self.facts = facts or Facts()
        self.grids = grids
        self.auto = regularizer.layout == "auto"

        self._spatial: int | None = spatial or regularizer.spatial
        self._needs_channels = regularizer.channelwise or self._spatial is not None
        self._checks_samples = (regularizer.samplewise or self._needs_channels) and self.auto
        self._of_parameter = of_parameter

        self.last = View("parameter") if self._of_parameter else None
        self.sure: View | None = None
        if self.facts.own == FIRST and self.auto and self._spatial in (2, 3):
            self.sure = View(CHANNELS_FIRST[self._spatial])

        self._sides: dict[int, str] = {}  # the place of the channels, by the number of axes
        self._views: dict[torch.Size, View] = {}  # the views; for tokens, from the last forward
        self._settled: dict[torch.Size, View] = {}  # final views: the rules are not asked again
        self._asked: Counter[torch.Size] = Counter()  # the calls that count for `_ASKED`

    def view(self, x: Tensor) -> View:
        """Return the view of a tensor; ValueError if its axes are unknown."""
        if self._of_parameter:
            return View("parameter")

        if is_compiling():  # dynamo allows no side effects, and no hash of a traced size
            view = self._by_rules(x.shape, self._sides.get(x.ndim, ""))
            return self._with_grid(x.shape, view) if is_tokens(view.layout, self._spatial) else view

        settled = self._settled.get(x.shape)
        if settled is not None:
            self.last = settled
            return settled

        known = self._views.get(x.shape)
        asked_enough = self._asked[x.shape] >= _ASKED
        view = known if known and asked_enough else self._read(x)

        if self._spatial and is_tokens(view.layout, self._spatial):
            recomputes = graph_task() != NO_TASK  # a recomputation has the map of the last forward
            view = known if known and recomputes else self._with_grid(x.shape, view)
        elif asked_enough:
            self._settled[x.shape] = view

        self._views[x.shape] = view
        self.last = view
        return view

    def map_of(self, x: Tensor) -> Tensor | None:
        """Return the maps of a tensor, (N, C, h, w); None if there is no known map.

        The regularizer itself need not act on maps.
        """
        reader = Reader(self.options, self.facts, self.grids, 2)
        reader._sides.update(self._sides)
        try:
            return reader.view(x).to_maps(x)
        except ValueError:
            return None  # the tensor has vectors, tokens without a known grid, or other axes

    def remember(self, layout: str) -> None:
        """Take over the layout of a dry run, for compiled code."""
        if self.auto and len(layout) > 2:
            self._sides.setdefault(len(layout), side_of(layout))

    def _read(self, x: Tensor) -> View:
        """Apply the rules to a tensor, and compare the layout with earlier calls of the layer."""
        follow = self._needs_channels and self.auto and not self.facts.own
        by_graph = channels_of(x) if follow else ""
        if by_graph in ("", UNKNOWN):
            by_graph = self._sides.get(x.ndim, by_graph)
        view = self._by_rules(x.shape, by_graph)

        if self.auto and view.layout:
            earlier = self._sides.setdefault(x.ndim, side_of(view.layout))
            if earlier != side_of(view.layout):
                raise ValueError(
                    f"calls of this layer have different layouts: shape {tuple(x.shape)} is "
                    f"{view.layout}, earlier ones were {layout_with(earlier, x.ndim - 2)}; use a "
                    "layer of its own at each place, or say layout= for all"
                )

        # if the graph is not followed, one call is enough
        self._asked[x.shape] += 1 if follow else _ASKED
        return view

    def _by_rules(self, shape: Shape, by_graph: str) -> View:
        """Return the view without the grid of tokens.

        `by_graph` is a result of `channels_of`, or the side that earlier calls have shown. It is ""
        without a graph, and UNKNOWN if the graph does not show the side.
        """
        if self._checks_samples:
            self._check_samples(shape)
        if not self._needs_channels:
            return View("" if self.auto else self.options.layout)

        rank = self._rank(shape)
        if rank == 0:
            return View("")  # only samples and channels
        self._check_rank(shape, rank)
        if self.auto:
            layout = self._layout_by_rules(shape, rank, by_graph)
        else:
            layout = self._stated_layout(shape, rank)

        options = self.options
        for_tokens = options.grid is not None or options.prefix_tokens
        if for_tokens and not is_tokens(layout, self._spatial):
            raise ValueError(
                f"grid= and prefix_tokens= are for tokens, and do not fit {layout} of shape "
                f"{tuple(shape)}"
            )
        return View(layout)

    def _check_samples(self, shape: Shape) -> None:
        """Raise ValueError if axis 0 may not be the batch axis."""
        facts = self.facts
        if facts.batched > len(shape):
            raise ValueError(
                f"shape {tuple(shape)} has no axis of samples, since a batch of this layer has "
                f"{facts.batched} axes: pass a batch to the model, such as x[None] for one sample; "
                "say layout= if axis 0 is the batch"
            )
        if len(shape) != 3:
            return
        if facts.samples_second and facts.own != FIRST:
            why = f"the model has {with_article(facts.samples_second)} with batch_first=False"
        elif facts.type_name in _RECURRENT and self.options.index in (1, -1):
            why = "the state of a recurrent layer has its layers on axis 0"
        else:
            return

        where = f"axis 0 of shape {tuple(shape)} may not be the batch axis"
        raise ValueError(f"{where}: {why}; say layout= if it is")

    def _rank(self, shape: Shape) -> int:
        """Return the number of axes beside samples and channels, by the options or the shape."""
        if not self.auto:
            return len(self.options.layout) - 2
        if self._spatial is None or len(shape) == 3:
            return len(shape) - 2
        return self._spatial

    def _check_rank(self, shape: Shape, rank: int) -> None:
        """Raise ValueError for a shape without the required axes."""
        expected = CHANNELS_FIRST.get(rank, "") if self.auto else self.options.layout
        if expected and len(shape) == rank + 2:
            return

        needed = "2 to 5 axes, one of them the channels"
        if expected:
            tokens = " or tokens (N, L, C)" if self.auto and self._spatial in (2, 3) else ""
            needed = f"a {rank + 2}-D tensor ({', '.join(expected)}){tokens}"
        hint = self._other_place(shape, rank)
        raise ValueError(f"needs {needed}, got shape {tuple(shape)}{hint}")

    def _other_place(self, shape: Shape, rank: int) -> str:
        """Return where to put the regularizer if this layer gives a shape that does not fit."""
        if any(len(earlier) == rank + 2 for earlier in self._views):
            return (
                ". Earlier calls gave maps, so this layer is called at several places. Put the "
                "regularizer on a layer that is called at one place, such as the convolution"
            )
        if len(shape) == 2:
            if self.facts.type_name == "Linear" and self.options.unit:
                return ". Use Dropout on a Linear layer"
            return ". The layer gives no map: choose an earlier layer, before the pooling"
        if not self.auto:
            return ""

        name = name_of(type(self.options))
        other = f"{name.removesuffix(f'{rank}d')}{len(shape) - 2}d"
        if name.endswith(f"{rank}d") and other in registered(object):
            return f". Use {other} on a {len(shape)}-D tensor"
        return ""

    def _layout_by_rules(self, shape: Shape, rank: int, by_graph: str) -> str:
        """Return the layout by the rules; ValueError if the other axes may be no map."""
        layout = layout_with(self._side(shape, by_graph), rank)
        if rank > 1:
            # a layer with channels first returns maps, but a Linear takes any axes before channels
            is_first = side_of(layout) == FIRST
            is_certain = self.facts.own and (not self._spatial or is_first)
            if not is_certain:
                self._check_map(shape, layout)
        return layout

    def _stated_layout(self, shape: Shape, rank: int) -> str:
        """Return the layout in the options; ValueError if it contradicts the layer."""
        layout: str = self.options.layout
        facts = self.facts
        if facts.own == FIRST and side_of(layout) != FIRST:
            raise ValueError(
                f"layout={layout!r} contradicts the layer: "
                f"{with_article(facts.type_name)} gives {layout_with(FIRST, rank)}, here of shape "
                f"{tuple(shape)}"
            )
        return layout

    def _side(self, shape: Shape, by_graph: str) -> str:
        """Return the place of the channels; ValueError if no rule decides."""
        side = self._by_rules_in_order(shape, by_graph)
        if side:
            return side

        rank = len(shape) - 2
        front = layout_with(FIRST, rank)
        back = layout_with(LAST, rank)
        raise ValueError(
            f"can't tell the channels of shape {tuple(shape)}: {front} or {back} (the autograd "
            "graph of this forward and the layers inside do not show it); say which with layout=. "
            "Without a graph, as under torch.compile, attach(..., example_input=) may help"
        )

    def _by_rules_in_order(self, shape: Shape, by_graph: str) -> str:
        """Return `FIRST` or `LAST` by the first of the four rules that decides, or ""."""
        facts = self.facts
        if facts.own:  # 1, the type of the layer
            return facts.own
        if by_graph in (FIRST, LAST):  # 2, the autograd graph
            return by_graph
        if by_graph != MIXED:  # 3, the feature stage, and 4, the layers inside
            side = self._by_stage(shape) or self._by_inside(shape, by_graph)
            if side:
                return side
        # 4, if the layers inside are of both kinds: the layers of the whole model
        return self._by_surroundings(shape) if facts.inside == MIXED else ""

    def _by_stage(self, shape: Shape) -> str:
        """Return the place of the only axis with the number of channels of the stage; else ""."""
        is_first = shape[1] == self.facts.stage
        is_last = shape[-1] == self.facts.stage
        # with symbolic sizes, dynamo can't compute `is_first == is_last`
        if is_first and is_last:
            return ""
        if is_first:
            return FIRST
        return LAST if is_last else ""

    def _by_inside(self, shape: Shape, by_graph: str) -> str:
        """Return the place of the channels in the layers inside, if an axis has their length."""
        facts = self.facts
        if not facts.inside:
            return FIRST  # the order of torch, if no layer of the model has another order

        if facts.inside == FIRST and shape[1] in facts.widths:
            # if True, the code around these layers probably moves axes
            permutes = facts.norms_last or by_graph == UNKNOWN
            return "" if permutes and shape[-1] in facts.widths else FIRST
        if facts.inside == FIRST and self._is_joined(shape, by_graph):
            return FIRST
        if facts.inside == LAST and shape[-1] in facts.widths:
            return "" if shape[1] in facts.widths else LAST
        return ""

    def _is_joined(self, shape: Shape, by_graph: str) -> bool:
        """Return whether maps with channels first were joined along the channels, as in DenseNet.

        Then there are more channels than in any layer inside. In a permuted map, the last axis
        would be the longest.
        """
        facts = self.facts
        if facts.norms_last or facts.reorders or by_graph == UNKNOWN:
            return False
        return shape[1] > max((*facts.widths, *shape[2:]))

    def _by_surroundings(self, shape: Shape) -> str:
        """Return the place of the channels in a model with convolutions and linear layers."""
        facts = self.facts
        if facts.norms_last or facts.reorders:
            return ""  # code around the layers may move the axes

        first = shape[1] in facts.first_widths
        last = shape[-1] in facts.last_widths
        if first and (facts.around == FIRST or not last):
            return FIRST
        if first and len(shape) == 4 and shape[2] == shape[3] != shape[1]:
            return FIRST  # a square map; a linear layer has the same width by chance
        if last and not first and facts.around == LAST:
            return LAST
        return ""

    def _check_map(self, shape: Shape, layout: str) -> None:
        """Raise ValueError for axes beside samples and channels that may be no map."""
        heads = self.facts.heads
        last = side_of(layout) == LAST
        axes = tuple(shape[1:-1] if last else shape[2:])
        may_be_heads = shape[1:3] if last else shape[1:2]  # (N, L, heads, C) or (N, heads, L, C)
        # maps of this forward, and possible maps of later stages
        sizes, stages = self.grids.of(len(axes))

        if heads is not None and heads in may_be_heads:
            why = f"an axis is as long as the attention around it has heads ({heads})"
        elif last and stages and axes not in sizes and axes not in stages:
            # the axes may belong to windows, or to blocks of a map
            why = f"the model's maps are {_listed((*sizes, *stages))}"
        else:
            return
        raise ValueError(
            f"shape {tuple(shape)} seems to be {layout}, but {shown(axes)} may be no map: "
            f"{why}; say layout={layout!r} if it is one"
        )

    def _with_grid(self, shape: Shape, view: View) -> View:
        """Return the view of tokens with their grid and the number of prefix tokens."""
        options = self.options
        length = shape[1 if side_of(view.layout) == LAST else 2]
        prefixes = self.facts.prefixes
        if options.prefix_tokens is not None:
            prefixes = (options.prefix_tokens,)

        sizes, stages = self.grids.of(self._spatial or 0, shape[0])
        known = _fitting(sizes, length, prefixes) or _fitting(stages, length, prefixes)
        allowed = known
        if options.grid is not None:
            stated = _fitting([options.grid], length, prefixes)
            allowed = [pair for pair in stated if not known or pair in known]

        if len(allowed) != 1:
            raise self._unknown_grid(shape, length, prefixes, known)
        grid, prefix = allowed[0]
        return View(view.layout, grid, prefix)

    def _unknown_grid(
        self, shape: Shape, length: int, prefixes: Iterable[int], known: list[tuple[Grid, int]]
    ) -> ValueError:
        """Make the error about tokens that form no known map, or several."""
        sizes, _ = self.grids.of(self._spatial or 0, shape[0])
        ways = " or ".join(f"{shown(grid)} with {prefix} in front" for grid, prefix in known)
        if not ways:
            ways = f"maps of {_listed(sizes)}" if sizes else "no known grid"
        if self.options.grid is not None:
            ways += f", not {shown(self.options.grid)}"

        before = " or ".join(map(str, prefixes))
        axes = "(height, width)" if self._spatial == 2 else "(depth, height, width)"
        return ValueError(
            f"shape {tuple(shape)}: its {length} tokens (L), {before} of "
            f"them before the map, must form one of the maps of this forward: {ways}; say "
            f"grid=, {axes}, and prefix_tokens="
        )


def _fitting(grids: Iterable[Grid], length: int, prefixes: Iterable[int]) -> list[tuple[Grid, int]]:
    """Return the different pairs of a grid and a prefix that make this number of tokens."""
    pairs: list[tuple[Grid, int]] = []
    for grid, prefix in itertools.product(grids, prefixes):
        if math.prod(grid) + prefix == length and (grid, prefix) not in pairs:
            pairs.append((grid, prefix))
    return pairs


def _listed(grids: Iterable[Grid]) -> str:
    """List the different grids for a message."""
    return ", ".join(dict.fromkeys(map(shown, grids)))
