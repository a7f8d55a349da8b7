"""How a tensor of some shape is read: where its channels are, and which map its tokens form.

Four rules are asked for the channels in turn, and the first answer counts: the layer's own type (a
convolution, a Linear, a norm), the autograd graph of this forward, the number of channels of the
feature stage that the layer ends, and the types of the layers inside. Where none has an answer, or
the tensor seems to hold something else than maps, it is refused.
All is decided by comparisons of integers, so that torch.compile can trace it.
"""

import math
from collections.abc import Iterable, Sequence

from ..tables import shown
from .facts import Facts
from .graph import UNTOLD
from .grids import Grid, Grids
from .options import AxisOptions
from .view import CHANNELS_FIRST, FIRST, LAST, NAMELESS, View, is_tokens, layout_with, side_of

Shape = Sequence[int]


def view_of(
    options: AxisOptions,
    spatial: int | None,
    facts: Facts,
    shape: Shape,
    seen: str,
    grids: Grids,
) -> View:
    """How a tensor of this shape is read; which map tokens form is decided by `with_grid`.

    Without a number of `spatial` axes, the channels alone are needed; `seen` is what the autograd
    graph says, as `graph.channels_of` returns it.

    Raises:
        ValueError: if it can't be known, or what is known contradicts the options.
    """
    rank = len(options.layout) - 2
    if options.auto:
        rank = len(shape) - 2 if spatial is None or len(shape) == 3 else spatial
    if rank == 0:
        return NAMELESS  # samples and channels
    if rank not in CHANNELS_FIRST:
        raise ValueError(f"needs an axis of channels in 2 to 5, got shape {tuple(shape)}")
    if len(shape) != rank + 2:
        axes = ", ".join(CHANNELS_FIRST[rank] if options.auto else options.layout)
        also = " or tokens (N, L, C)" if options.auto and spatial in (2, 3) else ""
        raise ValueError(f"needs a {rank + 2}-D tensor ({axes}){also}, got shape {tuple(shape)}")
    layout = options.layout
    if options.auto:
        layout = layout_with(_side(facts, shape, seen), rank)
        if rank > 1 and (spatial or not facts.own):  # a Linear has channels beside any axes
            _check_axes(facts, shape, layout, grids)
    elif facts.own == FIRST and side_of(layout) != FIRST:
        raise ValueError(
            f"layout={layout!r} contradicts the layer: a {facts.type_name} gives "
            f"{layout_with(FIRST, rank)}, here of shape {tuple(shape)}"
        )
    if is_tokens(layout, spatial):
        return View(layout)
    prefix = options.prefix_tokens or 0
    length = shape[1 if side_of(layout) == LAST else 2]
    if options.grid is not None or (prefix and (rank > 1 or prefix >= length)):
        raise ValueError(
            f"grid= and prefix_tokens= are for tokens, and do not fit {layout} of shape "
            f"{tuple(shape)}"
        )
    return View(layout, None, prefix)


def _side(facts: Facts, shape: Shape, seen: str) -> str:
    """Whether the channels are `FIRST` or `LAST`, by the first of the four rules that answers."""
    told = "" if seen == UNTOLD else seen
    side = facts.own or told or _stage(facts, shape) or _inside(facts, shape, seen)
    if side in (FIRST, LAST):
        return side
    front, back = (layout_with(each, len(shape) - 2) for each in (FIRST, LAST))
    raise ValueError(
        f"can't tell the channels of shape {tuple(shape)}: {front} or {back} (neither the autograd "
        "graph of this forward nor the layers inside tell); say which with layout=. Without a "
        "graph, as under torch.compile, attach(..., example_input=) may help"
    )


def _stage(facts: Facts, shape: Shape) -> str:
    """The feature stage that the layer ends, by its number of channels."""
    front, back = shape[1] == facts.stage, shape[-1] == facts.stage
    return "" if front == back else FIRST if front else LAST


