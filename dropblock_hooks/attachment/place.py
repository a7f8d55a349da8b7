"""Places a spec on a model: finds all of its faults, then installs either all hooks or none."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..axes.facts import Facts, ModelFacts
from ..axes.view import FIRST
from ..checks import as_count
from ..diagnosis.endings import tell_at_end_of_process
from ..diagnosis.first import ForwardChecks
from ..observers.base import Observer
from ..quoting import listed, quote
from ..regularizers.base import Regularizer
from ..regularizers.foreign import Retune, rate_attribute, unit_dropped
from ..schedules import length_of, placed
from ..selectors.index import Index, NoMatchError, Target
from ..selectors.select import Select, match
from ..sites.held import ParameterHook, RetuneHook
from ..sites.hooks import ObserveHook, SiteHook, hooks_on
from ..sites.model_hook import ModelHook
from ..sites.run import Run
from ..sites.site import Site
from ..specs.spec import Draft, Entry, SpecError
from .attachment import Attachment

_REMOVE = "call its remove(), or run `from dropblock_hooks import detach_all; detach_all(model)`"
_COMPOSED = ", or allow it with Select(..., compose=True)"
_HOOKS = (RetuneHook, ObserveHook, SiteHook)  # the first one that takes a regularizer is used


@dataclass(frozen=True)
class Placement:
    """A regularizer of an entry on a layer, parameter or attribute."""

    entry: Entry
    position: tuple[int, int]  # the number of the entry, and of the regularizer in it
    target: Target
    regularizer: Regularizer
    where: str  # the selector of the entry, as messages quote it, after its line in a file
    hook: type[SiteHook]
    facts: Facts | None = None  # the axes of the layer, as the model shows them


@dataclass(frozen=True)
class _Occupant:
    """A regularizer on a module, which a placement may collide with."""

    regularizer: Regularizer
    local: str  # the name of the parameter or attribute within the module, "" for the layer
    where: str  # as messages name the entry, or the attachment
    entry: int | None  # the number of the entry; None for an attachment that is on the model


def place(
    model: nn.Module, draft: Draft, epochs: int | None = None
) -> tuple[list[Placement], list[str]]:
    """Resolve a spec on a model: the placements and the warnings, or a SpecError with all faults.

    Names begin at `model`; `epochs` is the length of the training.
    """
    if epochs is not None:
        as_count("epochs", epochs)

    index = Index(model)
    problems = list(draft.problems)
    warnings: list[str] = []
    placements = _resolve(draft, index, warnings, problems)
    problems += _faults(placements)
    placements = _with_rates(placements, epochs, warnings, problems)
    if problems:
        raise SpecError(dict.fromkeys(problems), draft.source)

    facts = ModelFacts(index)
    for i, p in enumerate(placements):
        if not p.target.form:
            placements[i] = replace(p, facts=facts.of(p.target, p.regularizer.at))
    warnings += _nested(placements)
    return placements, list(dict.fromkeys(warnings))


def _resolve(
    draft: Draft, index: Index, warnings: list[str], problems: list[str]
) -> list[Placement]:
    """Match the entries of a spec, in their order; add to the warnings and problems."""
    placements: list[Placement] = []
    for number, entry in enumerate(draft.entries):
        where = f"{draft.places[number]}{quote(entry.selector)}"
        try:
            targets = match(entry.selector, index)
        except NoMatchError as error:
            problems.append(f"{where}: {error}")
            continue

        if entry.regularizers is None:
            names = {target.name for target in targets}
            kept = [p for p in placements if p.target.name not in names]
            if len(kept) == len(placements):
                warnings.append(f"{where}: None clears nothing: no earlier entry is on it")
            placements = kept
            continue

        for i, regularizer in enumerate(entry.regularizers):
            for target in targets:
                hook = _hook_for(target, regularizer)
                fitted = hook.fitted(target, regularizer, index.model)
                placement = Placement(
                    entry=entry,
                    position=(number, i),
                    target=target,
                    regularizer=fitted,
                    where=where,
                    hook=hook,
                )
                placements.append(placement)
    return placements


def _hook_for(target: Target, regularizer: Regularizer) -> type[SiteHook]:
    """Return the class of the hook that puts a regularizer on a target."""
    kinds = (ParameterHook,) if target.form == "param" else _HOOKS
    return next(kind for kind in kinds if isinstance(regularizer, kind.takes))


def _faults(placements: list[Placement]) -> list[str]:
    """Find the regularizers that can't work on their targets, or beside others.

    Each reason is given once, with the names of all targets.
    """
    occupants: dict[nn.Module, list[_Occupant]] = {}
    names_by_fault: dict[tuple[str, str], list[str]] = defaultdict(list)
    for p in placements:
        module = p.target.module
        name = p.target.name

        refusal = _refusal(p)
        if refusal:
            about = f"{p.where}: {quote(p.regularizer)} can't work on"
            names_by_fault[about, refusal].append(name)

        if module not in occupants:
            occupants[module] = _live_occupants(module)
        collision = _collision(p, occupants[module])
        if collision is not None:
            names_by_fault[collision].append(name)

        entry_number, _ = p.position
        mine = _Occupant(p.regularizer, local=p.target.local, where=p.where, entry=entry_number)
        occupants[module].append(mine)
    return [f"{about} {listed(names, 3)}: {why}" for (about, why), names in names_by_fault.items()]


def _refusal(p: Placement) -> str | None:
    """Return why a regularizer can't work on its target; None if it can."""
    refusals = p.hook.refusals(p.target, p.regularizer)
    first = next(filter(None, refusals), None)
    if isinstance(p.target.module, torch.jit.ScriptModule):
        return (
            "it is a ScriptModule, which takes no hooks: attach to the module that it was made "
            "from, and script that after remove(); or put it on a layer around it"
        )
    return first


