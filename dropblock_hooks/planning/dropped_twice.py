"""Dropped twice: a class twice in one list, or a site where the model itself drops already.

Two shares a and b that are dropped independently of each other make 1 - (1 - a)(1 - b).
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..attachment.placement import Placement
from ..quoting import listed
from ..regularizers.droppers import unit_dropped, unit_of
from ..regularizers.retune import Retune
from ..selectors.wrappers import find_module
from .builtin import builtin
from .rates import highest_rate

_SHORTCUTS = ("downsample", "shortcut", "skip")


@dataclass
class _Group:
    """Sites that drop twice for the same reason: their names, keys, and shares in all."""

    cure: str
    names: list[str] = field(default_factory=list)
    keys: tuple[str, ...] = ()
    shares: list[float] = field(default_factory=list)


def find_doubled(
    base: nn.Module,
    placements: Sequence[Placement],
    keys: Sequence[str],
    calls: Mapping[str, int] | None = None,
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Sites where values are dropped twice: a text for each kind, and the keys of its sites.

    Args:
        base: the model.
        placements: the regularizers to be attached.
        keys: the key of each placement.
        calls: the calls of all layers in a forward; layers that are not called drop nothing.
    """
    live = _droppers(base, placements)
    if calls is not None:
        live = {name: dropper for name, dropper in live.items() if calls.get(name)}
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, p in enumerate(placements):
        r = p.regularizer
        if unit_dropped(r) and highest_rate(r) and not p.target.form:
            alike[p.position[0], p.target.name, r.kind, r.at, r.index].append(i)
    groups: dict[Any, _Group] = {}
    for (entry, name, kind, *_), same in alike.items():
        p, label = placements[same[0]], placements[same[0]].regularizer.label
        rates = [highest_rate(placements[i].regularizer) for i in same]
        found = []
        if len(same) > 1 and not getattr(p.entry.selector, "compose", False):
            cure = "Write one of them, with the rate that you mean"
            found.append((f"{label} stands {len(same)} times in one list", cure, rates))
        names = name, *p.target.aliases
        own = next(filter(None, (_dropper(base, p, each, live) for each in names)), None)
        if own is not None:
            cure = f'Use "{own.name}": Retune(p={rates[0]:.3g}) instead, or one of the two'
            why = f"{label} drops where the model's own {own.type} drops"
            found.append((why, cure, [*rates, own.rate]))
        for why, cure, shares in found:
            group = groups.setdefault((entry, kind, why), _Group(cure))
            group.names.append(name)
            group.keys += tuple(keys[i] for i in same)
            group.shares.append(1 - math.prod(1 - share for share in shares))
    for (*_, why), group in groups.items():
        low, high = f"{min(group.shares):.3g}", f"{max(group.shares):.3g}"
        share = low if low == high else f"{low} to {high}"
        yield f"{why}: {share} in all. {group.cure}: {listed(group.names, 3)}", group.keys


@dataclass(frozen=True)
class _Dropper:
    """A layer of the model that drops in training, and its rate; `unit` as in `unit_of`."""

    name: str
    type: str
    rate: float
    unit: str | None


def _droppers(base: nn.Module, placements: Sequence[Placement]) -> dict[str, _Dropper]:
    """The layers of a model that drop in training, by name, at the rates that placements set."""
    retuned = {
        (p.target.owner, p.attribute): highest_rate(p.regularizer)
        for p in placements
        if isinstance(p.regularizer, Retune)
    }
    found = {}
    for row in builtin(base).rows:
        name = "" if row.name == "." else row.name
        rate = retuned.get((name, row.attribute), row.rate)
        trains = row.on or row.rate == 0 or not base.training
        if rate > 0 and trains and not row.selector.startswith("attr:"):
            found[name] = _Dropper(name, row.type, rate, unit_of(row.type))
    return found


def _dropper(
    base: nn.Module, p: Placement, name: str, live: Mapping[str, _Dropper]
) -> _Dropper | None:
    """The layer of the model that drops the same values: this one, a neighbor, or one in its block.

    Rates of whole samples and of parts of samples do not add up.
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
    """The next layer in the same Sequential, without Identities; "" if there is none."""
    above, _, local = name.rpartition(".")
    parent = find_module(base, above)
    if not name or not isinstance(parent, nn.Sequential):
        return ""
    layers = list(parent._modules.items())[::step]
    behind = layers[[key for key, _ in layers].index(local) + 1 :]
    key = next((key for key, layer in behind if not isinstance(layer, nn.Identity)), "")
    return f"{above}.{key}" if above else key


def _in_block(name: str, droppers: Sequence[_Dropper], *, inside: bool) -> _Dropper | None:
    """A layer that drops in the block that this layer is or belongs to.

    Models keep such layers as children of their blocks. With `inside`, blocks inside of this layer
    count as well.
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
            return None  # a shortcut, not the branch