def _inside(facts: Facts, shape: Shape, seen: str) -> str:
    """The types of the layers inside: all have their channels last, or all have them first.

    Code around these layers may permute axes, so the axis must be as long as one of them is wide,
    and the other one must not. It may be where nothing speaks of permutations: neither norms of
    last channels, nor an autograd graph that does not tell.
    """
    if not facts.inside:
        return FIRST  # torch's own order, if no layer of the model has another
    front, back = (_has(facts.widths, edge) for edge in (shape[1], shape[-1]))
    permutes = facts.norms_last or seen == UNTOLD
    if facts.inside == FIRST and front and not (back and permutes):
        return FIRST
    return LAST if facts.inside == LAST and back and not front else ""


def check_samples(facts: Facts, shape: Shape, index: int | str | None) -> None:
    """Raise ValueError if axis 0 of this element of an output may be no axis of samples."""
    why = ""
    if facts.batched > len(shape):
        why = f"no axis of samples, since a batch of this layer has {facts.batched} axes"
    elif len(shape) == 3 and facts.samples_second and facts.own != FIRST:
        why = f"the model has a {facts.samples_second} with batch_first=False"
    elif len(shape) == 3 and facts.type_name in ("RNN", "LSTM", "GRU") and index in (1, -1):
        why = "the state of a recurrent layer has its layers on axis 0"
    if why:
        raise ValueError(
            f"axis 0 of shape {tuple(shape)} may not be that of the samples: {why}; say layout= if "
            "it is"
        )


def _check_axes(facts: Facts, shape: Shape, layout: str, grids: Grids) -> None:
    """Raise ValueError for axes beside samples and channels that may be no map."""
    last = side_of(layout) == LAST
    if facts.own and not last:
        return
    axes = tuple(shape[1:-1] if last else shape[2:])
    met, stages = grids.of(len(axes))
    why = ""
    if facts.heads is not None and _has(shape[1:3] if last else shape[1:2], facts.heads):
        why = f"an axis is as long as the attention around it has heads ({facts.heads})"
    elif last and stages and axes not in met and axes not in stages:  # windows, or blocks of a map
        why = f"the model's maps are {_listed((*met, *stages))}"
    if why:
        raise ValueError(
            f"shape {tuple(shape)} seems to be {layout}, but {shown(axes)} may be no map: "
            f"{why}; say layout={layout!r} if it is one"
        )


def with_grid(
    view: View, options: AxisOptions, spatial: int, facts: Facts, shape: Shape, grids: Grids
) -> View:
    """The view of tokens, with the grid that they form and the prefix before them.

    Raises:
        ValueError: if no grid is known, or several are, or they contradict the options.
    """
    length = shape[1 if side_of(view.layout) == LAST else 2]
    prefixes = facts.prefixes if options.prefix_tokens is None else (options.prefix_tokens,)
    met, stages = grids.of(spatial, shape[0])
    known = _fitting(met, length, prefixes) or _fitting(stages, length, prefixes)
    given = known
    if options.grid is not None:
        given = _fitting([options.grid], length, prefixes)
        given = [each for each in given if not known or each in known]
    if len(given) == 1:
        return View(view.layout, *given[0])
    ways = " or ".join(f"{shown(grid)} with {n} in front" for grid, n in known)
    if not ways:
        ways = f"maps of {_listed(met)}" if met else "no known grid"
    said = "" if options.grid is None else f", not {shown(options.grid)}"
    raise ValueError(
        f"shape {tuple(shape)}: its {length} tokens (L), {' or '.join(map(str, prefixes))} of them "
        f"before the map, must form one of the maps of this forward: {ways}{said}; say grid=, "
        f"{'(height, width)' if spatial == 2 else '(depth, height, width)'}, and prefix_tokens="
    )


def _fitting(
    grids: Iterable[Grid], length: int, prefixes: tuple[int, ...]
) -> list[tuple[Grid, int]]:
    """The different grids, and prefixes, that make this number of tokens."""
    found: list[tuple[Grid, int]] = []
    for grid in grids:
        for prefix in prefixes:
            if math.prod(grid) + prefix == length and (grid, prefix) not in found:
                found.append((grid, prefix))
    return found


def _listed(grids: Iterable[Grid]) -> str:
    return ", ".join(dict.fromkeys(map(shown, grids)))


def _has(numbers: Sequence[int], n: int) -> bool:
    """Whether a number is among them; no hashing, which a traced size would not take."""
    return any(number == n for number in numbers)
