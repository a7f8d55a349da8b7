"""The sizes of maps that a model has met in this forward, before it made tokens of them.

A model that takes images of any size forms another grid of tokens at every call. Its patch
embedding, or another layer whose maps are flattened, is watched by a forward hook: plain integers,
which ``torch.compile`` traces as what they are. What was met is forgotten at the end of a forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..checkpointing import NO_TASK, graph_task

Met = tuple[int, tuple[int, ...]]  # the number of samples, and the size of the map

_MOST = 64
_MAP = re.compile(r"(Conv|Pool)\w*[23]d")


class MapSizes:
    """What the watched layers of one model have met; its sites share it.

    Attributes:
        hooks: of the watched layers.
        inside: whether a forward of the model is under way, from its beginning to its end.
        read: whether a site has asked since a layer has met something.
    """

    def __init__(self) -> None:
        self.hooks: tuple[SizeHook, ...] = ()
        self.inside = False
        self.read = False
        self._task = NO_TASK
        self._again: tuple[Met, ...] = ()  # in this recomputation
        self._past: dict[Met, None] = {}  # in forwards whose backward may be still to come
        self._consumed = False

    def __getstate__(self) -> dict[str, Any]:
        return {"hooks": self.hooks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]  # no class derives from it
        self.hooks = state["hooks"]

    def met(self) -> tuple[tuple[Met, ...], ...]:
        """What may be the map of tokens met now: groups, the first one that fits rules."""
        if is_compiling():
            return (self._found(),)
        self.read = True
        task = graph_task()
        if task == NO_TASK:
            return (self._found(),)
        # a checkpointed part runs again: its forward may not have been the last one
        self._consumed = True
        again = self._again if task == self._task else ()
        return again, (*self._past, *self._found())

    def embedded(self) -> tuple[Met, ...]:
        """What patch embeddings have met."""
        return tuple([met for hook in self.hooks if hook.embeds for met in hook.found])

    def _found(self) -> tuple[Met, ...]:
        return tuple([met for hook in self.hooks for met in hook.found])

    def add(self, hook: SizeHook, met: Met) -> None:
        """Take in what a layer has met, in eager mode."""
        task = graph_task()
        if task != NO_TASK:
            kept = self._again if task == self._task else ()
            self._task, self._again = task, (*kept, met)
            return
        if not self.inside and self.read:  # a part of the model runs by itself, once more
            self.forget()
        self.read = False
        if met not in hook.found:
            hook.found = (*hook.found[-_MOST:], met)

    def forget(self) -> None:
        """A forward is over: what it has met matters only to its backward."""
        if self._consumed:
            self._past, self._consumed = {}, False
        if torch.is_grad_enabled():
            self._past.update(dict.fromkeys(self._found()))
            for met in list(self._past)[:-_MOST]:
                del self._past[met]
        for hook in self.hooks:
            hook.found = ()


class SizeHook:
    """Forward hook: keeps the sizes of maps that a layer gives, flattens, or tells in integers.

    Attributes:
        sizes: where it is kept.
        kind: ``"map"`` for a layer that gives maps, ``"flat"`` for one that flattens them,
            ``"told"`` for one whose output holds integers.
        embeds: whether the layer is a patch embedding.
        traced: whether compiled code looks too.
        found: what the layer has met in this forward.
    """

    def __init__(self, sizes: MapSizes, kind: str, embeds: bool, traced: bool) -> None:
        self.sizes = sizes
        self.kind = kind
        self.embeds = embeds
        self.traced = traced
        self.found: tuple[Met, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "found": ()}

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_compiling():
            if self.traced:
                met = self._met(args, output)
                if met is not None:
                    # outside of a whole forward nothing is read that was there before the graph
                    self.found = (*self.found, met) if self.sizes.inside else (met,)
            return
        if not torch._C._is_tracing():
            met = self._met(args, output)
            if met is not None:
                self.sizes.add(self, met)

    def _met(self, args: Any, output: Any) -> Met | None:
        if self.kind == "told":
            first, size = _told(output)
            return None if first is None or size is None else (first.shape[0], size)
        if self.kind == "map":
            x = output
        else:
            x = args[0] if args and isinstance(output, Tensor) and output.ndim == 3 else None
        if not isinstance(x, Tensor) or x.ndim < 4:
            return None
        return x.shape[0], tuple(x.shape[2:])


def _told(output: Any) -> tuple[Tensor | None, tuple[int, ...] | None]:
    """The tensor, and the size of its map, where a layer returns both."""
    first = size = None
    for value in output if isinstance(output, tuple | list) else ():
        if isinstance(value, Tensor):
            first = value if first is None else first
        elif _is_size(value):
            size = tuple(value)
    return first, size


def _is_size(value: Any) -> bool:
    if not isinstance(value, tuple | list) or len(value) not in (2, 3):
        return False
    return all(isinstance(edge, int | torch.SymInt) for edge in value)


class StartHook:
    """Forward pre-hook of the model: nothing is met yet."""

    def __init__(self, sizes: MapSizes) -> None:
        self.sizes = sizes

    def __call__(self, model: nn.Module, *args: Any) -> None:
        _mark(self.sizes, True)


class EndHook(StartHook):
    """Forward hook of the model, also where it fails: what was met is over."""

    def __call__(self, model: nn.Module, *args: Any) -> None:
        _mark(self.sizes, False)


def _mark(sizes: MapSizes, inside: bool) -> None:
    if is_compiling():
        for hook in sizes.hooks:
            if hook.traced:
                hook.found = ()
    elif graph_task() == NO_TASK:
        sizes.forget()
    else:
        return  # a recomputation of the whole model
    sizes.inside = inside


def watch_sizes(model: nn.Module, sizes: MapSizes) -> None:
    """Put the hooks on the layers of a model that tell the sizes of its maps, if there are some."""
    hooks = []
    for module, kind, embeds, traced in _watched(model):
        hook = SizeHook(sizes, kind, embeds, traced)
        module.register_forward_hook(hook)
        hooks.append(hook)
    if hooks:
        sizes.hooks = tuple(hooks)
        model.register_forward_pre_hook(StartHook(sizes))
        model.register_forward_hook(EndHook(sizes), always_call=True)


def size_hooks_on(module: nn.Module) -> Iterator[SizeHook | StartHook]:
    """Our hooks of this kind on this very module."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if isinstance(hook, SizeHook | StartHook):
            yield hook


