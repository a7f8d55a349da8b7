"""Gathers the facts of a model about the axes of a layer's tensors, as plain data.

`place` makes the `Facts` of each layer, in ``attach``. The `Reader` of the site keeps them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from .._torch import children_of, parameters_of
from ..selectors.index import Index, Target
from ..selectors.stages import stage_channels
from .view import FIRST, LAST, MIXED

_MAPS = re.compile(r"(?:Conv|Norm|Pool)\w*([123])d")
_REORDER = re.compile(r"Permute|(?<!Conv)Transpose|Rearrange")  # layers that only move axes
_ATTENTION = re.compile(r"Att(entio)?n")
# also layers that may move axes inside their own code
_MAY_REORDER = re.compile(_REORDER.pattern + r"|Att(entio)?n|RNN|LSTM|GRU|Transformer")
_SEQUENCES = re.compile(r"RNN|LSTM|GRU|MultiheadAttention|Transformer\w*")
_PREFIX = re.compile(
    r"(cls|class|dist|distillation|reg|register|cls_register)_token|class_embedding"
)
_TOKEN_LAST = re.compile(r"Llama4")  # models with the class token after the map
_NORM_LAST = re.compile(r"(Layer|RMS|Rms)Norm")
_WIDTH = re.compile(r"(in|out)_(channels|features)|num_(features|channels)|embedding_dim")


@dataclass(frozen=True)
class Facts:
    """The facts about a layer. They hold no reference to the model.

    The last four are set only where `Reader` asks for them: if `own` is ``""`` and `inside` is
    `MIXED`; `reorders` also if `inside` is `FIRST`.

    Attributes:
        type_name: the name of the class of the layer.
        own: `FIRST` or `LAST`, if the type of the layer shows the place of its channels; or ``""``.
        inside: the place of the channels in the layers inside this layer: `FIRST`, `LAST`, `MIXED`.
            If it has no such layers, those inside its nearest ancestor count; ``""`` without any.
        widths: the numbers of channels of these layers.
        stage: the number of channels of the feature stage that the layer ends.
        heads: the number of heads of the attention that the layer is, or belongs to.
        norms_last: whether the model has norms with channels last.
        batched: the number of axes of a batch, if the layer also takes a single sample; else 0.
        samples_second: the class of a layer of the model with ``batch_first=False``, or ``""``.
        prefixes: the possible numbers of class and register tokens.
        around: the place of the channels in the nearest layers before and after whose types show
            it; ``""`` if these differ.
        first_widths: the numbers of channels of all layers of the model with channels first.
        last_widths: the numbers of channels of all layers of the model with channels last.
        reorders: whether a layer of the model may move axes.
    """

    type_name: str = ""
    own: str = ""
    inside: str = ""
    widths: tuple[int, ...] = ()
    stage: int | None = None
    heads: int | None = None
    norms_last: bool = False
    batched: int = 0
    samples_second: str = ""
    prefixes: tuple[int, ...] = (0,)
    around: str = ""
    first_widths: frozenset[int] = frozenset()
    last_widths: frozenset[int] = frozenset()
    reorders: bool = False


class _Surroundings:
    """Facts of the whole model, for layers whose type does not show the place of their channels.

    Attributes:
        first_widths: the numbers of channels of layers with channels first.
        last_widths: the numbers of channels of layers with channels last.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        leaves = [module for module in modules if not children_of(module)]
        self._positions = {leaf: position for position, leaf in enumerate(leaves)}
        self._sides = [_side_by_type(leaf) for leaf in leaves]

        first_widths: set[int] = set()
        last_widths: set[int] = set()
        for leaf, side in zip(leaves, self._sides, strict=True):
            if side == FIRST:
                first_widths |= _widths(leaf)
            elif side == LAST:
                last_widths |= _widths(leaf)
        self.first_widths = frozenset(first_widths)
        self.last_widths = frozenset(last_widths)

    def around(self, module: nn.Module) -> str:
        """Return the place of the channels in the layers before and after; "" if they differ."""
        position = self._positions.get(module)
        if position is None:
            return ""

        before = next(filter(None, reversed(self._sides[:position])), "")
        after = next(filter(None, self._sides[position + 1 :]), "")
        return before if before == after else ""


