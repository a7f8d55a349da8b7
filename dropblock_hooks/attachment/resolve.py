"""Placement: a spec resolved on a model and checked, before any hook goes in."""

from collections import defaultdict
from dataclasses import replace

import torch
from torch import nn

from ..axes.facts import ModelFacts
from ..checks import as_count
from ..observers.base import Observer
from ..quoting import described, label, listed, quote, shorten
from ..regularizers.base import Regularizer
from ..regularizers.retune import Retune
from ..schedules import UNSAID, length_of, spread_rate, within
from ..selectors.index import Index, NoMatchError, Target
from ..selectors.select import Select, Selector, match
from ..selectors.wrappers import shard_refusal
from ..sites.hooks import hooks_on
from ..spec.spec import Draft, SpecError
from .own_rates import clashes, with_own_rate
from .placement import Placement

CURE = "from dropblock_hooks import detach_all; detach_all(model)"


def place(
    model: nn.Module, draft: Draft, epochs: int | None = None
) -> tuple[list[Placement], list[str]]:
    """All placements of a spec on a model, in the order of the spec, and warnings.

    Names begin at `model`; `epochs` is the length of the training, if that is known.

    Raises:
        SpecError: with all that is wrong.
    """
    index = Index(model)
    placements: list[Placement] = []
    problems = list(draft.problems)
    warnings: list[str] = []
    for i, entry in enumerate(draft.entries):
        try:
            targets = match(entry.selector, index)
        except NoMatchError as error:
            problems.append(f"{quote(entry.selector)}: {error}")
            draft.cause = draft.cause or error.__cause__
            continue
        if entry.regularizers is None:
            names = {target.name for target in targets}
            kept = [p for p in placements if p.target.name not in names]
            if len(kept) == len(placements):
                warnings.append(
                    f"{quote(entry.selector)}: None clears nothing: no earlier entry is on it"
                )
            placements = kept
            continue
        for j, regularizer in enumerate(entry.regularizers):
            placements += [Placement(entry, (i, j), target, regularizer) for target in targets]
    settled = [with_own_rate(p, index) for p in placements]
    placements = [p for p, _ in settled]
    problems += [*_refused(settled), *clashes(placements), *_twice(placements)]
    if problems:
        raise draft.error(problems)
    warnings += [*_too_long(placements, epochs), *_nested(placements, index)]
    facts = ModelFacts(index)
    placements = [
        p if p.target.form else replace(p, facts=facts.of(p.target, p.regularizer.at))
        for p in _with_rates(placements, epochs)
    ]
    return placements, warnings


def checked_epochs(epochs: int | None) -> int | None:
    """The length of a training, if it is one."""
    return None if epochs is None else as_count("epochs", epochs)


def without_epochs(placements: list[Placement]) -> list[str]:
    """The entries with schedules that wait to be told how long the training is."""
    found = {
        f"{quote(p.entry.selector)}: {quote(_as_written(p).rates[name])}: {UNSAID}": None
        for p in placements
        for name, rate in p.regularizer.rates.items()
        if length_of(rate) is None
    }
    return list(found)


def _as_written(p: Placement) -> Regularizer:
    """The regularizer of the entry, before its rates were spread over layers."""
    return (p.entry.regularizers or (p.regularizer,))[p.position[1]]


def _too_long(placements: list[Placement], epochs: int | None) -> list[str]:
    """The entries with schedules that are longer than the training."""
    found = {
        f"{quote(p.entry.selector)}: {quote(rate)} takes {length:g} epochs, and the training has "
        f"{epochs}: it does not come to its end": None
        for p in placements
        for rate in _as_written(p).rates.values()
        if epochs is not None and (length := length_of(rate) or 0.0) > epochs
    }
    return list(found)


def _refused(settled: list[tuple[Placement, str | None]]) -> list[str]:
    """What can't work where it was put, the same reason once for each entry."""
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for p, reason in settled:
        try:
            reason = reason or _refusal(p.regularizer, p.target)
            hash((p.regularizer.kind, p.regularizer.label, *p.regularizer.rates))
        except Exception as error:  # somebody's class may raise anything
            reason = f"asking it raised {described(error)}"
        if reason:
            about = f"{quote(p.entry.selector)}: {quote(p.regularizer)} can't work on"
            reasons[about, shorten(reason, 500)].append(p.target.name)
    return [f"{about} {listed(names, 3)}: {why}" for (about, why), names in reasons.items()]


