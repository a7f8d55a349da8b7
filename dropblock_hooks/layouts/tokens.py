"""Tokens that form a map: its size, the tokens before it, and their order."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..functional.axes import Form, is_last
from ..regularizers.base import Regularizer
from ..tables import shown
from .grids import Grid
from .hints import Evidence
from .map_sizes import MapSizes

Shape = tuple[int, ...]


def token_form(
    regularizer: Regularizer,
    evidence: Evidence,
    shape: Shape,
    layout: str,
    told: Any,
    sizes: MapSizes | None = None,
) -> Form:
    """The map that tokens form."""
    spatial = len(regularizer.grid or ()) or regularizer.spatial or 0
    length = shape[1 if is_last(layout) else 2]
    given = regularizer.prefix_tokens
    prefixes = evidence.prefixes if given is None else (given,)
    known: list[tuple[Grid, int]] = []
    for grids in _candidates(evidence, shape, spatial, told, sizes):
        known = known or list(_matching(grids, length, prefixes))
    if regularizer.grid is not None:
        grid, prefix = regularizer.grid, length - math.prod(regularizer.grid)
        if not has(prefixes, prefix):
            raise ValueError(_no_grid(spatial, shape, length, prefixes, f"are not {shown(grid)}"))
        if known and (grid, prefix) not in known:
            raise ValueError(
                f"grid={grid} contradicts the model: the {length} tokens of shape {tuple(shape)} "
                f"are {_ways(known)} in front"
            )
    else:
        known = known or list(_matching(evidence.windows, length, prefixes))
        if len(known) != 1:
            raise ValueError(_no_grid(spatial, shape, length, prefixes, _why_open(evidence, known)))
        grid, prefix = known[0]
    if len(grid) != spatial:
        raise ValueError(f"grid {shown(grid)} has not the {spatial} axes that are needed")
    return Form(layout, grid, prefix, _order(evidence, grid))


def _candidates(
    evidence: Evidence, shape: Shape, spatial: int, told: Any, sizes: MapSizes | None
) -> Iterator[Iterable[Grid]]:
    """Grids that tokens may form: those of this call before those of the model."""
    yield _told_sizes(told, spatial)
    if sizes is not None:
        for met in sizes.met():
            yield [grid for n, grid in met if n == shape[0] and len(grid) == spatial]
        embedded = [grid for _, grid in sizes.embedded()]
        if embedded and not any(_is_part(g, e) for g in evidence.grids for e in embedded):
            return  # another image than that which the model is made for
    yield evidence.grids
    yield stage_sizes(evidence)


def _is_part(grid: Grid, embedded: Grid) -> bool:
    """Whether a map may be an embedded one, made smaller by one factor on all axes."""
    factor = embedded[0] // grid[0]
    return len(grid) == len(embedded) and embedded == tuple(factor * edge for edge in grid)


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


def stage_sizes(evidence: Evidence) -> Iterator[Grid]:
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
        f"the model reorders its tokens, from {shown(evidence.unrolled[0])} by the strides "
        f"{list(strides)}, and {shown(grid)} is no size on that way"
    )


def _told_sizes(told: Any, spatial: int) -> list[Grid]:
    """Sizes among what a layer took and gave: as many integers, together or one by one."""
    if not isinstance(told, tuple | list):
        return []
    integers = [value for value in told if _is_integer(value)]
    if len(integers) == spatial:
        return [tuple(integers)]
    return [size for value in told for size in _told_sizes(value, spatial)]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def _ways(known: list[tuple[Grid, int]]) -> str:
    return " or ".join(f"{shown(grid)} with {n}" for grid, n in known)


def _why_open(evidence: Evidence, known: list[tuple[Grid, int]]) -> str:
    if known:
        return f"can be {_ways(known)} in front"
    if evidence.loose:
        return (
            f"have no sure grid: the model is built for {shown(evidence.loose[0])}, but takes "
            "images of other sizes"
        )
    if evidence.grids:
        return f"are none of the model's grids ({', '.join(map(shown, evidence.grids))})"
    return "form no grid that the model tells"


def _no_grid(spatial: int, shape: Shape, length: int, prefixes: tuple[int, ...], why: str) -> str:
    axes = "(height, width)" if spatial == 2 else "(depth, height, width)"
    counts = " or ".join(map(str, prefixes))
    return (
        f"shape {tuple(shape)}: its {length} tokens (L), {counts} of them before the map, {why}; "
        f"say grid=, {axes}, and prefix_tokens="
    )


def has(widths: tuple[int, ...], n: int) -> bool:
    """Whether a width is among them; no hashing, which a traced size would not take."""
    return any(width == n for width in widths)
