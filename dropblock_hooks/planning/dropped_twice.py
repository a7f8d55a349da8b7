"""Finds layers where values are dropped twice: by one class twice in a list, or by the model too.

Two independent dropouts with the rates a and b together drop a share of 1 - (1 - a)(1 - b).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..attachment.resolve import Placement
from ..findings import Finding, Kind, Severity
from ..regularizers.retune import Retune, unit_dropped, unit_of
from ..selectors.index import Index
from ..tables import ranged
from .builtin import BuiltinRow, rates_of
from .table import highest_rate, range_of


def find_doubled(
    base: nn.Module,
    placements: Sequence[Placement],
    keys: Sequence[str],
) -> list[Finding]:
    """One finding for each reason.

    Args:
        base: the model.
        placements: the regularizers to be attached.
        keys: the key of each placement.
    """
    alike: dict[Any, dict[str, Placement]] = defaultdict(dict)
    for p, key in zip(placements, keys, strict=True):
        r = p.regularizer
        if unit_dropped(r) and highest_rate(r) and not p.target.form:
            alike[p.position[0], p.target.name, r.kind, r.at, r.index][key] = p
    droppers = _droppers(base, placements) if alike else {}
    shares: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for same in alike.values():
        p, *others = same.values()
        label = p.regularizer.label
        kept = math.prod(1 - highest_rate(each.regularizer) for each in same.values())
        if others and not getattr(p.entry.selector, "compose", False):
            reason = f"{label} stands {len(same)} times in one list", "Write one of them"
            shares[reason] |= dict.fromkeys(same, 1 - kept)
        own = _own_dropper(p, droppers)
        if own is not None:
            reason = (
                f"{label} drops where the model's own {own.type} drops",
                "Put Retune on that layer instead, or leave one of the two out",
            )
            shares[reason] |= dict.fromkeys(same, 1 - kept * (1 - own.rate))
    found = []
    for (why, cure), each in shares.items():
        text = f"{why}, {ranged(range_of(each.values()))} in all"
        found.append(Finding(Kind.DROPPED_TWICE, Severity.WARNING, tuple(each), text, cure))
    return found


def _droppers(base: nn.Module, placements: Sequence[Placement]) -> dict[str, BuiltinRow]:
    """The layers of a model that drop in training, at the rates that the placements set."""
    retuned = {
        (p.target.owner, p.attribute): highest_rate(p.regularizer)
        for p in placements
        if isinstance(p.regularizer, Retune)
    }
    found = {}
    for row in rates_of(Index(base)):
        name = "" if row.name == "." else row.name
        rate = retuned.get((name, row.attribute), row.rate)
        trains = row.on or row.rate == 0 or not base.training
        if rate > 0 and trains and not row.selector.startswith("attr:"):
            found[name] = replace(row, rate=rate)
    return found


def _own_dropper(p: Placement, droppers: Mapping[str, BuiltinRow]) -> BuiltinRow | None:
    """A layer of the model that drops the same values: this layer, or one of a block around it.

    Models keep the layers that drop samples or blocks as children of the block. The rate of whole
    samples and the rate of parts of a sample do not add up.
    """
    unit = unit_dropped(p.regularizer)
    for name in (p.target.name, *p.target.aliases):
        if name in droppers:
            units = {unit, unit_of(droppers[name].type)}
            if "samples" not in units or len(units) == 1:
                return droppers[name]
        if unit in ("samples", "blocks"):
            for other, row in droppers.items():
                block = other.rpartition(".")[0]
                around = other and (not block or f"{name}.".startswith(f"{block}."))
                if around and unit_of(row.type) == unit:
                    return row
    return None
