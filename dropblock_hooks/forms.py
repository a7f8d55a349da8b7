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
        layout = _decide(evidence, shape, CHANNELS_FIRST[rank], CHANNELS_LAST[rank])
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


def _decide(evidence: Evidence, shape: Shape, first: str, last: str) -> str:
    """The layout that the evidence speaks for."""
    if evidence.own:
        return first if evidence.first is not None else last
    if evidence.sequence_first and len(shape) == 3:
        raise ValueError(
            f"shape {tuple(shape)} can't be read: it belongs to a {evidence.sequence_first} with "
            "batch_first=False, whose samples are axis 1; say layout= if they are axis 0"
        )
    found = _by_width(evidence, shape, first, last)
    if found == last and len(shape) > 3:
        _check_axes(evidence, shape, last)
    if found:
        return found
    raise ValueError(
        f"can't tell the channels of shape {tuple(shape)}: {first} or {last} "
        f"({_known(evidence)}); say which with layout="
    )


def _by_width(evidence: Evidence, shape: Shape, first: str, last: str) -> str:
    """The layout whose channel axis has a width that the layer has; "" where that is open."""
    front, back = shape[1], shape[-1]
    if evidence.stage is not None and (front == evidence.stage) != (back == evidence.stage):
        return first if front == evidence.stage else last
    if evidence.output_fmt in (first, last) and (front == back or evidence.stage in (front, back)):
        return evidence.output_fmt
    if evidence.last is None:
        if evidence.first is None:  # nothing in the model speaks of another order than torch's
            return first
        fits_front, fits_back = _has(evidence.first, front), False
        if not fits_front:
            fits_back = _has(evidence.first, back)
        return last if fits_back else first  # neither: concatenated maps
    if evidence.first is None:
        fits_back = _has(evidence.last, back)
        return last if fits_back else first if _has(evidence.last, front) else ""
    fits_front, fits_back = _has(evidence.first, front), _has(evidence.last, back)
    if not (fits_front or fits_back):
        fits_front, fits_back = _has(evidence.last, front), _has(evidence.first, back)
    if fits_front == fits_back:
        return ""
    return first if fits_front else last


def _check_axes(evidence: Evidence, shape: Shape, last: str) -> None:
    """Raise ValueError for axes between samples and channels that are no map."""
    axes = tuple(shape[1:-1])
    why = ""
    if evidence.heads is not None and axes[0] == evidence.heads and axes[0] != axes[1]:
        why = f"axis 1 is as long as its attention has heads ({evidence.heads})"
    elif evidence.partition:
        why = f"it lies in a {evidence.partition}, which cuts maps into windows"
    elif evidence.grids and len(evidence.grids[0]) == len(axes):
        sizes = set(_sizes(evidence))
        if axes not in sizes:
            grids = ", ".join(map(_shown, evidence.grids))
            why = f"the model's maps are {grids}"
    if why:
        raise ValueError(
            f"shape {tuple(shape)} ends with the channels, but {_shown(axes)} may be no map: "
            f"{why}; say layout={last!r} if it is one"
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
            raise ValueError(_no_grid(shape, length, prefixes, f"is not {_shown(grid)}"))
    else:
        known = list(_matching(_told_sizes(told, spatial), length, prefixes))
        known = known or list(_matching(evidence.grids, length, prefixes))
        known = known or list(_matching(_sizes(evidence), length, prefixes))
        if len(known) != 1:
            raise ValueError(_no_grid(shape, length, prefixes, _why_open(evidence, known)))
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
        return "could be " + " or ".join(f"{_shown(grid)} after {n}" for grid, n in known)
    if evidence.loose:
        return (
            f"has no sure grid: the model is built for {_shown(evidence.loose[0])}, but takes "
            "images of other sizes"
        )
    if evidence.grids:
        return f"is none of the model's grids ({', '.join(map(_shown, evidence.grids))})"
    return "has no grid that the model tells"


def _no_grid(shape: Shape, length: int, prefixes: tuple[int, ...], why: str) -> str:
    counts = " or ".join(map(str, prefixes))
    return (
        f"shape {tuple(shape)}: L = {length} tokens, of which {counts} come before the map, {why}; "
        "say grid=(height, width) and prefix_tokens="
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
