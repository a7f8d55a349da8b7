"""Hooks that note the sizes of the maps in a forward, before the maps become tokens.

``attach`` puts these hooks on the model, if a regularizer needs maps. A `Reader` asks for the sizes
when the layer gets tokens.
"""

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .._torch import NO_TASK, children_of, graph_task

Grid = tuple[int, ...]
_MAP = re.compile(r"(Conv|Pool)\w*[23]d")
_RATIOS = (1, 2, 4, 8)  # maps of later stages are smaller than the embedded image by these factors
_UNITS = (1, (1, 1), (1, 1, 1))  # strides of layers that keep the size of a map


class _Map(NamedTuple):
    """A map that a layer has made in this forward.

    Attributes:
        samples: the number of samples.
        size: the lengths of the spatial axes.
        embeds: whether a patch embedding made the map.
    """

    samples: int
    size: Grid
    embeds: bool


class Grids:
    """The sizes of maps in a forward of a model. All sites of an attachment share this object."""

    def __init__(self) -> None:
        self._inside = False  # whether a forward of the whole model is under way
        self._maps: tuple[_Map, ...] = ()

    def of(self, spatial: int, samples: int | None = None) -> tuple[list[Grid], list[Grid]]:
        """Return the sizes of the noted maps, and of the maps that later stages may have.

        Only maps with this number of spatial axes count, and with this number of samples.
        """
        sizes: list[Grid] = []
        stages: list[Grid] = []
        for made in self._maps:
            if len(made.size) != spatial or samples not in (None, made.samples):
                continue

            sizes.append(made.size)
            if made.embeds:
                stages += _stages_behind(made.size)
        return sizes, stages

    def put_on(self, model: nn.Module, only_maps: bool = False) -> None:
        """Put hooks on patch embeddings, and on other layers that make maps smaller.

        If the layers of all sites show channels first (`only_maps`), hooks are needed only for a
        model with a patch embedding, because it may return tokens although the convolution inside
        it shows channels first.
        """
        modules = list(model.modules())
        if any(type(module).__name__ == "Unroll" for module in modules):
            return  # Hiera moves its tokens out of the order of rows, so they form no map

        with_patches = {m for m in modules if m is not model and hasattr(m, "patch_size")}
        if only_maps and not with_patches:
            return

        embeds, shrinks = _layers_of_maps(modules, with_patches)
        for module in embeds:
            module.register_forward_hook(self._keep_map)
        for module in shrinks:
            module.register_forward_hook(self._keep_other_map)
        if embeds or shrinks:
            model.register_forward_pre_hook(self._begin)
            model.register_forward_hook(self._end)

    def _begin(self, module: nn.Module, args: Any) -> None:
        """Begin a forward of the whole model."""
        if not _recomputes():
            self._maps = ()
            self._inside = True

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a forward of the whole model, and forget its maps."""
        if not _recomputes():
            self._maps = ()
            self._inside = False

    def _keep_other_map(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keep the size of a map that is not the output of a patch embedding."""
        self._keep_map(module, args, output, embeds=False)

    def _keep_map(self, module: nn.Module, args: Any, output: Any, embeds: bool = True) -> None:
        """Keep the size of a map, or the size that a patch embedding returns with its tokens."""
        values = list(output) if isinstance(output, tuple | list) else [output]
        tensors = [value for value in values if isinstance(value, Tensor)]
        sizes = [tuple(value) for value in values if _is_size(value)]
        if isinstance(output, Tensor) and not children_of(module):
            sizes = [tuple(output.shape[2:])]

        if tensors and sizes and not _recomputes():
            samples = tensors[0].shape[0]
            made = _Map(samples, sizes[0], embeds)
            # if only a part of the model is called, only its last map counts
            self._maps = (*self._maps, made) if self._inside else (made,)


def _stages_behind(size: Grid) -> list[Grid]:
    """Return the possible sizes of maps in the stages after an embedded image."""
    stages: list[Grid] = []
    for ratio in _RATIOS:
        if all(edge % ratio == 0 for edge in size):
            stages.append(tuple(edge // ratio for edge in size))
    return stages


def _layers_of_maps(
    modules: list[nn.Module], with_patches: set[nn.Module]
) -> tuple[set[nn.Module], set[nn.Module]]:
    """Return the patch embeddings with their convolutions, and other layers that shrink maps."""
    embeds: set[nn.Module] = set()
    parts: set[nn.Module] = set()
    for module in with_patches:
        inside = set(module.modules())
        # if a module with a patch size contains another such module, only the inner one counts
        if (with_patches & inside) == {module}:
            embeds.add(module)
            parts |= inside

    shrinks: set[nn.Module] = set()
    for module in modules:
        makes_map = not children_of(module) and _MAP.search(type(module).__name__)
        if makes_map and module in parts:
            embeds.add(module)
        elif makes_map and getattr(module, "stride", 1) not in _UNITS:
            shrinks.add(module)
    return embeds, shrinks


def _recomputes() -> bool:
    """Return whether a backward recomputes the forward, as activation checkpointing does."""
    return not is_compiling() and graph_task() != NO_TASK


def _is_size(value: Any) -> bool:
    """Return whether a value is the size of a map: two or three integers."""
    edges = value if isinstance(value, tuple | list) else ()
    return len(edges) in (2, 3) and all(isinstance(edge, int | torch.SymInt) for edge in edges)
