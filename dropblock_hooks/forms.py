"""The form of a tensor: decided from the options, what the model tells, and the tensor's shape.

Pure comparisons of integers, so that it can be run at every call and traced by a compiler.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .evidence import Evidence, Grid
from .layouts import CHANNELS_FIRST, CHANNELS_LAST, Form, channel_axis, is_last, is_tokens
from .regularizer import Regularizer

Shape = tuple[int, ...]

_FIRST_FORMS = {spatial: Form(layout) for spatial, layout in CHANNELS_FIRST.items()}
_NAMELESS = Form("")


def form_of(regularizer: Regularizer, evidence: Evidence, shape: Shape, told: Any = ()) -> Form:
    """How the axes of a tensor of this shape are to be read.

    Args:
        regularizer: its options, and the number of spatial axes that it needs.
        evidence: what the model tells about the layer.
        shape: of the tensor.
        told: what the layer took and gave in this call; sizes of maps among it are used.

    Raises:
        ValueError: where it can't be known, or what is known contradicts the options.
    """
    spatial, layout = regularizer.spatial, regularizer.layout
    if spatial is None:
        if not regularizer.channelwise or (layout == "auto" and not 3 <= len(shape) <= 5):
            return _NAMELESS if layout == "auto" else Form(layout)
        rank = len(shape) - 2 if layout == "auto" else len(layout) - 2
    else:
        tokens = spatial > 1 and (len(layout) == 3 or (layout == "auto" and len(shape) == 3))
        rank = 1 if tokens else spatial
    if len(shape) != rank + 2:
        raise ValueError(_wrong_rank(rank, layout, spatial, shape))
    if layout == "auto":
        tokens = spatial is not None and rank < spatial
        layout = _decide(evidence, shape, CHANNELS_FIRST[rank], CHANNELS_LAST[rank], tokens)
    else:
        _check(evidence, shape, layout)
    if is_tokens(layout, spatial):
        return _token_form(regularizer, evidence, shape, layout, told)
    prefix = _sequence_prefix(regularizer, shape, layout)
    if not prefix and not is_last(layout):
        return _FIRST_FORMS[rank]
    return Form(layout, None, prefix)


def _wrong_rank(rank: int, layout: str, spatial: int | None, shape: Shape) -> str:
    axes = ", ".join(CHANNELS_FIRST[rank] if layout == "auto" else layout)
    also = " or tokens (N, L, C)" if layout == "auto" and spatial in (2, 3) else ""
    return f"needs a {rank + 2}-D tensor ({axes}){also}, got shape {tuple(shape)}"


def _decide(evidence: Evidence, shape: Shape, first: str, last: str, tokens: bool) -> str:
    """The layout that the evidence speaks for."""
    if evidence.sequence_first and len(shape) == 3:
        raise ValueError(
            f"shape {tuple(shape)} can't be read: it belongs to a {evidence.sequence_first} with "
            "batch_first=False, whose samples are axis 1; say layout= if they are axis 0"
        )
    found = _by_type(evidence, shape, first, last, tokens) or _by_width(
        evidence, shape, first, last
    )
    if not found:
        raise ValueError(
            f"can't tell the channels of shape {tuple(shape)}: {first} or {last} "
            f"({_known(evidence)}); say which with layout="
        )
    if len(shape) > 3:
        _check_axes(evidence, shape, found)
    return found


def _by_type(evidence: Evidence, shape: Shape, first: str, last: str, tokens: bool) -> str:
    """The layout where all that is in the layer is of one kind; "" where that is open."""
    front, back = shape[1], shape[-1]
    if evidence.stage is not None and (front == evidence.stage) != (back == evidence.stage):
        return first if front == evidence.stage else last
    if evidence.output_fmt in (first, last) and (front == back or evidence.stage in (None, back)):
        return evidence.output_fmt
    widths, kind = (evidence.first, first) if evidence.last is None else (evidence.last, last)
    if evidence.first is not None and evidence.last is not None:
        return ""
    if widths is None:  # nothing in the model speaks of another order than torch's
        return first
    own, other = (front, back) if kind == first else (back, front)
    if not widths or _has(widths, own):
        return kind if evidence.own or kind == first or not _has(widths, other) else ""
    if evidence.borrowed or (evidence.own and _has(widths, other)):
        return ""
    if kind == last:
        return ""
    # else maps were concatenated, unless the layer itself turns them
    turned = (tokens or evidence.norms_last) and _has(widths, other)
    return "" if turned and not tokens else last if turned else first


def _by_width(evidence: Evidence, shape: Shape, first: str, last: str) -> str:
    """The layout whose channel axis has a width that the layer has; "" where that is open."""
    front, back = shape[1], shape[-1]
    of_first, of_last = evidence.first or (), evidence.last or ()
    fits_front, fits_back = _has(of_first, front), _has(of_last, back)
    if not (fits_front or fits_back):
        fits_front, fits_back = _has(of_last, front), _has(of_first, back)
    elif evidence.first is None:
        fits_front = _has(of_last, front)
    if fits_front and fits_back:
        sizes = list(_sizes(evidence))
        fits_front, fits_back = tuple(shape[2:]) in sizes, tuple(shape[1:-1]) in sizes
    if fits_front == fits_back:
        return ""
    return first if fits_front else last


def _check_axes(evidence: Evidence, shape: Shape, layout: str) -> None:
    """Raise ValueError for axes beside samples and channels that are no map."""
    axes = tuple(shape[1:-1] if is_last(layout) else shape[2:])
    why = ""
    if not evidence.own or is_last(layout):
        beside = tuple(shape[1:3]) if is_last(layout) else (shape[1],)
        if evidence.heads is not None and _has(beside, evidence.heads):
            why = f"an axis is as long as the attention around it has heads ({evidence.heads})"
        elif evidence.partition and is_last(layout):
            why = f"it lies in a {evidence.partition}, which cuts maps into windows"
        elif is_last(layout) and evidence.grids and len(evidence.grids[0]) == len(axes):
            if axes not in list(_sizes(evidence)):
                grids = ", ".join(map(_shown, evidence.grids))
                why = f"the model's maps are {grids}"
    if why:
        raise ValueError(
            f"shape {tuple(shape)} seems to be {layout}, but {_shown(axes)} may be no map: "
            f"{why}; say layout={layout!r} if it is one"
        )


def _check(evidence: Evidence, shape: Shape, layout: str) -> None:
    """Raise ValueError where the layer contradicts the layout that was asked for."""
    axis = channel_axis(layout)
    n, other = shape[axis], shape[1 if axis == -1 else -1]
    if evidence.stage is not None and (n == evidence.stage) != (other == evidence.stage):
        if other == evidence.stage:
            raise ValueError(_contradiction(layout, shape, n, f"the stage has {evidence.stage}"))
        return
    own = CHANNELS_LAST if evidence.first is None else CHANNELS_FIRST
    given = evidence.last if evidence.first is None else evidence.first
    if evidence.own and own[len(shape) - 2] != layout and (not given or _has(given, other)):
        raise ValueError(
            f"layout={layout!r} contradicts the layer: a {evidence.own} gives "
            f"{own[len(shape) - 2]}, here of shape {tuple(shape)}"
        )
    widths = (*(evidence.first or ()), *(evidence.last or ()))
    if _has(widths, other) and not _has(widths, n):
        raise ValueError(_contradiction(layout, shape, n, f"the layer has {_some(widths)}"))


def _contradiction(layout: str, shape: Shape, n: int, known: str) -> str:
    return (
        f"layout={layout!r} contradicts the shape {tuple(shape)}: that would be {n} channels, and "
        f"{known}"
    )


def _token_form(
    regularizer: Regularizer, evidence: Evidence, shape: Shape, layout: str, told: Any
) -> Form:
    """The map that tokens form."""
    spatial = len(regularizer.grid or ()) or regularizer.spatial or 0
    length = shape[2 if channel_axis(layout) == 1 else 1]
    given = regularizer.prefix_tokens
    prefixes = evidence.prefixes if given is None else (given,)
    if regularizer.grid is not None:
        grid, prefix = regularizer.grid, length - math.prod(regularizer.grid)
        if not _has(prefixes, prefix):
            raise ValueError(_no_grid(spatial, shape, length, prefixes, f"are not {_shown(grid)}"))
    else:
        known: list[tuple[Grid, int]] = []
        for grids in (
            _told_sizes(told, spatial),
            (*evidence.grids, *evidence.windows),
            _sizes(evidence),
        ):
            known = known or list(_matching(grids, length, prefixes))
        if len(known) != 1:
            raise ValueError(_no_grid(spatial, shape, length, prefixes, _why_open(evidence, known)))
        grid, prefix = known[0]
    if len(grid) != spatial:
        raise ValueError(f"grid {_shown(grid)} has not the {spatial} axes that are needed")
    return Form(layout, grid, prefix, _order(evidence, grid))


def _matching(
    grids: Iterable[Grid], length: int, prefixes: tuple[int, ...]
) -> Iterator[tuple[Grid, int]]:
    """The different grids, and prefixes, that make this number of tokens."""
    seen: list[tuple[Grid, int]] = []
    for grid in grids:
        for prefix in prefixes:
            if math.prod(grid) + prefix == length and (grid, prefix) not in seen:
                seen.append((grid, prefix))
                yield grid, prefix


def _sizes(evidence: Evidence) -> Iterator[Grid]:
    """The sizes of the model's maps: in the first stage, and in later ones."""
    grids = (*evidence.grids, *([evidence.unrolled[0]] if evidence.unrolled else []))
    for grid in grids:
        yield grid
        for ratio in evidence.ratios:
            if all(edge % ratio == 0 for edge in grid):
                yield tuple(edge // ratio for edge in grid)


def _order(evidence: Evidence, grid: Grid) -> tuple[Grid, ...]:
    """The strides of the reordering that is left on a map of this size."""
    if evidence.unrolled is None:
        return ()
    size, strides = evidence.unrolled
    for done in range(len(strides) + 1):
        if size == grid:
            return strides[done:]
        if done < len(strides):
            size = tuple(a // b for a, b in zip(size, strides[done], strict=True))
    raise ValueError(
        f"the model reorders its tokens, from {_shown(evidence.unrolled[0])} by the strides "
        f"{list(strides)}, and {_shown(grid)} is no size on that way"
    )


def _told_sizes(told: Any, spatial: int) -> list[Grid]:
    """Sizes among what a layer took and gave: as many integers, together or one by one."""
    if isinstance(told, dict):
        told = tuple(told.values())
    if not isinstance(told, tuple | list):
        return []
    integers = [value for value in told if _is_integer(value)]
    if len(integers) == spatial:
        return [tuple(integers)]
    return [size for value in told for size in _told_sizes(value, spatial)]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def _why_open(evidence: Evidence, known: list[tuple[Grid, int]]) -> str:
    if known:
        return "can be " + " or ".join(f"{_shown(grid)} after {n}" for grid, n in known)
    if evidence.loose:
        return (
            f"have no sure grid: the model is built for {_shown(evidence.loose[0])}, but takes "
            "images of other sizes"
        )
    if evidence.grids:
        return f"are none of the model's grids ({', '.join(map(_shown, evidence.grids))})"
    return "form no grid that the model tells"


def _no_grid(spatial: int, shape: Shape, length: int, prefixes: tuple[int, ...], why: str) -> str:
    axes = "(height, width)" if spatial == 2 else "(depth, height, width)"
    counts = " or ".join(map(str, prefixes))
    return (
        f"shape {tuple(shape)}: its {length} tokens (L), {counts} of them before the map, {why}; "
        f"say grid=, {axes}, and prefix_tokens="
    )


def _sequence_prefix(regularizer: Regularizer, shape: Shape, layout: str) -> int:
    prefix = regularizer.prefix_tokens or 0
    if regularizer.grid is not None or (prefix and len(shape) != 3):
        raise ValueError(
            f"grid= and prefix_tokens= are for tokens, but the layer gives {layout}, "
            f"shape {tuple(shape)}"
        )
    if prefix and prefix >= shape[2 if channel_axis(layout) == 1 else 1]:
        raise ValueError(f"prefix_tokens={prefix} leaves none of shape {tuple(shape)}")
    return prefix


def _has(widths: tuple[int, ...], n: int) -> bool:
    return any(width == n for width in widths)


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


def _shown(grid: Iterable[int]) -> str:
    return "x".join(map(str, grid))
