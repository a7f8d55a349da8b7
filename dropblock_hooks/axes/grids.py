"""The sizes of maps in this forward, before they became tokens.

A model that takes images of any size forms another grid of tokens at every call. Forward hooks on
its patch embedding, and on other layers that make maps smaller, keep their sizes: plain integers,
which ``torch.compile`` traces. They are forgotten when the model's forward ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..checkpointing import NO_TASK, graph_task

Grid = tuple[int, ...]

_MAP = re.compile(r"(Conv|Pool)\w*[23]d")
_RATIOS = (1, 2, 4, 8)
"""The factors by which the maps of later stages are smaller than the embedded image."""


class Grids:
    """The sizes of maps in a forward of a model; all sites of an attachment share it.

    Attributes:
        hooks: on the watched layers.
        inside: whether a forward of the whole model is under way.
    """

    def __init__(self) -> None:
        self.hooks: tuple[GridHook, ...] = ()
        self.inside = False

    def of(self, spatial: int, samples: int | None = None) -> tuple[list[Grid], list[Grid]]:
        """The sizes of the maps in this forward, and of all stages behind a patch embedding.

        Args:
            spatial: number of axes of a map.
            samples: only sizes of a batch of this length.
        """
        met, stages = [], []
        for hook in self.hooks:
            for n, size in hook.met:
                if len(size) == spatial and samples in (None, n):
                    met.append(size)
                    stages += [
                        tuple(edge // ratio for edge in size)
                        for ratio in _RATIOS
                        if hook.embeds and not any(edge % ratio for edge in size)
                    ]
        return met, stages

    def watch(self, model: nn.Module) -> None:
        """Put hooks on the layers of a model that show the sizes of its maps, if there are some."""
        modules = list(model.modules())
        if any(type(module).__name__ == "Unroll" for module in modules):
            return  # it moves the tokens of Hiera out of the order of rows: they form no map
        cut = [m for m in modules if m is not model and _cuts_patches(m)]
        inner = [m for m in cut if not any(n is not m and n in cut for n in m.modules())]
        embedding = {leaf for module in inner for leaf in module.modules()}
        hooks = []
        for module in modules:
            maps = not module._modules and _MAP.search(type(module).__name__) is not None
            if module in inner or (maps and (module in embedding or _is_strided(module))):
                hooks.append(GridHook(self, maps=maps, embeds=module in embedding))
                module.register_forward_hook(hooks[-1])
        if hooks:
            self.hooks = tuple(hooks)
            model.register_forward_pre_hook(GridHook(self, begins=True))
            model.register_forward_hook(GridHook(self, begins=False), always_call=True)

    def unwatch(self, model: nn.Module) -> None:
        """Take these hooks off."""
        for module in model.modules() if self.hooks else ():
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for key, hook in list(hooks.items()):
                    if isinstance(hook, GridHook) and hook.grids is self:
                        del hooks[key]
                        module._forward_hooks_always_called.pop(key, None)


@dataclass(eq=False)
class GridHook:
    """Forward hook of a layer, which keeps the sizes of its maps; or a hook of the whole model.

    Attributes:
        maps: whether it gives maps (N, C, ...), and not tokens together with the size of their map.
        embeds: whether the layer belongs to a patch embedding.
        begins: of a hook of the model: whether its forward begins, or ends.
        met: of each map in this forward, the number of samples and the size.
    """

    grids: Grids
    maps: bool = False
    embeds: bool = False
    begins: bool | None = None
    met: tuple[tuple[int, Grid], ...] = ()

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        compiling = is_compiling()
        if not compiling and graph_task() != NO_TASK:
            return  # a recomputation
        if self.begins is not None:
            if not compiling:
                self.grids.inside = self.begins
            for hook in self.grids.hooks:
                hook.met = ()
            return
        met = _map(output) if self.maps else _stated(output)
        if met is not None:
            # a part of the model may be called by itself: only its last call counts
            self.met = (*self.met, met) if self.grids.inside else (met,)


def _map(output: Any) -> tuple[int, Grid] | None:
    """The number of samples and the size of a map."""
    if isinstance(output, Tensor) and output.ndim > 3:
        return output.shape[0], tuple(output.shape[2:])
    return None


def _stated(output: Any) -> tuple[int, Grid] | None:
    """The same where a patch embedding returns tokens together with the size of their map."""
    values = list(output) if isinstance(output, (tuple, list)) else []
    tensors = [value for value in values if isinstance(value, Tensor)]
    sizes = [tuple(value) for value in values if _is_size(value)]
    return (tensors[0].shape[0], sizes[0]) if tensors and sizes else None


def _is_size(value: Any) -> bool:
    edges = value if isinstance(value, (tuple, list)) else ()
    return len(edges) in (2, 3) and all(isinstance(edge, (int, torch.SymInt)) for edge in edges)


def _cuts_patches(module: nn.Module) -> bool:
    patch = getattr(module, "patch_size", None)
    return isinstance(patch, (int, tuple, list)) and not isinstance(patch, bool)


def _is_strided(module: nn.Module) -> bool:
    stride = getattr(module, "stride", 1)
    edges = stride if isinstance(stride, (tuple, list)) else (stride,)
    return any(isinstance(edge, int) and edge > 1 for edge in edges)
