"""Forward hooks that keep the sizes of maps in this forward, before they became tokens."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .._torch import children_of
from ..checkpointing import NO_TASK, graph_task

Grid = tuple[int, ...]

_MAP = re.compile(r"(Conv|Pool)\w*[23]d")
_RATIOS = (1, 2, 4, 8)  # by which the maps of later stages are smaller than the embedded image
_UNITS = (1, (1, 1), (1, 1, 1))  # strides of layers that keep the size of a map


class Grids:
    """The sizes of maps in a forward of a model; all sites of an attachment share it."""

    def __init__(self) -> None:
        self._inside = False  # whether a forward of the whole model is under way
        # of each map: the number of samples, the size, and whether it is of a patch embedding
        self._met: tuple[tuple[int, Grid, bool], ...] = ()

    def of(self, spatial: int, samples: int | None = None) -> tuple[list[Grid], list[Grid]]:
        """The sizes of the maps of so many samples in this forward, and of stages behind them."""
        met, stages = [], []
        for n, size, embeds in self._met:
            if len(size) == spatial and samples in (None, n):
                met.append(size)
                stages += [
                    tuple(edge // ratio for edge in size)
                    for ratio in _RATIOS
                    if embeds and not any(edge % ratio for edge in size)
                ]
        return met, stages

    def watch(self, model: nn.Module, only_maps: bool = False) -> None:
        """Put hooks on patch embeddings, and on other layers that make maps smaller, if any.

        With `only_maps`, no site has tokens, unless there is a patch embedding.
        """
        modules = list(model.modules())
        if any(type(module).__name__ == "Unroll" for module in modules):
            return  # it moves the tokens of Hiera out of the order of rows: they form no map
        cut = {m for m in modules if m is not model and hasattr(m, "patch_size")}
        if only_maps and not cut:
            return
        inner = {m for m in cut if cut.isdisjoint(set(m.modules()) - {m})}
        embedding = {leaf for module in inner for leaf in module.modules()}
        maps = {m for m in modules if not children_of(m) and _MAP.search(type(m).__name__)}
        embeds = inner | (maps & embedding)
        shrinks = {m for m in maps - embeds if getattr(m, "stride", 1) not in _UNITS}
        for module in embeds | shrinks:
            module.register_forward_hook(self._embed if module in embeds else self._shrink)
        if embeds or shrinks:
            model.register_forward_pre_hook(self._forget)
            model.register_forward_hook(self._forget)

    def _forget(self, module: nn.Module, args: Any, *output: Any) -> None:
        """Begin or, with an output, end a forward of the whole model."""
        if not _recomputes():
            self._met, self._inside = (), len(output) == 0

    def _shrink(self, module: nn.Module, args: Any, output: Any) -> None:
        self._embed(module, args, output, embeds=False)

    def _embed(self, module: nn.Module, args: Any, output: Any, embeds: bool = True) -> None:
        """Keep the size of a map, or one that a patch embedding returns beside its tokens."""
        values = list(output) if isinstance(output, tuple | list) else [output]
        tensors = [value for value in values if isinstance(value, Tensor)]
        sizes = [tuple(value) for value in values if _is_size(value)]
        if isinstance(output, Tensor) and not children_of(module):
            sizes = [tuple(output.shape[2:])]
        if tensors and sizes and not _recomputes():
            met = (tensors[0].shape[0], sizes[0], embeds)
            # a part of the model may be called by itself: only its last map counts
            self._met = (*self._met, met) if self._inside else (met,)


def _recomputes() -> bool:
    return not is_compiling() and graph_task() != NO_TASK


def _is_size(value: Any) -> bool:
    edges = value if isinstance(value, tuple | list) else ()
    return len(edges) in (2, 3) and all(isinstance(edge, int | torch.SymInt) for edge in edges)
