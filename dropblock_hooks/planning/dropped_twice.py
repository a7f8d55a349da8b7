"""Dropped twice: a class twice in one list, or a site where the model itself drops already.

Two shares a and b that are dropped independently of each other make 1 - (1 - a)(1 - b).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..attachment.placement import Placement
from ..quoting import listed
from ..regularizers.droppers import rate_attribute, unit_dropped
from ..regularizers.retune import Retune
from ..selectors.wrappers import find_module
from .droppers import Dropper, droppers, highest_rate

_SHORTCUTS = ("downsample", "shortcut", "skip")


def both(*rates: float) -> float:
    """The share that is dropped by all together."""
    return 1 - math.prod(1 - rate for rate in rates)


@dataclass(frozen=True)
class _Site:
    """What one list drops by one class on one tensor, and the layer that drops there as well."""

    name: str
    label: str
    keys: tuple[str, ...]
    rates: tuple[float, ...]
    own: Dropper | None


def find_doubled(
    base: nn.Module,
    placements: Sequence[Placement],
    keys: Sequence[str],
    calls: Mapping[str, int] | None = None,
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What is dropped twice, as a text and the keys of sites; all of one kind in one text.

    Args:
        base: the model.
        placements: what is put on it.
        keys: the key of each.
        calls: of all layers in a forward, if one was run: what is not called drops nothing.
    """
    retuned = {
        p.target.module: highest_rate(p.regularizer)
        for p in placements
        if isinstance(p.regularizer, Retune) and p.attribute == rate_attribute(p.target.module)
    }
    live = droppers(base, retuned)
    if calls is not None:
        live = {name: dropper for name, dropper in live.items() if calls.get(name)}
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, p in enumerate(placements):
        r = p.regularizer
        if unit_dropped(r) and highest_rate(r) and not p.target.form:
            alike[p.position[0], p.target.name, r.kind, r.at, r.index].append(i)
    in_lists: dict[Any, list[_Site]] = defaultdict(list)
    in_model: dict[Any, list[_Site]] = defaultdict(list)
    for (entry, name, kind, at, index), same in alike.items():
        p = placements[same[0]]
        rates = tuple(highest_rate(placements[i].regularizer) for i in same)
        own = next(filter(None, (_dropper(base, p, n, live) for n in _names(p))), None)
        site = _Site(name, p.regularizer.label, tuple(keys[i] for i in same), rates, own)
        if len(same) > 1 and not getattr(p.entry.selector, "compose", False):
            in_lists[entry, kind, at, index].append(site)
        if own is not None:
            in_model[p.position, kind, own.type].append(site)
    for told, groups in ((_of_list, in_lists), (_of_model, in_model)):
        for group in groups.values():
            names = listed((site.name for site in group), 3)
            yield f"{told(group)}: {names}", tuple(key for site in group for key in site.keys)


def _names(p: Placement) -> tuple[str, ...]:
    return p.target.name, *p.target.aliases


def _of_list(sites: list[_Site]) -> str:
    rates = sites[0].rates
    return (
        f"{sites[0].label} stands {len(rates)} times in one list: "
        f"{' and '.join(f'{rate:.3g}' for rate in rates)} make {both(*rates):.3g} in all. Write "
        "one of them, with the rate that you mean"
    )


def _of_model(sites: list[_Site]) -> str:
    own = [site.own for site in sites if site.own]
    return (
        f"{sites[0].label} drops {_span(both(*s.rates) for s in sites)} where the model's own "
        f"{own[0].type} drops {_span(dropper.rate for dropper in own)}: "
        f"{_span(both(*s.rates, d.rate) for s, d in zip(sites, own, strict=True))} in all. Use "
        f'"{own[0].name}": Retune(p={sites[0].rates[0]:.3g}) instead, or one of the two'
    )


def _span(values: Iterable[float]) -> str:
    values = list(values)
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _dropper(
    base: nn.Module, p: Placement, name: str, live: Mapping[str, Dropper]
) -> Dropper | None:
    """The layer that drops what is dropped at a layer: itself, its neighbor, or one of its block.

    Whole samples and parts of them do not add up.
    """
    unit, at = unit_dropped(p.regularizer), p.regularizer.at
    same = {n: d for n, d in live.items() if "samples" not in (d.unit, unit) or d.unit == unit}
    if name in same:
        return same[name]
    if unit in ("samples", "blocks"):
        alike = [dropper for dropper in live.values() if dropper.unit == unit]
        return _in_block(name, alike, inside=unit == "blocks")
    return same.get(_neighbor(base, name, 1 if at == "output" else -1))


def _neighbor(base: nn.Module, name: str, step: int) -> str:
    """The layer that a Sequential runs next to a layer, Identities aside; "" if there is none."""
    above, _, local = name.rpartition(".")
    parent = find_module(base, above)
    if not name or not isinstance(parent, nn.Sequential):
        return ""
    layers = list(parent._modules.items())[::step]
    behind = layers[[key for key, _ in layers].index(local) + 1 :]
    key = next((key for key, layer in behind if not isinstance(layer, nn.Identity)), "")
    return f"{above}.{key}" if above else key


def _in_block(name: str, droppers: Sequence[Dropper], *, inside: bool) -> Dropper | None:
    """What drops in the block that this layer is, or is inside of; `inside`: or in its blocks.

    Models keep such layers as children of their blocks.
    """
    if inside:
        below = [d for d in droppers if d.name.startswith(f"{name}." if name else "")]
        if below:
            return below[-1]
    block = name
    while True:
        found = [d for d in droppers if d.name.rpartition(".")[0] == block]
        if found or not block:
            return found[0] if found else None
        block, _, local = block.rpartition(".")
        if local in _SHORTCUTS:
            return None  # no branch
