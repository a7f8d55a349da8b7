"""Dropped twice: where a model drops by itself what a site drops again, and the rate of both.

Two shares a and b that are dropped independently of each other make 1 - (1 - a)(1 - b).
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..attachment.placement import Placement
from ..quoting import listed
from ..regularizers.droppers import rate_attribute, unit_dropped
from ..regularizers.retune import Retune
from ..selectors.select import Select
from ..selectors.wrappers import named_modules
from .droppers import Dropper, droppers, highest_rate

_SHORTCUTS = ("downsample", "shortcut", "skip")
_ARGUMENTS = {"samples": "drop_path_rate", "blocks": "drop_block_rate"}  # of the models of timm


def both(*rates: float) -> float:
    """The share that is dropped by all together."""
    return 1 - math.prod(1 - rate for rate in rates)


@dataclass(frozen=True)
class _Site:
    """What the list of one entry drops by one class on one tensor; what the model drops there."""

    placement: Placement  # the first
    keys: tuple[str, ...]
    rates: tuple[float, ...]
    own: Dropper | None


def find_doubled(
    base: nn.Module,
    placements: Sequence[Placement],
    keys: Sequence[str],
    met: Sequence[Collection[str]] = (),
    calls: Mapping[str, int] | None = None,
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What is dropped twice, as a text and the keys of sites; all of one kind in one text.

    Args:
        base: the model.
        placements: what is put on it.
        keys: the key of each.
        met: for each, layers whose input or output was its very tensor in a forward.
        calls: calls of all layers in that forward: what was not called drops nothing.
    """
    retunes = [p for p in placements if isinstance(p.regularizer, Retune) and _of_layer(p)]
    live = droppers(base, {p.target.module: highest_rate(p.regularizer) for p in retunes})
    if calls is not None:
        live = {name: dropper for name, dropper in live.items() if calls.get(name)}
    tensors = _Tensors(base, live) if live else None
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, p in enumerate(placements):
        r = p.regularizer
        if unit_dropped(r) and highest_rate(r) and not p.target.form:
            alike[p.position[0], p.target.name, r.kind, r.at, r.index].append(i)
    in_lists: dict[Any, list[_Site]] = defaultdict(list)
    in_model: dict[Any, list[_Site]] = defaultdict(list)
    for same in alike.values():
        p = placements[same[0]]
        r, selector = p.regularizer, p.entry.selector
        own = tensors.dropper_at(p, met[same[0]] if met else ()) if tensors else None
        rates = tuple(highest_rate(placements[i].regularizer) for i in same)
        site = _Site(p, tuple(keys[i] for i in same), rates, own)
        if len(same) > 1 and not (isinstance(selector, Select) and selector.compose):
            in_lists[p.position[0], r.kind, r.at, r.index].append(site)
        if own is not None:
            in_model[p.position, r.label, own.type, own.attribute].append(site)
    for told, groups in ((_of_list, in_lists), (_of_model, in_model)):
        for group in groups.values():
            names = listed((site.placement.target.name for site in group), 3)
            yield f"{told(group)}: {names}", tuple(key for site in group for key in site.keys)


def _of_layer(p: Placement) -> bool:
    """Whether what it sets is the rate of a layer, by whatever name."""
    return not p.target.form or p.attribute == rate_attribute(p.target.module)


def _of_list(sites: list[_Site]) -> str:
    """One class twice in the list of one entry."""
    rates = sites[0].rates
    return (
        f"{sites[0].placement.regularizer.label} stands {len(rates)} times in one list: "
        f"{' and '.join(f'{rate:.3g}' for rate in rates)} make {both(*rates):.3g} in all; "
        "write one of them with the rate that is meant"
    )


