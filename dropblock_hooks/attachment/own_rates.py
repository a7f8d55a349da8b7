"""Layers that drop by themselves, matched by ``Retune``: what holds their rate, who acts there."""

from collections import defaultdict
from dataclasses import replace
from itertools import product

import torch
from torch import nn

from ..checks import closest
from ..quoting import listed, quote
from ..regularizers.droppers import (
    RATES,
    Drop,
    function_of,
    is_settable,
    rate_attribute,
    settable_rate,
    unit_dropped,
)
from ..regularizers.retune import Retune, Twin
from ..selectors.index import Index
from ..selectors.wrappers import bare_type
from ..sites.hooks import hooks_on
from ..sites.retune import own_rate_hooks
from .placement import Placement


def own_rates(placements: list[Placement], index: Index) -> tuple[list[Placement], list[str]]:
    """The placements, those of ``Retune`` with what holds the rate; and what is wrong with them."""
    found, problems = list(placements), list[str]()
    entries: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, p in enumerate(placements):
        if isinstance(p.target.module, torch.jit.ScriptModule):
            continue  # refused, whatever is put on it
        if isinstance(p.regularizer, Retune) and not p.target.parameter:
            entries[p.position].append(i)
        elif p.target.attribute:
            problems.append(
                f"{quote(p.entry.selector)}: attr: takes Retune alone, got {quote(p.regularizer)}"
            )
    for positions in entries.values():
        problems += _settle(found, positions, index)
    return found, [*dict.fromkeys(problems), *_held_twice(found), *_dropped_by_two(found)]


def _settle(found: list[Placement], positions: list[int], index: Index) -> list[str]:
    """Settle the placements of one entry; what is wrong with them."""
    reasons: dict[str, list[str]] = defaultdict(list)
    by_themselves: list[str] = []
    identities, donors = [], dict[str, Placement]()
    for i in positions:
        p = found[i]
        module = p.target.module
        attribute = p.target.attribute or rate_attribute(module)
        if attribute is None and isinstance(module, nn.Identity):
            identities.append(i)
            continue
        if attribute is None or not is_settable(module, attribute):
            reasons[_no_rate(module, attribute)].append(p.target.name)
            continue
        function = None if p.target.attribute else function_of(module, attribute)
        if function is None and p.regularizer.active == "always":
            by_themselves.append(p.target.name)
        found[i] = _settled(p, attribute, function)
        donors.setdefault(_local(p), found[i])
    for i in identities:
        p = found[i]
        donor = donors.get(_local(p))
        if donor is None:
            reasons[_of_identity(p, alone=not donors)].append(p.target.name)
            continue
        of_donor = donor.regularizer.function if isinstance(donor.regularizer, Retune) else None
        found[i] = _settled(p, None, of_donor or Twin(donor.target.module, str(donor.attribute)))
    first = found[positions[0]]
    about = f"{quote(first.entry.selector)}: {quote(first.regularizer)} can't work on"
    hint = _nearest(reasons, index)
    problems = [f"{about} {listed(names, 3)}: {why}{hint}" for why, names in reasons.items()]
    if by_themselves:
        why = "it drops by itself, in training mode: active='always' can't reach it"
        problems.append(f"{about} {listed(by_themselves, 3)}: {why}")
    return problems


def _settled(p: Placement, attribute: str | None, function: Drop | None) -> Placement:
    regularizer = p.regularizer
    assert isinstance(regularizer, Retune)
    return replace(p, regularizer=regularizer.acting_by(function), attribute=attribute)


def _local(p: Placement) -> str:
    return p.target.name.rpartition(".")[2]


def _no_rate(module: nn.Module, attribute: str | None) -> str:
    kind = bare_type(module).__name__
    if attribute is not None:
        return f"the {attribute} of {kind} is a property without a setter"
    held = {name: getattr(module, name) for name in RATES if hasattr(module, name)}
    if held:
        name, value = next(iter(held.items()))
        return f"the {name} of {kind} must be a number in [0, 1], and is {quote(value, 60)}"
    return f"a {kind} holds no rate ({', '.join(RATES)})"


def _of_identity(p: Placement, *, alone: bool) -> str:
    if alone:
        return (
            "it is an nn.Identity, which models put where a rate is 0, and no layer matched beside "
            "it tells what it stands for: to drop samples there, put DropPath(p=...) on it"
        )
    return "it is an nn.Identity, and no layer of this entry that drops has its name"


def _nearest(reasons: dict[str, list[str]], index: Index) -> str:
    """The layers with a rate that are nearest to the first one without."""
    if not reasons:
        return ""
    names = [name for group in reasons.values() for name in group]
    name = names[0]
    own = [n for n, t in index.attributes.items() if t.owner == name and "drop" in n]
    if own:
        return f"; it holds {listed((quote(f'attr:{n}') for n in own), 3)}"
    able = [
        n for n, t in index.modules.items() if n not in ("", *names) and settable_rate(t.module)
    ]
    inside = [n for n in able if not name or n.startswith(f"{name}.")]
    if inside:
        return f"; inside it, {listed(inside, 3)} drop"
    near = closest(name, able) or (f" (there are: {listed(able, 3)})" if able else "")
    return f"; builtin(model) lists what drops{near}" if near else "; nothing in this model does"


def _held_twice(placements: list[Placement]) -> list[str]:
    """A rate that two regularizers would set."""
    first: dict[tuple[int, str], str] = {}
    in_spec: dict[str, list[str]] = defaultdict(list)
    on_model: dict[str, list[str]] = defaultdict(list)
    for p in placements:
        if not isinstance(p.regularizer, Retune):
            continue
        module, held = p.target.module, p.attribute or ""
        here = quote(p.entry.selector)
        there = first.setdefault((id(module), held), here)
        if there is not here:
            in_spec[f"{there} and {here}"].append(p.target.name)
        for hook in own_rate_hooks(module):
            if (hook.attribute or "") == held:
                on_model[here].append(hook.site.key)
    return [
        *(
            f"{both}: both set {listed(names, 3)}; a rate is held by one entry"
            for both, names in in_spec.items()
        ),
        *(
            f"{here}: Retune is already on, as {listed(keys, 3)} of a live Attachment; call its "
            "remove(), or detach_all(model)"
            for here, keys in on_model.items()
        ),
    ]


def _dropped_by_two(placements: list[Placement]) -> list[str]:
    """Layers whose own rate is set, and that get another dropout besides."""
    layers: dict[nn.Module, list[Placement]] = defaultdict(list)
    for p in placements:
        layers[p.target.module].append(p)
    clashes: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for module, group in layers.items():
        new = [(quote(p.entry.selector), p.regularizer, p.attribute) for p in group]
        live = [
            (hook.site.key, hook.site.regularizer, getattr(hook, "attribute", None))
            for hook in hooks_on(module)
        ]
        for (a, own, attribute), (b, other, _) in [*product(new, new + live), *product(live, new)]:
            of_layer = attribute is None or attribute == rate_attribute(module)
            if isinstance(own, Retune) and of_layer and unit_dropped(other):
                clashes[a, b, other.label].append(group[0].target.owner)
    return [
        f"{a} and {b}: Retune and {other} both drop at {listed(names, 3)}; give Retune the rate "
        f"that is meant, and leave {other} out"
        for (a, b, other), names in clashes.items()
    ]
