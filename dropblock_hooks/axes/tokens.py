"""Which map tokens form: that of this image, after the class and register tokens before it."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from ..tables import shown
from .grids import Grid, Grids
from .options import AxisOptions
from .view import LAST, View, side_of

_CLASS_TOKEN = re.compile(r"(cls|class)_token")
_MORE_TOKENS = re.compile(r"(dist|distillation|reg|register)_tokens?")


@dataclass(frozen=True)
class TokenFacts:
    """What a model tells about its tokens.

    Attributes:
        ratios: by what its maps are smaller than the embedded image: 1, and those of later stages.
        prefixes: how many tokens may come before those of the map, 0 among them.
        reordered: class name of a layer that moves tokens out of the order of rows; or "".
    """

    ratios: tuple[int, ...] = (1,)
    prefixes: tuple[int, ...] = (0,)
    reordered: str = ""

    def maps(self, embedded: Iterable[Grid]) -> list[Grid]:
        """The maps of all stages, where the patch embedding made maps of these sizes."""
        found = [
            tuple(edge // ratio for edge in grid)
            for grid in embedded
            for ratio in self.ratios
            if all(edge % ratio == 0 for edge in grid)
        ]
        return [*dict.fromkeys(found)]


def token_facts(modules: list[nn.Module], stage_ratios: tuple[int, ...]) -> TokenFacts:
    """The facts of a model with these modules; `stage_ratios` as `stages.stage_ratios` returns."""
    edges = [r[0] for m in modules if isinstance(r := getattr(m, "input_resolution", None), tuple)]
    stated = {max(edges) // edge for edge in edges if edge}  # Swin's layers say what they are for
    return TokenFacts(
        ratios=tuple(sorted({1, *stage_ratios, *stated})),
        prefixes=tuple(sorted({0, *map(_prefix, modules)})),
        reordered=next((n for m in modules if (n := type(m).__name__) == "Unroll"), ""),
    )


def _prefix(module: nn.Module) -> int:
    """How many class and register tokens a module has."""
    stated = getattr(module, "num_prefix_tokens", None)
    if isinstance(stated, int):
        return stated
    classes, more = 0, 0
    for name, parameter in module._parameters.items():
        if parameter is not None:
            count = parameter.shape[-2] if parameter.ndim > 1 else 1
            if _CLASS_TOKEN.match(name):
                classes = classes or count  # there may be one for each branch
            elif _MORE_TOKENS.match(name):
                more += count
    return classes + more


def with_grid(
    view: View,
    options: AxisOptions,
    spatial: int,
    facts: TokenFacts,
    shape: Sequence[int],
    grids: Grids,
) -> View:
    """The view of tokens, with the grid that they form and the prefix before them.

    Raises:
        ValueError: if no grid is known, or several are, or they contradict the options.
    """
    if facts.reordered and options.grid is None:
        raise ValueError(
            f"shape {tuple(shape)}: a {facts.reordered} of the model moves tokens out of the order "
            "of rows, so they form no map; say grid= at layers where they are in order"
        )
    length = shape[1 if side_of(view.layout) == LAST else 2]
    prefixes = facts.prefixes if options.prefix_tokens is None else (options.prefix_tokens,)
    met = grids.of(spatial, shape[0])
    known = _fitting(met, length, prefixes)
    if not known:
        stages = facts.maps(grids.of(spatial, shape[0], embedded=True))
        known = _fitting(stages, length, prefixes)
    given = known
    if options.grid is not None:
        given = _fitting([options.grid], length, prefixes)
        given = [each for each in given if not known or each in known]
    if len(given) == 1:
        return View(view.layout, *given[0])
    ways = " or ".join(f"{shown(grid)} with {n} in front" for grid, n in known)
    if options.grid is not None:
        why = f"are not {shown(options.grid)}{' but ' * bool(ways)}{ways}"
    elif known:
        why = f"can be {ways}"
    else:
        sizes = ", ".join(dict.fromkeys(map(shown, met)))
        why = f"are none of the maps of this forward ({sizes})" if met else "form no known grid"
    axes = "(height, width)" if spatial == 2 else "(depth, height, width)"
    raise ValueError(
        f"shape {tuple(shape)}: its {length} tokens (L), {' or '.join(map(str, prefixes))} of them "
        f"before the map, {why}; say grid=, {axes}, and prefix_tokens="
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