def _of_model(sites: list[_Site]) -> str:
    """What the model drops by itself."""
    own = [site.own for site in sites if site.own]
    text = (
        f"{sites[0].placement.regularizer.label} drops {_span(both(*s.rates) for s in sites)} "
        f"where the model's own {own[0].type} drops {_span(dropper.rate for dropper in own)}: "
        f"{_span(both(*s.rates, d.rate) for s, d in zip(sites, own, strict=True))} in all; "
    )
    return text + ("use Retune alone" if own[0].retuned else _advice(own, sites[0].rates[0]))


def _advice(own: Sequence[Dropper], rate: float) -> str:
    """What to do about layers of the model that drop."""
    first, names = own[0], list(dict.fromkeys(dropper.name for dropper in own))
    argument = _ARGUMENTS.get(first.unit)
    return (
        f"set the model's own rate to 0 (model.{first.name}.{first.attribute} = 0.0"
        f"{' and so on' if len(names) > 1 else ''}"
        f"{f', or make the model with {argument}=0' if argument else ''}), change it by "
        f'"{first.name}": Retune(p={rate:.3g}) alone, or use one of the two'
    )


def _span(values: Iterable[float]) -> str:
    values = list(values)
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


End = tuple[str, str]  # of a layer, by its name: its "input" or its "output"


class _Tensors:
    """Which inputs and outputs of layers are one tensor, as far as the modules alone tell."""

    def __init__(self, base: nn.Module, live: Mapping[str, Dropper]) -> None:
        self._live = live
        self._order = {name: i for i, (name, _) in enumerate(named_modules(base))}
        self._same: dict[End, End] = {}  # the same tensor, one step on
        for name, module in named_modules(base):
            if isinstance(module, torch.jit.ScriptModule):  # whose children are no modules of torch
                continue
            chain = [f"{name}.{child}" if name else child for child in module._modules]
            if isinstance(module, nn.Identity):
                self._join((name, "input"), (name, "output"))
            elif isinstance(module, nn.Sequential) and chain:
                self._join((name, "input"), (chain[0], "input"))
                for one, following in pairwise(chain):
                    self._join((one, "output"), (following, "input"))
                self._join((name, "output"), (chain[-1], "output"))
        self._dropped: dict[End, list[str]] = defaultdict(list)
        for name in live:
            for end in ("input", "output"):
                self._dropped[self._tensor((name, end))].append(name)

    def _tensor(self, end: End) -> End:
        while end in self._same:
            end = self._same[end]
        return end

    def _join(self, one: End, other: End) -> None:
        one, other = self._tensor(one), self._tensor(other)
        if one != other:
            self._same[one] = other

    def dropper_at(self, p: Placement, met: Iterable[str]) -> Dropper | None:
        """The layer that drops what is dropped here; `met` are others that it may be."""
        unit, at, found = unit_dropped(p.regularizer), p.regularizer.at, []
        for name in (p.target.name, *p.target.aliases):
            found += self._dropped.get(self._tensor((name, at)), [])
            found += self._in_block(name, at, unit) if unit in ("samples", "blocks") else []
        live = [self._live[name] for name in (*found, *met) if name in self._live]
        # whole samples and parts of them don't add up
        return next((d for d in live if d.unit == unit or "samples" not in (d.unit, unit)), None)

    def _in_block(self, name: str, at: str, unit: str) -> list[str]:
        """What drops the same, samples or blocks, in the block that this is, or is inside of.

        The blocks of models keep such layers as children of their own, in the order of their calls.
        """
        block_of = {n: n.rpartition(".")[0] for n, d in self._live.items() if d.unit == unit}
        here, ends = self._tensor((name, at)), unit == "blocks"  # a stage ends with its last block
        inside = [
            n
            for n, block in block_of.items()
            if block == name or (ends and self._tensor((block, at)) == here)
        ]
        above, own = name, inside[-1:]
        while above and not own:
            above, _, local = above.rpartition(".")
            if local in _SHORTCUTS and unit == "samples":
                break  # no branch
            own = [n for n, block in block_of.items() if block == above]
            own = [n for n in own if self._order[n] >= self._order[name]] or own
        return own[:1]
