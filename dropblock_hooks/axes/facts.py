"""The hints of a model about the axes of a layer's tensors, as plain data."""

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
_REORDER = re.compile(r"Permute|(?<!Conv)Transpose|Rearrange")
_ATTENTION = re.compile(r"Att(entio)?n")
_MAY_REORDER = re.compile(_REORDER.pattern + r"|Att(entio)?n|RNN|LSTM|GRU|Transformer")
_SEQUENCES = re.compile(r"RNN|LSTM|GRU|MultiheadAttention|Transformer\w*")
_PREFIX = re.compile(
    r"(cls|class|dist|distillation|reg|register|cls_register)_token|class_embedding"
)
_TOKEN_LAST = re.compile(r"Llama4")  # models whose class token is behind the map
_NORM_LAST = re.compile(r"(Layer|RMS|Rms)Norm")
_WIDTH = re.compile(r"(in|out)_(channels|features)|num_(features|channels)|embedding_dim")


@dataclass(frozen=True)
class Facts:
    """The hints about a layer. It holds no reference to the model."""

    type_name: str = ""  # of the class of the layer
    own: str = ""  # `FIRST` or `LAST`, if the type of the layer says where the channels are
    inside: str = ""  # so do the layers in it, or in its nearest ancestor with some; or `MIXED`
    widths: tuple[int, ...] = ()  # the numbers of channels of these layers
    stage: int | None = None  # the channels of the feature stage that it ends
    heads: int | None = None  # of the attention that it is, or belongs to
    norms_last: bool = False  # whether the model has norms of channels that are last
    batched: int = 0  # how many axes a batch has, if the layer takes a single sample too
    samples_second: str = ""  # the class of a layer of the model with ``batch_first=False``
    prefixes: tuple[int, ...] = (0,)  # how many class and register tokens there may be
    around: str = ""  # where the nearest layers before and after it have channels, if both agree
    first_widths: frozenset[int] = frozenset()  # the numbers of channels that are first
    last_widths: frozenset[int] = frozenset()  # and of those that are last, in the whole model
    reorders: bool = False  # whether a layer of the model may move axes


