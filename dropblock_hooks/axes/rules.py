"""Where the channels of a tensor are: four rules are asked in turn, and the first answer counts.

Where no rule has an answer, or the tensor seems to hold something else than maps, it is refused.
All is decided by comparisons of integers, so that torch.compile can trace it.
"""

from collections.abc import Sequence

from ..tables import shown
from .facts import Facts
from .graph import LOST, UNTOLD
from .grids import Grids
from .options import AxisOptions
from .view import (
    CHANNELS_FIRST,
    FIRST,
    LAST,
    MIXED,
    NAMELESS,
    View,
    is_tokens,
    layout_with,
    side_of,
)

Shape = Sequence[int]


def own_type(facts: Facts, shape: Shape, seen: str) -> str:
    """The layer's own type: a convolution, a Linear, a norm."""
    fits = facts.own == FIRST or facts.width is None or shape[-1] == facts.width
    return facts.own if fits else ""


def graph(facts: Facts, shape: Shape, seen: str) -> str:
    """The autograd graph of this forward, through which the axes were followed."""
    return "" if seen in (UNTOLD, LOST) else seen


def stage(facts: Facts, shape: Shape, seen: str) -> str:
    """The feature stage that the layer ends, by its number of channels."""
    front, back = shape[1] == facts.stage, shape[-1] == facts.stage
    return "" if front == back else FIRST if front else LAST


def inside(facts: Facts, shape: Shape, seen: str) -> str:
    """The types of the layers inside: all have their channels last, or all have them first.

    Code around these layers may permute axes, so their widths are compared with the shape. A model
    with norms of last channels permutes often: there, the width must fit the first axis alone.
    """
    permutes = facts.norms_last or seen == LOST
    front, back = (_has(facts.widths, edge) for edge in (shape[1], shape[-1]))
    if facts.inside == LAST:
        return LAST if back and not front else ""
    if facts.inside == FIRST:
        other_rank = facts.ranks and len(shape) - 2 not in facts.ranks  # maps became a sequence
        fits = front and not back if permutes else front or not back
        return FIRST if fits and not other_rank else ""
    return "" if facts.inside else FIRST  # torch's own order, if no layer of the model has another


RULES = (own_type, graph, stage, inside)


def view_of(
    options: AxisOptions,
    spatial: int | None,
    facts: Facts,
    shape: Shape,
    seen: str,
    grids: Grids,
) -> View:
    """How a tensor of this shape is read; which map tokens form is decided by `maps`.

    Args:
        options: what the user says.
        spatial: number of spatial axes that are needed; None needs the channels alone.
        facts: what the model tells about the layer.
        shape: of the tensor.
        seen: what the autograd graph says, as `graph.channels_of` does.
        grids: the sizes of maps in this forward.

    Raises:
        ValueError: where it can't be known, or what is known contradicts the options.
    """
    rank = len(options.layout) - 2
    if options.auto:
        rank = len(shape) - 2 if spatial is None or len(shape) == 3 else spatial
    if rank == 0:
        return NAMELESS  # samples and channels
    if rank not in CHANNELS_FIRST:
        raise ValueError(f"needs an axis of channels in 2 to 5, got shape {tuple(shape)}")
    if len(shape) != rank + 2:
        raise ValueError(_wrong_rank(rank, options, spatial, shape))
    layout = options.layout
    if options.auto:
        layout = _found(facts, shape, seen, rank)
        if rank > 1 and (spatial or not facts.own):  # a Linear has channels beside any axes
            _check_axes(facts, shape, layout, grids)
    elif facts.own == FIRST and side_of(layout) != FIRST:
        raise ValueError(
            f"layout={layout!r} contradicts the layer: a {facts.type_name} gives "
            f"{layout_with(FIRST, rank)}, here of shape {tuple(shape)}"
        )
    if is_tokens(layout, spatial):
        return View(layout)
    return View(layout, None, _sequence_prefix(options, shape, layout))