def _live_occupants(module: nn.Module) -> list[_Occupant]:
    """Return the regularizers of attachments that are on a module already."""
    return [
        _Occupant(hook.site.regularizer, local=hook.local, where="a live Attachment", entry=None)
        for hook in hooks_on(module)
    ]


def _collision(p: Placement, occupants: list[_Occupant]) -> tuple[str, str] | None:
    """Find the first regularizer that can't be on a module together with a placement.

    Returns what collides, and why or what to do; None if nothing collides.
    """
    mine = p.regularizer
    entry_number, _ = p.position
    selector = p.entry.selector
    composed = isinstance(selector, Select) and selector.compose
    for occupant in occupants:
        other = occupant.regularizer
        one_rate = _set_one_rate(p.target.module, other, mine)
        twice = other.label == mine.label and occupant.local == p.target.local
        may_be_twice = composed or occupant.entry == entry_number
        if one_rate or (twice and not may_be_twice):
            about = f"{occupant.where} and {p.where}: {other.label} and {mine.label}"
            is_live = occupant.entry is None
            return f"{about} can't both be on", _cure_of_collision(is_live, one_rate)
    return None


def _cure_of_collision(is_live: bool, one_rate: bool) -> str:
    """Say what to do about two regularizers that collide, or why they do."""
    if is_live:
        return _REMOVE if one_rate else _REMOVE + _COMPOSED
    return "a layer has one rate" if one_rate else f"put them in one list{_COMPOSED}"


def _set_one_rate(module: nn.Module, first: Regularizer, second: Regularizer) -> bool:
    """Return whether both set the same rate of the layer, or one sets it and the other drops."""
    both = (first, second)
    retuned = [item.attribute for item in both if isinstance(item, Retune)]
    if len(retuned) == 2:
        return retuned[0] == retuned[1]
    return any(map(unit_dropped, both)) and retuned == [rate_attribute(module)]


def _with_rates(
    placements: list[Placement], epochs: int | None, warnings: list[str], problems: list[str]
) -> list[Placement]:
    """Fit the schedules to the training and to the layers; add to the warnings and problems.

    A schedule without epochs follows the training. A `ByDepth` is spread over the layers of its
    entry.
    """
    sizes = Counter(p.position for p in placements)
    placed_before: Counter[tuple[int, int]] = Counter()
    fitted = []
    for p in placements:
        regularizer = p.regularizer
        rates = regularizer.rates
        if epochs is not None:
            warnings += _too_long(p, epochs)

        try:
            new_rates = placed(rates, epochs, placed_before[p.position], sizes[p.position])
            if new_rates != rates:
                regularizer = regularizer.with_rates(**new_rates)
        except Exception as error:  # a schedule may be anybody's
            problems.append(f"{p.where}: {quote(p.regularizer)}: {error}")

        fitted.append(replace(p, regularizer=regularizer))
        placed_before[p.position] += 1
    return fitted


