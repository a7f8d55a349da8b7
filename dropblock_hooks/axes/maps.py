"""Which map the tokens of a tensor form: that of this image, or the one that the model states."""

import math
from collections.abc import Iterable, Sequence

from ..tables import shown
from .grids import Grids
from .options import AxisOptions
from .tokens import Grid, TokenFacts
from .view import LAST, View, side_of


def with_grid(
    view: View,
    options: AxisOptions,
    spatial: int,
    facts: TokenFacts,
    shape: Sequence[int],
    grids: Grids,
) -> View:
    """The view of tokens, with the grid that they form and the prefix before them.

    Args:
        view: the layout of the tokens.
        options: what the user says.
        spatial: number of axes of the map.
        facts: what the model states about its tokens.
        shape: of the tensor.
        grids: the sizes of maps in this forward.

    Raises:
        ValueError: where no grid is known, or several are, or they contradict the options.
    """
    length = shape[1 if side_of(view.layout) == LAST else 2]
    prefixes = facts.prefixes if options.prefix_tokens is None else (options.prefix_tokens,)
    if facts.reordered and options.grid is None:
        raise ValueError(
            f"shape {tuple(shape)}: a {facts.reordered} of the model moves tokens out of the order "
            "of rows, so they form no map; say grid= at layers where they are in order"
        )
    met = grids.of(spatial, shape[0])
    known = _matching(met, length, prefixes)
    if not known:
        stages = facts.stages_of(grids.of(spatial, shape[0], embedded=True))
        known = _matching(stages, length, prefixes)
    if options.grid is None:
        if len(known) != 1:
            raise ValueError(_no_grid(spatial, shape, length, prefixes, _why(met, known)))
        return View(view.layout, *known[0])
    grid, prefix = options.grid, length - math.prod(options.grid)
    if not any(prefix == number for number in prefixes):
        raise ValueError(_no_grid(spatial, shape, length, prefixes, f"are not {shown(grid)}"))
    if known and (grid, prefix) not in known:
        raise ValueError(
            f"grid={grid} contradicts the model: the {length} tokens of shape {tuple(shape)} "
            f"are {_ways(known)} in front"
        )
    return View(view.layout, grid, prefix)


def _matching(
    grids: Iterable[Grid], length: int, prefixes: tuple[int, ...]
) -> list[tuple[Grid, int]]:
    """The different grids, and prefixes, that make this number of tokens."""
    found: list[tuple[Grid, int]] = []
    for grid in grids:
        for prefix in prefixes:
            if math.prod(grid) + prefix == length and (grid, prefix) not in found:
                found.append((grid, prefix))
    return found


def _ways(known: list[tuple[Grid, int]]) -> str:
    return " or ".join(f"{shown(grid)} with {n}" for grid, n in known)


def _why(met: list[Grid], known: list[tuple[Grid, int]]) -> str:
    if known:
        return f"can be {_ways(known)} in front"
    sizes = ", ".join(dict.fromkeys(map(shown, met)))
    return f"are none of the maps of this forward ({sizes})" if sizes else "form no known grid"


def _no_grid(
    spatial: int, shape: Sequence[int], length: int, prefixes: tuple[int, ...], why: str
) -> str:
    axes = "(height, width)" if spatial == 2 else "(depth, height, width)"
    counts = " or ".join(map(str, prefixes))
    return (
        f"shape {tuple(shape)}: its {length} tokens (L), {counts} of them before the map, {why}; "
        f"say grid=, {axes}, and prefix_tokens="
    )