def _watched(model: nn.Module) -> Iterator[tuple[nn.Module, str, bool, bool]]:
    """Layers to watch: which, its kind, whether it embeds patches, whether compiled code looks."""
    embeddings = [m for m in model.modules() if m is not model and _cuts_patches(m)]
    inner = [m for m in embeddings if not any(n is not m and n in embeddings for n in m.modules())]
    inside = {id(leaf) for m in inner for leaf in m.modules()}
    for module in model.modules():
        if any(module is m for m in inner) and not _gives_maps(module):
            yield module, "told", True, True
        elif id(module) in inside and _gives_maps(module):
            yield module, "map", True, True
        elif _gives_maps(module) and _is_strided(module):
            embeds = getattr(module, "stride", None) == getattr(module, "kernel_size", 0)
            yield module, "map", False, embeds and not inner
        elif not module._modules and not module._parameters and "Flat" in type(module).__name__:
            yield module, "flat", False, True


def _cuts_patches(module: nn.Module) -> bool:
    patch = getattr(module, "patch_size", None)
    return isinstance(patch, int | tuple | list) and not isinstance(patch, bool)


def _gives_maps(module: nn.Module) -> bool:
    return not module._modules and _MAP.search(type(module).__name__) is not None


def _is_strided(module: nn.Module) -> bool:
    stride = getattr(module, "stride", 1)
    edges: Iterable[Any] = stride if isinstance(stride, tuple | list) else (stride,)
    return any(isinstance(edge, int) and edge > 1 for edge in edges)
