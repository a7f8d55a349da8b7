"""What a model tells about its tokens: how many come before those of the map, and later stages."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

Grid = tuple[int, ...]

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

    def stages_of(self, embedded: list[Grid]) -> list[Grid]:
        """The sizes of all maps of images of which the patch embedding made maps of these sizes."""
        found: dict[Grid, None] = {}
        for grid in embedded:
            for ratio in self.ratios:
                if all(edge % ratio == 0 for edge in grid):
                    found[tuple(edge // ratio for edge in grid)] = None
        return list(found)


def token_facts(modules: list[nn.Module], stage_ratios: tuple[int, ...]) -> TokenFacts:
    """The facts of a model.

    Args:
        modules: all of its modules.
        stage_ratios: by what the maps of its feature stages are smaller than those of the first.
    """
    edges = [r[0] for m in modules if isinstance(r := getattr(m, "input_resolution", None), tuple)]
    stated = {max(edges) // edge for edge in edges if edge}  # Swin's layers say what they are for
    return TokenFacts(
        ratios=tuple(sorted({1, *stage_ratios, *stated})),
        prefixes=_prefixes(modules),
        reordered=next((n for m in modules if (n := type(m).__name__) == "Unroll"), ""),
    )


def _prefixes(modules: list[nn.Module]) -> tuple[int, ...]:
    """How many class and register tokens the model, or a part of it, has; and 0."""
    found = {0}
    for module in modules:
        stated = getattr(module, "num_prefix_tokens", None)
        if isinstance(stated, int):
            found.add(stated)
            continue
        tokens = {name: p.shape[-2] if p.ndim > 1 else 1 for name, p in _named_tokens(module)}
        if tokens:
            classes = [n for name, n in tokens.items() if _CLASS_TOKEN.match(name)]
            found.add(sum(tokens.values()) - sum(classes[1:]))  # one for each branch
    return tuple(sorted(found))


def _named_tokens(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module._parameters.items():
        named = _CLASS_TOKEN.match(name) or _MORE_TOKENS.match(name)
        if named and parameter is not None:
            yield name, parameter
