"""What a model tells about the axes of a layer's tensors, as plain data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .names import Index, Target

Grid = tuple[int, ...]

_FIRST = re.compile(r"(Conv|Norm|Pool)\w*[123]d")
_REORDER = re.compile(r"Permute|Transpose|Rearrange")
_ATTENTION = re.compile(r"Att(entio)?n")
_CLASS_TOKEN = re.compile(r"(cls|class)_token")
_MORE_TOKENS = re.compile(r"(dist|distillation|reg|register)_tokens?")


@dataclass(frozen=True)
class Evidence:
    """What is known of one layer; it holds no reference to the model.

    Attributes:
        own: class name of a layer whose own type settles the layout; "" for others.
        first: widths of the channels-first layers in it (in the nearest ancestor that has some,
            for a layer without any), or None where there are none.
        last: the same of channels-last layers.
        norms_last: whether the model has norms of channels that are last.
        stage: channels of the feature stage that it ends.
        output_fmt: the format that the layer, or the model whose stage it ends, declares.
        borrowed: whether `first` and `last` are those of an ancestor.
        heads: the number of heads of the attention that it belongs to.
        partition: class name of the surrounding layer that cuts maps into windows.
        sequence_first: class name of a layer in it with ``batch_first=False``.
        grids: sizes of maps that tokens may form.
        windows: sizes of maps, or of windows of maps, that attentions in the model are made for.
        loose: grids of models that take images of any size.
        ratios: by what the maps of later stages are smaller than that of the first one.
        prefixes: how many tokens may come before those of the map.
        unrolled: size and strides of a model that reorders its tokens.
    """

    own: str = ""
    first: tuple[int, ...] | None = None
    last: tuple[int, ...] | None = None
    norms_last: bool = False
    stage: int | None = None
    output_fmt: str = ""
    borrowed: bool = False
    heads: int | None = None
    partition: str = ""
    sequence_first: str = ""
    grids: tuple[Grid, ...] = ()
    windows: tuple[Grid, ...] = ()
    loose: tuple[Grid, ...] = ()
    ratios: tuple[int, ...] = ()
    prefixes: tuple[int, ...] = (0,)
    unrolled: tuple[Grid, tuple[Grid, ...]] | None = None


class Witness:
    """Gathers the evidence of the layers of one model; used at attaching only."""

    def __init__(self, index: Index, stage_channels: dict[str, int], ratios: Iterable[int]) -> None:
        self._index = index
        self._stages = stage_channels
        modules = list(index.model.modules())
        prefixes = _prefixes(modules)
        grids, loose = _patch_grids(modules, prefixes)
        self._model = Evidence(
            norms_last=any(hasattr(m, "normalized_shape") and _kind(m) == "last" for m in modules),
            grids=grids,
            windows=_windows(modules),
            loose=loose,
            ratios=tuple(sorted(set(ratios) - {1})),
            prefixes=prefixes,
            unrolled=_unrolled(modules),
        )

    def of(self, target: Target, at: str) -> Evidence:
        """What is known of the output, or the input, of a layer."""
        module = target.module
        lineage = list(self._lineage(target.name))
        own, widths = _own(module, at), _Widths(module)
        borrowed = not widths.found
        for ancestor in lineage[1:]:
            if widths.found:
                break
            widths = _Widths(ancestor)
        stage = self._stages.get(target.name) if at == "output" else None
        declares = stage is not None or widths.first is None  # inside, a map may be of another
        fmt = _format(module) or (_format(self._index.model) if declares else "")
        return replace(
            self._model,
            own=type(module).__name__ if own is not None else "",
            first=own[1] if own and own[0] == "first" else None if own else widths.first,
            last=own[1] if own and own[0] == "last" else None if own else widths.last,
            stage=stage,
            output_fmt=fmt if at == "output" else "",
            borrowed=borrowed,
            heads=_heads(lineage),
            partition=_partition(lineage[1:]),
            sequence_first=_sequence_first(module, lineage),
        )

    def _lineage(self, name: str) -> Iterator[nn.Module]:
        """The module and its ancestors, nearest first."""
        while name:
            yield self._index.modules[name].module
            name = name.rpartition(".")[0]
        yield self._index.model


class _Widths:
    """The widths of the layers inside a module whose type tells their layout."""

    def __init__(self, module: nn.Module) -> None:
        found: dict[str, set[int]] = {}
        for leaf in module.modules():
            kind = _kind(leaf)
            if kind is not None:
                found.setdefault(kind, set()).update(_widths(leaf))
            elif _REORDER.search(type(leaf).__name__):
                found.setdefault("first", set())
                found.setdefault("last", set())
        self.found = any(found.values()) or len(found) == 1
        self.first = _sorted(found.get("first"))
        self.last = _sorted(found.get("last"))


def _sorted(values: set[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(sorted(values))


def _kind(module: nn.Module) -> str | None:
    """Whether a layer takes its channels "first" or "last"; None where its type does not say."""
    if isinstance(module, nn.GroupNorm | nn.SyncBatchNorm) or _named_first(module):
        return "first"
    if isinstance(module, nn.Linear | nn.Embedding) or hasattr(module, "normalized_shape"):
        return "last"
    return None


def _named_first(module: nn.Module) -> bool:
    """A convolution, a pool, a norm of maps: torch's, or another one named like them."""
    composite = module._modules and not module._parameters
    return not composite and any(_FIRST.search(c.__name__) for c in type(module).__mro__)