def _too_long(p: Placement, epochs: int) -> list[str]:
    """Warn of the schedules of a placement that are longer than the training."""
    warnings = []
    for rate in p.regularizer.rates.values():
        length = length_of(rate) or 0
        if length > epochs:
            text = f"takes {length:g} epochs, and the training has {epochs}"
            warnings.append(f"{p.where}: {quote(rate)} {text}: it does not reach its end")
    return warnings


def _nested(placements: list[Placement]) -> list[str]:
    """Warn of layers inside others with the same class, because it applies to them twice."""
    layers = {
        (p.regularizer.label, p.target.name): p.where
        for p in placements
        if not p.target.form and not isinstance(p.regularizer, Retune | Observer)
    }
    inner = [
        (kind, name)
        for kind, name in layers
        if any((kind, parent) in layers for parent in _parents(name))
    ]
    if not inner:
        return []

    entries = ", ".join(dict.fromkeys(layers[layer] for layer in inner))
    kinds = ", ".join(dict.fromkeys(kind for kind, _ in inner))
    names = listed([name for _, name in inner], 3)
    return [
        f"{entries}: {kinds} is also on layers inside its layers ({names}), and applies again in "
        "each. In a selector, ** takes the layers inside too, * only one level"
    ]


def _parents(name: str) -> list[str]:
    """Return the names of all modules around a layer, from the model to the nearest one."""
    parts = name.split(".") if name else []
    return [".".join(parts[:n]) for n in range(len(parts))]


def install(
    base: nn.Module,
    placements: list[Placement],
    run: Run,
    make: Callable[[Site, Placement], SiteHook] | None = None,
) -> Attachment:
    """Put the hooks of all placements on a model. If one fails, remove them all.

    Args:
        base: the model.
        placements: of a spec on this model.
        run: the state that all sites share.
        make: makes the hook of a site; None uses the class that the placement knows.
    """
    installed = []
    keys = site_keys(placements)
    for order, (key, p) in enumerate(zip(keys, placements, strict=True)):
        site = Site(key, p.target, p.regularizer, run, p.facts)
        site.order = order
        site.position = p.position
        site.selector = str(p.entry.selector)
        hook = p.hook(site, p.target.local) if make is None else make(site, p)
        installed.append((p.target.module, hook))

    attachment = Attachment(base, run, installed)
    run.keys = tuple(keys)
    run.sites = attachment.sites
    try:
        for module, hook in installed:
            hook.install(module)
        attachment._look()
        _watch_maps(base, placements, run)
        hooks = [hook for _, hook in installed]
        run.model_hook = ModelHook(run, hooks, base, ForwardChecks())
        run.model_hook.put_on(base)
        tell_at_end_of_process(run.model_hook)
    except BaseException:
        attachment.remove()
        raise
    return attachment


def _watch_maps(base: nn.Module, placements: list[Placement], run: Run) -> None:
    """Keep the sizes of maps, if a regularizer acts on maps, or on tokens that were maps."""
    facts = [p.facts or Facts() for p in placements if (p.regularizer.spatial or 0) > 1]
    if facts:
        only_maps = all((fact.own or fact.inside) == FIRST for fact in facts)
        run.grids.watch(base, only_maps)


def site_keys(placements: list[Placement]) -> list[str]:
    """Return the key of each site: layer and regularizer, and a number if these are not unique."""
    keys: list[str] = []
    repeated: Counter[str] = Counter()
    for p in placements:
        key = f"{p.target.name or '.'}/{p.regularizer.label}"
        repeated[key] += 1
        keys.append(key if repeated[key] == 1 else f"{key}#{repeated[key]}")
    return keys
