"""Placements of ``Retune``: which attribute holds the rate, and whether a hook drops instead."""

from collections import defaultdict
from dataclasses import replace

import torch
from torch import nn

from ..quoting import listed, quote
from ..regularizers.base import Regularizer
from ..regularizers.droppers import (
    RATES,
    in_place_of,
    is_read,
    rate_attribute,
    unit_dropped,
)
from ..regularizers.retune import Retune
from ..selectors.index import Index
from ..selectors.wrappers import bare_type
from ..sites.hooks import SiteHook, hooks_on
from ..sites.retune import RetuneHook
from .placement import Placement


def with_own_rate(p: Placement, index: Index) -> tuple[Placement, str | None]:
    """The placement, for `Retune` with the attribute that holds the rate; and why it can't work."""
    module, kind, retune = p.target.module, bare_type(p.target.module).__name__, p.regularizer
    if p.target.parameter or isinstance(module, torch.jit.ScriptModule):
        return p, None  # refused, whatever is put on it
    if not isinstance(retune, Retune):
        return p, "attr: selectors take Retune only" if p.target.attribute else None
    attribute = p.target.attribute or rate_attribute(module)
    if attribute is None:
        return p, _no_rate(module, kind)
    base, names = index.modules[""].module, (p.target.name, *p.target.aliases)
    ours = None if p.target.attribute else in_place_of(module)
    if ours is not None and is_read(base, names, attribute):
        ours = None
    p = replace(p, regularizer=retune.acting_as(ours), attribute=attribute)
    if ours is None and retune.active == "always":
        return p, f"the {kind} itself drops, in training mode only: leave active='always' out"
    return p, None


def _no_rate(module: nn.Module, kind: str) -> str:
    if isinstance(module, nn.Identity):
        return (
            "it is an nn.Identity, which models put where a rate is 0. Put DropPath(p=...) on it, "
            "build the model without drop paths and use presets.drop_path(model, p), or select "
            "the other layers only, as in Select(names=..., types='DropPath')"
        )
    return (
        f"a {kind} has no {' or '.join(RATES)} that is a number in [0, 1] and can be set. "
        "builtin(model) lists all rates, with their selectors"
    )


def clashes(placements: list[Placement]) -> list[str]:
    """A layer has one rate: ``Retune`` beside another Retune or a dropout is an error."""
    layers: dict[nn.Module, list[Placement]] = defaultdict(list)
    for p in placements:
        layers[p.target.module].append(p)
    clashes: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
    for module, group in layers.items():
        there = [(h.site.key, h.site.regularizer, _held(h)) for h in hooks_on(module)]
        for p in group:
            here = quote(p.entry.selector), p.regularizer, p.attribute
            for name, other, held in there:
                if _same_rate(module, (other, held), here[1:]):
                    labels = f"{other.label} and {p.regularizer.label}"
                    clashes[name, here[0], labels][p.target.name] = None
            there.append(here)
    return [
        f"{a} and {b}: {labels} both set the rate of {listed(names, 3)}. A layer has one rate: "
        "leave one of them out, or call remove() of the Attachment that is on the model"
        for (a, b, labels), names in clashes.items()
    ]


def _held(hook: SiteHook) -> str | None:
    return hook.attribute if isinstance(hook, RetuneHook) else None


def _same_rate(module: nn.Module, *two: tuple[Regularizer, str | None]) -> bool:
    """Whether one of two sets the rate that the other sets, or drops at."""
    retuned = [held for regularizer, held in two if isinstance(regularizer, Retune)]
    if len(retuned) == 2:
        return retuned[0] == retuned[1]
    drops = any(unit_dropped(other) for other, _ in two if not isinstance(other, Retune))
    return drops and retuned == [rate_attribute(module)]