def _refusal(regularizer: Regularizer, target: Target) -> str | None:
    parameter = target.module._parameters[target.parameter] if target.parameter else None
    if isinstance(target.module, torch.jit.ScriptModule):
        return (
            "it is a ScriptModule, which takes no hooks: attach to the module that it was made "
            "from, and script that after remove(); or put it on a layer around it"
        )
    if parameter is not None:
        if regularizer.acts_on != "gradient":
            return "param: takes regularizers of gradients"
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            return "the parameter is not initialized: run a forward first"
        if parameter.is_complex():
            return "the parameter is complex: only gradients of real parameters are regularized"
        if not parameter.requires_grad:
            return "the parameter is frozen (requires_grad is False), it gets no gradient"
        if regularizer.at != "output" or regularizer.index is not None:
            return "at= and index= mean nothing for a parameter"
        sharded = shard_refusal(target.module)
        if sharded is not None:
            return sharded
    elif regularizer.accumulates:
        return "what acts once per update is for parameters: write param: before the selector"
    return regularizer.refusal(target.module, parameter)


def _twice(placements: list[Placement]) -> list[str]:
    """The same class on one layer: from two entries, or from an Attachment that is still live."""
    first: dict[tuple[str, object], Placement] = {}
    clashes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for p in placements:
        if isinstance(p.regularizer, Retune):
            continue  # a rate is held by one entry, whatever names it
        kind, what = p.regularizer.kind, p.regularizer.label
        there = first.setdefault((p.target.name, kind), p)
        if isinstance(p.entry.selector, Select) and p.entry.selector.compose:
            continue
        if there.position[0] != p.position[0]:
            pair = f"{quote(there.entry.selector)} and {quote(p.entry.selector)}"
            problem = f"{pair}: both put {what} on", "; put them in one list"
            clashes[problem].append(p.target.name)
        for hook in hooks_on(p.target.module):
            if hook.parameter == p.target.parameter and hook.site.regularizer.kind == kind:
                problem = (
                    f"{quote(p.entry.selector)}: {what} is already on, as",
                    f" of a live Attachment; call its remove(), or run `{CURE}`",
                )
                clashes[problem].append(hook.site.key)
    return [
        f"{start} {listed(names, 3)}{end}, or allow it with Select(..., compose=True)"
        for (start, end), names in clashes.items()
    ]


def _with_rates(placements: list[Placement], epochs: int | None) -> list[Placement]:
    """Schedules without epochs follow the training; `ByDepth` is spread over its entry's layers."""
    groups: dict[tuple[int, int], list[Placement]] = defaultdict(list)
    for p in placements:
        groups[p.position].append(p)
    changed: dict[int, Placement] = {}
    for group in groups.values():
        for i, p in enumerate(group):
            rates = dict(p.regularizer.rates)
            try:
                for name, rate in rates.items():
                    timed = rate if epochs is None else within(rate, epochs)
                    rates[name] = spread_rate(timed, i, len(group))
                if any(rates[name] is not rate for name, rate in p.regularizer.rates.items()):
                    changed[id(p)] = replace(p, regularizer=p.regularizer.with_rates(**rates))
            except Exception as error:  # a schedule may be anybody's
                where = f"{quote(p.regularizer)} at {label(p.target.name)}"
                raise SpecError([f"{quote(p.entry.selector)}: {where}: {error}"]) from error
    return [changed.get(id(p), p) for p in placements]


def _nested(placements: list[Placement], index: Index) -> list[str]:
    """Sites of one class inside one another, which drop again what is left."""
    by_label: dict[str, list[Placement]] = defaultdict(list)
    for p in placements:
        if not p.target.form and not isinstance(p.regularizer, Retune | Observer):
            by_label[p.regularizer.label].append(p)
    warnings = []
    for name, group in by_label.items():
        names = {p.target.name for p in group}
        inner = [p for p in group if _ancestors(p.target.name) & names]
        if inner:
            selectors = dict.fromkeys(quote(p.entry.selector) for p in group)
            some = listed((p.target.name for p in inner), 3)
            warnings.append(
                f"{', '.join(selectors)}: {name} is put on {len(names)} layers of which "
                f"{len(inner)} lie inside others ({some}), and applies again in each"
                f"{_likelier(inner[0].entry.selector, index)}"
            )
    return warnings


def _ancestors(name: str) -> set[str]:
    parts = name.split(".") if name else []
    return {".".join(parts[:cut]) for cut in range(len(parts))}


def _likelier(selector: Selector, index: Index) -> str:
    if not isinstance(selector, str) or not selector.endswith("**"):
        return ""
    likelier = selector[:-1]
    try:
        n = len(match(likelier, index))
    except NoMatchError:
        return ""
    return f"; did you mean {quote(likelier)} ({n} layers)?"