def _widths(leaf: nn.Module) -> set[int]:
    return set(_taken(leaf)) | set(_given(leaf))


def _given(leaf: Any) -> tuple[int, ...]:
    """The number of channels that a leaf gives out, where it is known."""
    for name in ("out_channels", "out_features", "num_features", "num_channels", "embedding_dim"):
        if isinstance(getattr(leaf, name, None), int):
            return (getattr(leaf, name),) if getattr(leaf, name) > 0 else ()
    shape = getattr(leaf, "normalized_shape", None)
    if shape is not None:
        return (int(shape[0 if _kind(leaf) == "first" else -1]),)
    weight = getattr(leaf, "weight", None)
    return (weight.shape[0],) if getattr(weight, "ndim", 0) == 1 else ()


def _taken(leaf: Any) -> tuple[int, ...]:
    """The number of channels that a leaf takes in, where it is known."""
    for name in ("in_channels", "in_features"):
        if isinstance(getattr(leaf, name, None), int):
            return (getattr(leaf, name),) if getattr(leaf, name) > 0 else ()
    return _given(leaf)


def _own(module: nn.Module, at: str) -> tuple[str, tuple[int, ...]] | None:
    kind = _kind(module)
    if kind is None or (at == "input" and isinstance(module, nn.Embedding)):
        return None
    return kind, _given(module) if at == "output" else _taken(module)


def _format(module: nn.Module) -> str:
    """``output_fmt`` as timm's models and patch embeddings declare it."""
    declared = getattr(module, "output_fmt", None)
    declared = getattr(declared, "value", declared)
    if isinstance(declared, str) and not getattr(module, "flatten", False):
        return declared
    return ""


def _heads(lineage: list[nn.Module]) -> int | None:
    """The heads of the attention that a layer is, or lies in."""
    for module in lineage:
        heads = getattr(module, "num_heads", None)
        inside = module is lineage[0] or _ATTENTION.search(type(module).__name__)
        if inside and isinstance(heads, int):
            return heads
    return None


def _partition(ancestors: list[nn.Module]) -> str:
    names = (type(module).__name__ for module in ancestors)
    return next((name for name in names if "Partition" in name), "")


def _sequence_first(module: nn.Module, lineage: list[nn.Module]) -> str:
    nearby = [*module.modules(), *lineage[:2]]
    names = (type(m).__name__ for m in nearby if getattr(m, "batch_first", None) is False)
    return next(names, "")


def _pair(value: Any) -> Grid | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return (value, value)
    if isinstance(value, tuple | list) and len(value) in (2, 3):
        return tuple(value) if all(isinstance(edge, int) for edge in value) else None
    return None


def _patch_grids(
    modules: list[nn.Module], prefixes: tuple[int, ...]
) -> tuple[tuple[Grid, ...], tuple[Grid, ...]]:
    """The grids of patch embeddings: those that are sure, and those of images of any size."""
    sure: dict[Grid, None] = {}
    loose: dict[Grid, None] = {}
    shapes = {
        tuple(p.shape) for module in modules for p in module._parameters.values() if p is not None
    }
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


def _windows(modules: list[nn.Module]) -> tuple[Grid, ...]:
    stated = (
        getattr(module, name, None)
        for module in modules
        for name in ("resolution", "input_resolution")
    )
    pairs = (_pair(value) for value in stated if isinstance(value, tuple | list))
    return tuple(dict.fromkeys(pair for pair in pairs if pair is not None))


def _patch_grid(module: nn.Module) -> Grid | None:
    """The grid of a patch embedding, stated or the image's size by the patch's."""
    patch = _pair(getattr(module, "patch_size", None))
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


def _prefixes(modules: list[nn.Module]) -> tuple[int, ...]:
    """How many class and register tokens the model, or a part of it, has; and none."""
    found = {0}
    for module in modules:
        stated = getattr(module, "num_prefix_tokens", None)
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


def _unrolled(modules: list[nn.Module]) -> tuple[Grid, tuple[Grid, ...]] | None:
    """Size and strides of a layer that puts tokens of one mask unit next to each other (Hiera)."""
    for module in modules:
        if type(module).__name__ == "Unroll":
            size, strides = getattr(module, "size", None), getattr(module, "schedule", None)
            if size is not None and strides is not None:
                return tuple(size), tuple(tuple(stride) for stride in strides)
    return None