class Surroundings:
    """What the layers of a model tell about one beside them that does not tell itself.

    Attributes:
        first_widths: the numbers of channels of layers that have them first.
        last_widths: the same of layers that have them last.
        reorders: whether a layer may move axes.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        leaves = [module for module in modules if not children_of(module)]
        self._places = {leaf: place for place, leaf in enumerate(leaves)}
        self._sides = [kind_of(leaf) for leaf in leaves]
        widths: dict[str, set[int]] = {FIRST: set(), LAST: set(), "": set()}
        for leaf, side in zip(leaves, self._sides, strict=True):
            widths[side] |= _widths(leaf)
        self.first_widths = frozenset(widths[FIRST])
        self.last_widths = frozenset(widths[LAST])
        self.reorders = any(_MAY_REORDER.search(type(m).__name__) for m in modules)

    def around(self, module: nn.Module) -> str:
        """Where the nearest layers before and after have their channels, or "" if they differ."""
        place = self._places.get(module)
        if place is None:
            return ""
        before = next(filter(None, reversed(self._sides[:place])), "")
        after = next(filter(None, self._sides[place + 1 :]), "")
        return before if before == after else ""


class ModelFacts:
    """Gathers the facts of the layers of a model, when a spec is attached."""

    def __init__(self, index: Index) -> None:
        self._targets, self._stages = index.modules, stage_channels(index)
        self._inner: dict[nn.Module, tuple[str, tuple[int, ...]]] = {}  # an ancestor has many
        modules = list(index.model.modules())
        second = (type(m).__name__ for m in modules if getattr(m, "batch_first", None) is False)
        self._samples_second = next(second, "")
        self._prefixes = tuple(sorted({0, *map(_prefix, modules)}))
        norms = [m for m in modules if _NORM_LAST.search(type(m).__name__)]
        self._norms_last = any(kind_of(norm) != FIRST for norm in norms)
        self._all = modules

    @cached_property
    def _reorders(self) -> bool:
        return any(_MAY_REORDER.search(type(m).__name__) for m in self._all)

    @cached_property
    def _surroundings(self) -> Surroundings:
        return Surroundings(self._all)

    def of(self, target: Target, at: str) -> Facts:
        """The facts of the output, or the input, of a layer."""
        module, parts = target.module, target.name.split(".")
        names = [".".join(parts[:n]) for n in range(len(parts), -1, -1)]
        lineage = [self._targets[name].module for name in names]  # with its ancestors
        inside, widths = next((known for a in lineage if (known := self._inside(a))[0]), ("", ()))
        attentions = (m for m in lineage if m is module or _ATTENTION.search(type(m).__name__))
        heads = (getattr(each, "num_heads", None) for each in attentions)
        own = "" if at == "input" and isinstance(module, nn.Embedding) else kind_of(module)
        facts = Facts(
            type_name=type(module).__name__,
            own=own,
            inside=inside,
            widths=widths,
            stage=self._stages.get(target.name) if at == "output" else None,
            heads=next((number for number in heads if isinstance(number, int)), None),
            norms_last=self._norms_last,
            batched=_batched(module),
            samples_second=self._samples_second,
            prefixes=self._prefixes,
        )
        if not own and inside == FIRST:
            return replace(facts, reorders=self._reorders)
        if own or inside != MIXED:
            return facts
        near = self._surroundings  # which take time for a large model
        return replace(
            facts,
            around=near.around(module),
            first_widths=near.first_widths,
            last_widths=near.last_widths,
            reorders=near.reorders,
        )

    def _inside(self, module: nn.Module) -> tuple[str, tuple[int, ...]]:
        """Where the layers in a module have their channels, and how many these are."""
        if module not in self._inner:
            sides: set[str] = set()
            widths: set[int] = set()
            for each in module.modules():
                if side := kind_of(each):
                    sides.add(side)
                    widths |= _widths(each)
                if _REORDER.search(type(each).__name__):
                    sides.add(MIXED)
            self._inner[module] = "".join(sides) if len(sides) < 2 else MIXED, tuple(widths)
        return self._inner[module]


def kind_of(module: Any) -> str:
    """Whether a layer of this type has its channels `FIRST` or `LAST`; "" if it does not say."""
    if isinstance(module, nn.GroupNorm | nn.SyncBatchNorm) or _rank(module):
        return FIRST
    normalized = getattr(module, "normalized_shape", None) or ()  # of several axes, it says nothing
    if isinstance(module, nn.Linear | nn.Embedding | nn.RNNBase) or len(normalized) == 1:
        return FIRST if getattr(module, "data_format", "") == "channels_first" else LAST
    return ""


def _rank(module: nn.Module) -> int:
    """The number of spatial axes of a convolution, pool or norm of maps; 0 for other layers."""
    if children_of(module) and not parameters_of(module):
        return 0  # it only holds others, as a ConvNormAct2d does
    found = (_MAPS.search(kind.__name__) for kind in type(module).__mro__)
    return next((int(match.group(1)) for match in found if match), 0)


def _widths(module: Any) -> set[int]:
    found = [value for name, value in vars(module).items() if _WIDTH.fullmatch(name)]
    found += getattr(module, "normalized_shape", None) or ()
    return {width for width in found if isinstance(width, int) and width}  # lazy layers have 0


def _batched(module: nn.Module) -> int:
    """The axes of a batch of a layer of torch that takes a single sample, too; else 0."""
    name, rank = type(module).__name__, _rank(module)
    if not type(module).__module__.startswith("torch.nn.") or "BatchNorm" in name:
        return 0
    return 3 if _SEQUENCES.fullmatch(name) else rank + 2 if rank else 0


def _prefix(module: nn.Module) -> int:
    """How many class and register tokens a module has; there may be one for each branch."""
    tokens: dict[str, int] = {}
    if _TOKEN_LAST.match(type(module).__name__):
        return 0
    for name, parameter in parameters_of(module).items():
        if parameter is not None and (match := _PREFIX.match(name)):
            tokens[match.group()] = parameter.shape[-2] if parameter.ndim > 1 else 1
    return sum(tokens.values())
