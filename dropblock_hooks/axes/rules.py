"""Where the channels of a tensor are: four rules are asked in turn, and the first answer counts.

The layer's own type (a convolution, a Linear, a norm), the autograd graph of this forward, the
number of channels of the feature stage that the layer ends, and the types of the layers inside.
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
    return View(layout, None, _sequence_prefix(options, shape, layout))


def _side(facts: Facts, shape: Shape, seen: str) -> str:
    """Whether the channels are `FIRST` or `LAST`, by the first of the four rules that answers."""
    told = "" if seen in (UNTOLD, LOST) else seen
    side = facts.own or told or _stage(facts, shape) or _inside(facts, shape, seen)
    if side in (FIRST, LAST):
        return side
    why = "neither the autograd graph nor the layers inside tell"
    if told == MIXED:
        why = "the autograd graph of this forward tells both"
    elif not seen:
        why = (
            "there is no autograd graph to read, and the layers inside do not tell: a training "
            "forward without torch.compile, or attach(..., example_input=), would show it"
        )
    front, back = (layout_with(each, len(shape) - 2) for each in (FIRST, LAST))
    raise ValueError(
        f"can't tell the channels of shape {tuple(shape)}: {front} or {back} ({why}); say which "
        "with layout="
    )


def _stage(facts: Facts, shape: Shape) -> str:
    """The feature stage that the layer ends, by its number of channels."""
    front, back = shape[1] == facts.stage, shape[-1] == facts.stage
    return "" if front == back else FIRST if front else LAST


def _inside(facts: Facts, shape: Shape, seen: str) -> str:
    """The types of the layers inside: all have their channels last, or all have them first.

    Code around these layers may permute axes, so their widths are compared with the shape. A model
    with norms of last channels permutes often: there, the width must fit the first axis alone.
    """
    if not facts.inside:
        return FIRST  # torch's own order, if no layer of the model has another
    front, back = (_has(facts.widths, edge) for edge in (shape[1], shape[-1]))
    if facts.inside == LAST:
        return LAST if back and not front else ""
    other_rank = facts.ranks and len(shape) - 2 not in facts.ranks  # maps became a sequence
    permutes = facts.norms_last or seen == LOST
    fits = front and not back if permutes else front or not back
    return FIRST if facts.inside == FIRST and fits and not other_rank else ""


def check_samples(facts: Facts, shape: Shape, index: int | str | None) -> None:
    """Raise ValueError if axis 0 of this element of an output may be no axis of samples."""
    why = ""
    if facts.batched > len(shape):
        why = f"it has no axis of samples: a batch of this layer has {facts.batched} axes"
    elif len(shape) == 3 and facts.samples_second and facts.own != FIRST:
        why = f"the model has a {facts.samples_second} with batch_first=False, whose samples are "
        why += "axis 1"
    elif len(shape) == 3 and facts.type_name in ("RNN", "LSTM", "GRU") and index in (1, -1):
        why = "the state of a recurrent layer has its layers on axis 0, and the samples on axis 1"
    if why:
        raise ValueError(
            f"shape {tuple(shape)} can't be read: {why}; say layout= if axis 0 is that of the "
            "samples"
        )


def _check_axes(facts: Facts, shape: Shape, layout: str, grids: Grids) -> None:
    """Raise ValueError for axes beside samples and channels that may be no map."""
    last = side_of(layout) == LAST
    if facts.own and not last:
        return
    axes = tuple(shape[1:-1] if last else shape[2:])
    beside = tuple(shape[1:3]) if last else (shape[1],)
    met, embedded = grids.of(len(axes)), grids.of(len(axes), embedded=True)
    maps = [*dict.fromkeys((*met, *facts.tokens.maps(embedded)))] if embedded else []
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


def _has(numbers: Sequence[int], n: int) -> bool:
    """Whether a number is among them; no hashing, which a traced size would not take."""
    return any(number == n for number in numbers)
