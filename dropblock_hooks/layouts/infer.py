"""The form of a tensor: decided from the options, what the model tells, and the tensor's shape.

Pure comparisons of integers, so that it can be run at every call and traced by a compiler.
"""

from typing import Any

from ..functional.axes import CHANNELS_FIRST, CHANNELS_LAST, Form, is_last, is_tokens
from ..regularizers.base import Regularizer
from ..tables import shown
from .hints import Evidence
from .map_sizes import MapSizes
from .tokens import Shape, has, stage_sizes, token_form
from .witnesses import ask

_FIRST_FORMS = {spatial: Form(layout) for spatial, layout in CHANNELS_FIRST.items()}
_NAMELESS = Form("")


def form_of(
    regularizer: Regularizer,
    evidence: Evidence,
    shape: Shape,
    told: Any = (),
    seen: str = "",
    sizes: MapSizes | None = None,
) -> Form:
    """How the axes of a tensor of this shape are to be read.

    Args:
        regularizer: its options, and the number of spatial axes that it needs.
        evidence: what the model tells about the layer.
        shape: of the tensor.
        told: what the layer took and gave in this call; sizes of maps among it are used.
        seen: what the graph of this forward says, as `autograd_graph.channels_of` does.
        sizes: what the model has met in this forward.

    Raises:
        ValueError: where it can't be known, or what is known contradicts the options.
    """
    spatial, layout = regularizer.spatial, regularizer.layout
    auto = layout == "auto"
    if auto and (spatial or regularizer.samplewise or regularizer.channelwise):
        _check_samples(evidence, shape, regularizer.index)
    if spatial is None and not regularizer.channelwise:
        return _NAMELESS if auto else Form(layout)
    rank = len(layout) - 2
    if auto:
        rank = len(shape) - 2 if spatial is None or len(shape) == 3 else spatial
    if rank == 0:
        return _NAMELESS  # samples and channels
    if rank not in CHANNELS_FIRST:
        raise ValueError(f"needs an axis of channels in 2 to 5, got shape {tuple(shape)}")
    if len(shape) != rank + 2:
        raise ValueError(_wrong_rank(rank, layout, spatial, shape))
    if auto:
        tokens = spatial is not None and rank < spatial
        both = CHANNELS_FIRST[rank], CHANNELS_LAST[rank]
        layout = _decide(evidence, shape, both, tokens, seen)
        if rank > 1 and (spatial or not evidence.own):  # a Linear has channels beside any axes
            _check_axes(evidence, shape, layout)
    else:
        _check(evidence, shape, layout)
    if is_tokens(layout, spatial):
        return token_form(regularizer, evidence, shape, layout, told, sizes)
    prefix = _sequence_prefix(regularizer, shape, layout)
    if not prefix and not is_last(layout):
        return _FIRST_FORMS[rank]
    return Form(layout, None, prefix)


def _wrong_rank(rank: int, layout: str, spatial: int | None, shape: Shape) -> str:
    axes = ", ".join(CHANNELS_FIRST[rank] if layout == "auto" else layout)
    also = " or tokens (N, L, C)" if layout == "auto" and spatial in (2, 3) else ""
    return f"needs a {rank + 2}-D tensor ({axes}){also}, got shape {tuple(shape)}"


def _decide(
    evidence: Evidence, shape: Shape, both: tuple[str, str], tokens: bool, seen: str
) -> str:
    """The layout of a tensor, where that can be known."""
    found = ask(evidence, shape, both, tokens, seen)
    if not found:
        raise ValueError(
            f"can't tell the channels of shape {tuple(shape)}: {both[0]} or {both[1]} "
            f"({_known(evidence)}); say which with layout="
        )
    return found


def _check_samples(evidence: Evidence, shape: Shape, index: int | str | None) -> None:
    """Raise ValueError where axis 0 may be another one than that of the samples."""
    takes_first = evidence.own and evidence.first is not None  # a convolution, say
    if evidence.sequence_first and len(shape) == 3 and not takes_first:
        raise ValueError(
            f"shape {tuple(shape)} can't be read: the model has a {evidence.sequence_first} with "
            "batch_first=False, whose samples are axis 1; say layout= if they are axis 0"
        )
    if evidence.batched > len(shape):
        raise ValueError(
            f"shape {tuple(shape)} has no axis of samples: a batch of this layer has "
            f"{evidence.batched} axes; add one of length 1, or say layout= if axis 0 is it"
        )
    if evidence.recurrent and index in (1, -1) and len(shape) == 3:
        raise ValueError(
            f"shape {tuple(shape)} can't be read: the state of a recurrent layer has its layers "
            "on axis 0, and the samples on axis 1"
        )


def _check_axes(evidence: Evidence, shape: Shape, layout: str) -> None:
    """Raise ValueError for axes beside samples and channels that are no map."""
    axes = tuple(shape[1:-1] if is_last(layout) else shape[2:])
    beside = tuple(shape[1:3]) if is_last(layout) else (shape[1],)
    maps = [size for size in stage_sizes(evidence) if len(size) == len(axes)]
    why = ""
    if evidence.own and not is_last(layout):
        return
    if evidence.heads is not None and has(beside, evidence.heads):
        why = f"an axis is as long as the attention around it has heads ({evidence.heads})"
    elif evidence.partition and is_last(layout):
        why = f"it lies in a {evidence.partition}, which cuts maps into windows"
    elif is_last(layout) and maps and axes not in maps:  # windows, or blocks of a map
        why = f"the model's maps are {', '.join(map(shown, maps))}"
    if why:
        raise ValueError(
            f"shape {tuple(shape)} seems to be {layout}, but {shown(axes)} may be no map: "
            f"{why}; say layout={layout!r} if it is one"
        )


def _check(evidence: Evidence, shape: Shape, layout: str) -> None:
    """Raise ValueError where the type of the layer itself rules out the layout that was asked for.

    Nothing else can: the user may know more of the code around it.
    """
    own = CHANNELS_FIRST[len(shape) - 2]
    if evidence.own and evidence.first is not None and layout != own:
        raise ValueError(
            f"layout={layout!r} contradicts the layer: a {evidence.own} gives {own}, "
            f"here of shape {tuple(shape)}"
        )


def _sequence_prefix(regularizer: Regularizer, shape: Shape, layout: str) -> int:
    prefix = regularizer.prefix_tokens or 0
    if regularizer.grid is not None or (prefix and len(shape) != 3):
        raise ValueError(
            f"grid= and prefix_tokens= are for tokens, but the layer gives {layout}, "
            f"shape {tuple(shape)}"
        )
    if prefix and prefix >= shape[1 if is_last(layout) else 2]:
        raise ValueError(f"prefix_tokens={prefix} leaves none of shape {tuple(shape)}")
    return prefix


def _known(evidence: Evidence) -> str:
    parts = []
    if evidence.first is not None:
        parts.append(f"channels-first layers have {_some(evidence.first) or 'no known width'}")
    if evidence.last is not None:
        parts.append(f"channels-last layers have {_some(evidence.last)}")
    return "; ".join(parts)


def _some(widths: tuple[int, ...]) -> str:
    different = sorted(set(widths))
    return ", ".join(map(str, different[:6])) + (", ..." if len(different) > 6 else "")
