"""Forward hooks that keep the sizes of the maps in a forward, from which tokens are made."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .._torch import children_of
from ..checkpointing import NO_TASK, graph_task

Grid = tuple[int, ...]
# the number of samples of a map, its size, and whether a patch embedding made it
_Map = tuple[int, Grid, bool]

_MAP = re.compile(r"(Conv|Pool)\w*[23]d")
_RATIOS = (1, 2, 4, 8)  # by which the maps of later stages are smaller than the embedded image
_UNITS = (1, (1, 1), (1, 1, 1))  # strides of layers that keep the size of a map


class Grids:
    """The sizes of maps in a forward of a model; all sites of an attachment share it."""

    def __init__(self) -> None:
        self._inside = False  # whether a forward of the whole model is under way
        self._maps: tuple[_Map, ...] = ()

    def of(self, spatial: int, samples: int | None = None) -> tuple[list[Grid], list[Grid]]:
        """The sizes of the maps of so many samples in this forward, and of stages behind them."""
        sizes: list[Grid] = []
        stages: list[Grid] = []
        for map_samples, size, embeds in self._maps:
            if len(size) != spatial or samples not in (None, map_samples):
                continue
            sizes.append(size)

            for ratio in _RATIOS:
                if embeds and not any(edge % ratio for edge in size):
                    stages.append(tuple(edge // ratio for edge in size))
        return sizes, stages

    def watch(self, model: nn.Module, only_maps: bool = False) -> None:
        """Put hooks on patch embeddings, and on other layers that make maps smaller, if any.

        `only_maps` says that all sites have maps. Then hooks are needed only if the model has a
        patch embedding.
        """
        modules = list(model.modules())
        if any(type(module).__name__ == "Unroll" for module in modules):
            return  # it moves the tokens of Hiera out of the order of rows: they form no map

        with_patches = {m for m in modules if m is not model and hasattr(m, "patch_size")}
        if only_maps and not with_patches:
            return

        embeds, shrinks = _layers_of_maps(modules, with_patches)
        for module in embeds:
            module.register_forward_hook(self._keep)
        for module in shrinks:
            module.register_forward_hook(self._shrink)
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

    def _shrink(self, module: nn.Module, args: Any, output: Any) -> None:
        self._keep(module, args, output, embeds=False)

    def _keep(self, module: nn.Module, args: Any, output: Any, embeds: bool = True) -> None:
        """Keep the size of a map, or one that a patch embedding returns beside its tokens."""
        values = list(output) if isinstance(output, tuple | list) else [output]
        tensors = [value for value in values if isinstance(value, Tensor)]
        sizes = [tuple(value) for value in values if _is_size(value)]
        if isinstance(output, Tensor) and not children_of(module):
            sizes = [tuple(output.shape[2:])]

        if tensors and sizes and not _recomputes():
            new = (tensors[0].shape[0], sizes[0], embeds)
            # a part of the model may be called by itself: then only its last map counts
            self._maps = (*self._maps, new) if self._inside else (new,)


def _layers_of_maps(
    modules: list[nn.Module], with_patches: set[nn.Module]
) -> tuple[set[nn.Module], set[nn.Module]]:
    """The patch embeddings with their convolutions, and other layers that make maps smaller."""
    # a patch embedding may hold another module with a size of patches, and the inner one counts
    embeddings = {m for m in with_patches if with_patches.isdisjoint(set(m.modules()) - {m})}
    parts: set[nn.Module] = set()
    for module in embeddings:
        parts.update(module.modules())

    maps = {m for m in modules if not children_of(m) and _MAP.search(type(m).__name__)}
    embeds = embeddings | (maps & parts)
    shrinks = {m for m in maps - embeds if getattr(m, "stride", 1) not in _UNITS}
    return embeds, shrinks


def _recomputes() -> bool:
    """Whether a backward recomputes the forward, as activation checkpointing does."""
    return not is_compiling() and graph_task() != NO_TASK


def _is_size(value: Any) -> bool:
    """Whether a value is the size of a map: two or three integers."""
    edges = value if isinstance(value, tuple | list) else ()
    return len(edges) in (2, 3) and all(isinstance(edge, int | torch.SymInt) for edge in edges)
