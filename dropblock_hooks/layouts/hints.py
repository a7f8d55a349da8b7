"""What a model tells about the axes of a layer's tensors, as plain data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..selectors.index import Index, Target
from ..selectors.wrappers import attribute_of
from .grids import Grid, patch_grids, prefixes, unrolled, windows
from .permutes import may_turn

_FIRST = re.compile(r"(Conv|Norm|Pool)\w*[123]d")
_REORDER = re.compile(r"Permute|Transpose|Rearrange")
_ATTENTION = re.compile(r"Att(entio)?n")


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
        turns: whether code there may put the axes of maps in another order.
        heads: the number of heads of the attention that it belongs to.
        partition: class name of the surrounding layer that cuts maps into windows.
        sequence_first: class name of a layer of the model with ``batch_first=False``.
        batched: how many axes a batch has, where the layer's type tells; else 0.
        recurrent: whether it is a recurrent layer, which also gives its state.
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
    turns: bool = False
    heads: int | None = None
    partition: str = ""
    sequence_first: str = ""
    batched: int = 0
    recurrent: bool = False
    grids: tuple[Grid, ...] = ()
    windows: tuple[Grid, ...] = ()
    loose: tuple[Grid, ...] = ()
    ratios: tuple[int, ...] = ()
    prefixes: tuple[int, ...] = (0,)
    unrolled: tuple[Grid, tuple[Grid, ...]] | None = None


class Hints:
    """Gathers the evidence of the layers of one model; used at attaching only."""

    def __init__(self, index: Index, stage_channels: dict[str, int], ratios: Iterable[int]) -> None:
        self._index = index
        self._stages = stage_channels
        self._widths: dict[nn.Module, _Widths] = {}  # an ancestor is one of many layers
        modules = list(index.model.modules())
        before = prefixes(modules)
        grids, loose = patch_grids(modules, before)
        self._model = Evidence(
            norms_last=any(
                attribute_of(m, "normalized_shape") is not None and _kind(m) == "last"
                for m in modules
            ),
            grids=grids,
            windows=windows(modules),
            loose=loose,
            ratios=tuple(sorted(set(ratios) - {1})),
            prefixes=before,
            unrolled=unrolled(modules),
            sequence_first=_sequence_first(modules),
        )

    def of(self, target: Target, at: str) -> Evidence:
        """What is known of the output, or the input, of a layer."""
        module = target.module
        lineage = list(self._lineage(target.name))
        settled, widths = _own(module, at), self._widths_in(module)
        borrowed = not widths.found
        for ancestor in lineage[1:]:
            if widths.found:
                break
            widths = self._widths_in(ancestor)
        stage = self._stages.get(target.name) if at == "output" else None
        declares = stage is not None or widths.first is None  # inside, a map may be of another
        fmt = _format(module) or (_format(self._index.model) if declares else "")
        known = {"first": widths.first, "last": widths.last} if settled is None else settled
        return replace(
            self._model,
            own="" if settled is None else type(module).__name__,
            first=known.get("first"),
            last=known.get("last"),
            stage=stage,
            output_fmt=fmt if at == "output" else "",
            borrowed=borrowed,
            turns=settled is None and widths.turns,
            heads=_heads(lineage),
            partition=next((n for a in lineage[1:] if "Partition" in (n := type(a).__name__)), ""),
            batched=_batched(lineage),
            recurrent=isinstance(module, nn.RNNBase),
        )

    def _widths_in(self, module: nn.Module) -> _Widths:
        if module not in self._widths:
            self._widths[module] = _Widths(module)
        return self._widths[module]

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
        self.turns = False
        for leaf in module.modules():
            kind = _kind(leaf)
            if kind is not None:
                found.setdefault(kind, set()).update(_widths(leaf))
                continue
            self.turns = self.turns or may_turn(leaf)
            if _REORDER.search(type(leaf).__name__):
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
    normalized = getattr(module, "normalized_shape", None)
    if isinstance(module, nn.Linear | nn.Embedding) or (normalized and len(normalized) == 1):
        return "last"  # of several axes, a norm does not say which is that of the channels
    return None


def _named_first(module: nn.Module) -> bool:
    """A convolution, a pool, a norm of maps: torch's, or another one named like them."""
    composite = module._modules and not module._parameters
    return not composite and any(_FIRST.search(c.__name__) for c in type(module).__mro__)


def _widths(leaf: nn.Module) -> set[int]:
    return set(_taken(leaf)) | set(_given(leaf))


_GIVEN = ("out_channels", "out_features", "num_features", "num_channels", "embedding_dim")


def _given(leaf: Any, names: tuple[str, ...] = _GIVEN) -> tuple[int, ...]:
    """The number of channels that a leaf gives out, where it is known."""
    for name in names:
        stated = getattr(leaf, name, None)
        if isinstance(stated, int):
            return (stated,) if stated > 0 else ()
    shape = getattr(leaf, "normalized_shape", None)
    if shape is not None:
        return (int(shape[0 if _kind(leaf) == "first" else -1]),)
    weight = getattr(leaf, "weight", None)
    return (weight.shape[0],) if isinstance(weight, Tensor) and weight.ndim == 1 else ()


def _taken(leaf: Any) -> tuple[int, ...]:
    """The number of channels that a leaf takes in, where it is known."""
    return _given(leaf, ("in_channels", "in_features", *_GIVEN))


def _own(module: nn.Module, at: str) -> dict[str, tuple[int, ...] | None] | None:
    """Where its type settles it: the side on which its channels are, and how many."""
    if isinstance(module, nn.RNNBase):
        return {"last": ()}
    kind = _kind(module)
    if kind is None or (at == "input" and isinstance(module, nn.Embedding)):
        return None
    return {kind: _given(module) if at == "output" else _taken(module)}


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
        heads = attribute_of(module, "num_heads")
        inside = module is lineage[0] or _ATTENTION.search(type(module).__name__)
        if inside and isinstance(heads, int):
            return heads
    return None


_SEQUENCES = (
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
_UNBATCHED = re.compile(r"(Conv|ConvTranspose|InstanceNorm|Pool)([123])d$")


def _batched(lineage: list[nn.Module]) -> int:
    """The axes of a batch of a layer whose type takes a single sample, too; else 0."""
    for module in lineage:
        inside = module is lineage[0] or type(module).__module__.startswith("torch.nn.")
        if inside and isinstance(module, _SEQUENCES):
            return 3
    of_maps = _UNBATCHED.search(type(lineage[0]).__name__)
    own = type(lineage[0]).__module__.startswith("torch.nn.")
    return int(of_maps.group(2)) + 2 if of_maps and own else 0


def _sequence_first(modules: list[nn.Module]) -> str:
    names = (type(m).__name__ for m in modules if attribute_of(m, "batch_first") is False)
    return next(names, "")
