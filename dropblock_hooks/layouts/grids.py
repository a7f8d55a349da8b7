"""The grids that a model's tokens form, the tokens before them, and their order."""

import math
import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ..selectors.wrappers import attribute_of

Grid = tuple[int, ...]

_CLASS_TOKEN = re.compile(r"(cls|class)_token")
_MORE_TOKENS = re.compile(r"(dist|distillation|reg|register)_tokens?")


def _pair(value: Any) -> Grid | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return (value, value)
    if isinstance(value, tuple | list) and len(value) in (2, 3):
        return tuple(value) if all(isinstance(edge, int) for edge in value) else None
    return None


def patch_grids(
    modules: list[nn.Module], prefixes: tuple[int, ...]
) -> tuple[tuple[Grid, ...], tuple[Grid, ...]]:
    """The grids of patch embeddings: those that are sure, and those of images of any size."""
    sure: dict[Grid, None] = {}
    loose: dict[Grid, None] = {}
    parameters = (p for m in modules for p in m._parameters.values())
    shapes = {tuple(p.shape) for p in parameters if p is not None and not is_lazy(p)}
    for module in modules:
        grid = _patch_grid(module)
        if grid is None:
            continue
        strict = getattr(module, "strict_img_size", None)
        if strict is None:  # then a table of positions says that there is only this size
            strict = any(_is_table(shape, grid, prefixes) for shape in shapes)
        (sure if strict else loose)[grid] = None
    return tuple(sure), tuple(grid for grid in loose if grid not in sure)


def _is_table(shape: tuple[int, ...], grid: Grid, prefixes: tuple[int, ...]) -> bool:
    """Whether a parameter has an entry for every place of a grid."""
    lengths = {math.prod(grid) + prefix for prefix in prefixes}
    folded = any(shape[i : i + len(grid)] == grid for i in range(1, len(shape)))
    return len(shape) > 1 and (folded or not lengths.isdisjoint(shape))


def windows(modules: list[nn.Module]) -> tuple[Grid, ...]:
    """The sizes of maps, or of windows of maps, that attentions are made for."""
    stated = (
        attribute_of(module, name)
        for module in modules
        for name in ("resolution", "input_resolution")
    )
    pairs = (_pair(value) for value in stated if isinstance(value, tuple | list))
    return tuple(dict.fromkeys(pair for pair in pairs if pair is not None))


def _patch_grid(module: nn.Module) -> Grid | None:
    """The grid of a patch embedding, stated or the image's size by the patch's."""
    patch = _pair(attribute_of(module, "patch_size"))
    if patch is None:
        return None
    stated = getattr(module, "grid_size", None)
    if isinstance(stated, tuple | list):
        return _pair(stated)
    for name in ("img_size", "image_size"):
        image = _pair(getattr(module, name, None))
        if image is not None and len(image) == len(patch):
            grid = tuple(edge // step for edge, step in zip(image, patch, strict=True))
            patches = getattr(module, "num_patches", None)
            return grid if patches is None or patches == math.prod(grid) else None
    return None


def prefixes(modules: list[nn.Module]) -> tuple[int, ...]:
    """How many class and register tokens the model, or a part of it, has; and none."""
    found = {0}
    for module in modules:
        stated = attribute_of(module, "num_prefix_tokens")
        if isinstance(stated, int):
            found.add(stated)
            continue
        tokens = {name: p.shape[-2] if p.ndim > 1 else 1 for name, p in _tokens(module)}
        if tokens:
            classes = [n for name, n in tokens.items() if _CLASS_TOKEN.match(name)]
            found.add(sum(tokens.values()) - sum(classes[1:]))  # one for each branch
    return tuple(sorted(found))


def _tokens(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module._parameters.items():
        named = _CLASS_TOKEN.match(name) or _MORE_TOKENS.match(name)
        if named and parameter is not None:
            yield name, parameter


def unrolled(modules: list[nn.Module]) -> tuple[Grid, tuple[Grid, ...]] | None:
    """Size and strides of a layer that puts tokens of one mask unit next to each other (Hiera)."""
    for module in modules:
        if type(module).__name__ == "Unroll":
            size, strides = getattr(module, "size", None), getattr(module, "schedule", None)
            if size is not None and strides is not None:
                return tuple(size), tuple(tuple(stride) for stride in strides)
    return None