class ModelFacts:
    """Gathers the facts about the layers of a model when a spec is attached."""

    def __init__(self, index: Index) -> None:
        modules = list(index.model.modules())
        self._all_modules = modules
        self._targets = index.modules
        self._stages = stage_channels(index)
        # the results of `_inside`, kept because layers share ancestors
        self._inner: dict[nn.Module, tuple[str, tuple[int, ...]]] = {}

        self._samples_second = _first_with_samples_second(modules)
        self._prefixes = tuple(sorted({0, *map(_prefix, modules)}))
        norms = [module for module in modules if _NORM_LAST.search(type(module).__name__)]
        # A LayerNorm2d has its channels first. All other norms count as channels last,
        # also copies of RMSNorm, whose types do not show the place of the channels.
        self._norms_last = any(_side_by_type(norm) != FIRST for norm in norms)

    @cached_property
    def _reorders(self) -> bool:
        return any(_MAY_REORDER.search(type(m).__name__) for m in self._all_modules)

    @cached_property
    def _surroundings(self) -> _Surroundings:
        return _Surroundings(self._all_modules)

    def of(self, target: Target, at: str) -> Facts:
        """Return the facts of the output, or the input, of a layer."""
        module = target.module
        lineage = self._lineage(target.name)
        inside, widths = self._inside_of_nearest(lineage)
        # the input of an embedding has indices, and no channels
        says_nothing = at == "input" and isinstance(module, nn.Embedding)
        own = "" if says_nothing else _side_by_type(module)

        facts = Facts(
            type_name=type(module).__name__,
            own=own,
            inside=inside,
            widths=widths,
            stage=self._stages.get(target.name) if at == "output" else None,
            heads=_heads(module, lineage),
            norms_last=self._norms_last,
            batched=_batched(module),
            samples_second=self._samples_second,
            prefixes=self._prefixes,
        )
        if not own and inside == FIRST:
            return replace(facts, reorders=self._reorders)
        if own or inside != MIXED:
            return facts

        surroundings = self._surroundings  # made only if needed, because it takes time
        return replace(
            facts,
            around=surroundings.around(module),
            first_widths=surroundings.first_widths,
            last_widths=surroundings.last_widths,
            reorders=self._reorders,
        )

    def _lineage(self, name: str) -> list[nn.Module]:
        """Return a module and its ancestors, up to the model."""
        lineage = [self._targets[name].module]
        while name:
            name = name.rpartition(".")[0]
            lineage.append(self._targets[name].module)
        return lineage

    def _inside_of_nearest(self, lineage: list[nn.Module]) -> tuple[str, tuple[int, ...]]:
        """Return the result of `_inside` for the first of these modules with a result."""
        for module in lineage:
            side, widths = self._inside(module)
            if side:
                return side, widths
        return "", ()

    def _inside(self, module: nn.Module) -> tuple[str, tuple[int, ...]]:
        """Return the place of the channels in the layers of a module, and their numbers."""
        if module in self._inner:
            return self._inner[module]

        sides: set[str] = set()
        widths: set[int] = set()
        for layer in module.modules():
            side = _side_by_type(layer)
            if side:
                sides.add(side)
                widths |= _widths(layer)
            if _REORDER.search(type(layer).__name__):
                sides.add(MIXED)

        common = MIXED if len(sides) > 1 else next(iter(sides), "")
        self._inner[module] = (common, tuple(widths))
        return self._inner[module]


def _first_with_samples_second(modules: Sequence[nn.Module]) -> str:
    """Return the class of the first layer with ``batch_first=False``; "" without one."""
    for module in modules:
        if getattr(module, "batch_first", None) is False:
            return type(module).__name__
    return ""


def _side_by_type(module: Any) -> str:
    """Return `FIRST` or `LAST` if the type of a layer shows the place of its channels; else ""."""
    if isinstance(module, nn.GroupNorm | nn.SyncBatchNorm) or _rank(module):
        return FIRST

    normalized = getattr(module, "normalized_shape", None) or ()
    is_norm = len(normalized) == 1  # a norm of several axes does not show the axis of channels
    if isinstance(module, nn.Linear | nn.Embedding | nn.RNNBase) or is_norm:
        return FIRST if getattr(module, "data_format", "") == "channels_first" else LAST
    return ""


def _rank(module: nn.Module) -> int:
    """Return the number of spatial axes of a convolution, pool or norm; 0 for other layers."""
    if children_of(module) and not parameters_of(module):
        return 0  # the module only holds other modules, like a ConvNormAct2d

    for cls in type(module).__mro__:
        match = _MAPS.search(cls.__name__)
        if match:
            return int(match.group(1))
    return 0


def _widths(module: Any) -> set[int]:
    """Return the numbers of input and output channels of a layer."""
    values: list[Any] = list(getattr(module, "normalized_shape", None) or ())
    for name, value in vars(module).items():
        if _WIDTH.fullmatch(name):
            values.append(value)
    return {width for width in values if isinstance(width, int) and width}  # lazy layers have 0


def _heads(module: nn.Module, lineage: list[nn.Module]) -> int | None:
    """Return the number of heads of a module, or of the nearest attention around it."""
    for ancestor in lineage:
        if ancestor is module or _ATTENTION.search(type(ancestor).__name__):
            heads = getattr(ancestor, "num_heads", None)
            if isinstance(heads, int):
                return heads
    return None


def _batched(module: nn.Module) -> int:
    """Return the number of axes of a batch, for layers of torch that also take a sample; else 0."""
    name = type(module).__name__
    if not type(module).__module__.startswith("torch.nn.") or "BatchNorm" in name:
        return 0
    if _SEQUENCES.fullmatch(name):
        return 3

    rank = _rank(module)
    return rank + 2 if rank else 0


def _prefix(module: nn.Module) -> int:
    """Return how many class and register tokens a module has. Branches may have their own."""
    if _TOKEN_LAST.match(type(module).__name__):
        return 0

    tokens: dict[str, int] = {}  # by the name without the number of a branch
    for name, parameter in parameters_of(module).items():
        match = _PREFIX.match(name)
        if match and parameter is not None:
            token = match.group()
            tokens[token] = parameter.shape[-2] if parameter.ndim > 1 else 1
    return sum(tokens.values())