def _found(facts: Facts, shape: Shape, seen: str, rank: int) -> str:
    """The layout by the rules."""
    for rule in RULES:
        side = rule(facts, shape, seen)
        if side in (FIRST, LAST):
            return layout_with(side, rank)
        if side == MIXED:
            break
    raise ValueError(
        f"can't tell the channels of shape {tuple(shape)}: {layout_with(FIRST, rank)} or "
        f"{layout_with(LAST, rank)} ({_why(seen)}); say which with layout="
    )


def _why(seen: str) -> str:
    if seen == MIXED:
        return "the autograd graph of this forward tells both"
    if seen in (UNTOLD, LOST):
        return "neither the autograd graph nor the layers inside tell"
    return (
        "there is no autograd graph to read, and the layers inside do not tell: a training forward "
        "without torch.compile, or attach(..., example_input=), would show it"
    )


def check_samples(facts: Facts, shape: Shape, index: int | str | None) -> None:
    """Raise ValueError where axis 0 may be another one than that of the samples.

    Args:
        facts: what the model tells about the layer.
        shape: of the tensor.
        index: which element of the layer's output it is.
    """
    if facts.samples_second and len(shape) == 3 and facts.own != FIRST:
        raise ValueError(
            f"shape {tuple(shape)} can't be read: the model has a {facts.samples_second} with "
            "batch_first=False, whose samples are axis 1; say layout= if they are axis 0"
        )
    if facts.batched > len(shape):
        raise ValueError(
            f"shape {tuple(shape)} has no axis of samples: a batch of this layer has "
            f"{facts.batched} axes; add one of length 1, or say layout= if axis 0 is it"
        )
    if facts.recurrent and index in (1, -1) and len(shape) == 3:
        raise ValueError(
            f"shape {tuple(shape)} can't be read: the state of a recurrent layer has its layers "
            "on axis 0, and the samples on axis 1"
        )


def _check_axes(facts: Facts, shape: Shape, layout: str, grids: Grids) -> None:
    """Raise ValueError for axes beside samples and channels that may be no map."""
    last = side_of(layout) == LAST
    if facts.own and not last:
        return
    axes = tuple(shape[1:-1] if last else shape[2:])
    beside = tuple(shape[1:3]) if last else (shape[1],)
    met, embedded = grids.of(len(axes)), grids.of(len(axes), embedded=True)
    maps = [*dict.fromkeys((*met, *facts.tokens.stages_of(embedded)))] if embedded else []
    why = ""
    if facts.heads is not None and _has(beside, facts.heads):
        why = f"an axis is as long as the attention around it has heads ({facts.heads})"
    elif last and maps and axes not in maps:  # windows, or blocks of a map
        why = f"the model's maps are {', '.join(map(shown, maps))}"
    if why:
        raise ValueError(
            f"shape {tuple(shape)} seems to be {layout}, but {shown(axes)} may be no map: "
            f"{why}; say layout={layout!r} if it is one"
        )


def _sequence_prefix(options: AxisOptions, shape: Shape, layout: str) -> int:
    prefix = options.prefix_tokens or 0
    if options.grid is not None or (prefix and len(shape) != 3):
        raise ValueError(
            f"grid= and prefix_tokens= are for tokens, but the layer gives {layout}, "
            f"shape {tuple(shape)}"
        )
    if prefix and prefix >= shape[1 if side_of(layout) == LAST else 2]:
        raise ValueError(f"prefix_tokens={prefix} leaves none of shape {tuple(shape)}")
    return prefix


def _wrong_rank(rank: int, options: AxisOptions, spatial: int | None, shape: Shape) -> str:
    axes = ", ".join(CHANNELS_FIRST[rank] if options.auto else options.layout)
    also = " or tokens (N, L, C)" if options.auto and spatial in (2, 3) else ""
    return f"needs a {rank + 2}-D tensor ({axes}){also}, got shape {tuple(shape)}"


def _has(numbers: Sequence[int], n: int) -> bool:
    """Whether a number is among them; no hashing, which a traced size would not take."""
    return any(number == n for number in numbers)
