"""Places a spec on a model: finds all of its faults, and then installs the hooks, all or none."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..axes.facts import Facts, ModelFacts
from ..axes.view import FIRST
from ..checks import as_count
from ..observers.base import Observer
from ..quoting import listed, quote
from ..regularizers.base import Regularizer
from ..regularizers.foreign import Retune, rate_attribute, unit_dropped
from ..schedules import length_of, placed
from ..selectors.index import Index, NoMatchError, Target
from ..selectors.select import match
from ..sites.held import ParameterHook, RetuneHook
from ..sites.hooks import ObserveHook, SiteHook, hooks_on
from ..sites.run import Run
from ..sites.site import Site
from ..spec.spec import Draft, Entry, SpecError
from .attachment import Attachment
from .faults import ModelHook

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


def place(
    model: nn.Module, draft: Draft, epochs: int | None = None
) -> tuple[list[Placement], list[str]]:
    """Resolve a spec on a model: the placements and the warnings, or a SpecError with all faults.

    Names begin at `model`; `epochs` is the length of the training.
    """
    if epochs is not None:
        as_count("epochs", epochs)
    index = Index(model)
    placements: list[Placement] = []
    problems = list(draft.problems)
    warnings: list[str] = []
    for i, entry in enumerate(draft.entries):
        where = f"{draft.places[i]}{quote(entry.selector)}"
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
        for j, regularizer in enumerate(entry.regularizers or ()):
            for target in targets:
                kinds = (ParameterHook,) if target.form == "param" else _HOOKS
                hook = next(kind for kind in kinds if isinstance(regularizer, kind.takes))
                fitted = hook.fitted(target, regularizer, model)
                placements.append(Placement(entry, (i, j), target, fitted, where, hook))
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


def _faults(placements: list[Placement]) -> list[str]:
    """The regularizers that can't work on their targets, or beside others; each reason once."""
    there: dict[nn.Module, list[tuple[Regularizer, str, str, int]]] = {}
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for p in placements:
        module, mine = p.target.module, p.regularizer
        why = next(filter(None, p.hook.refusals(p.target, mine)), None)
        if isinstance(module, torch.jit.ScriptModule):
            why = (
                "it is a ScriptModule, which takes no hooks: attach to the module that it was made "
                "from, and script that after remove(); or put it on a layer around it"
            )
        if why:
            found[f"{p.where}: {quote(mine)} can't work on", why].append(p.target.name)
        if module not in there:
            live = "a live Attachment"
            there[module] = [(h.site.regularizer, h.local, live, -1) for h in hooks_on(module)]
        composed = getattr(p.entry.selector, "compose", False)
        for other, local, where, entry in there[module]:
            one_rate = _set_one_rate(module, other, mine)
            twice = other.label == mine.label and local == p.target.local
            if one_rate or (twice and not composed and entry != p.position[0]):
                about = f"{where} and {p.where}: {other.label} and {mine.label} can't both be on"
                if entry < 0:
                    cure = _REMOVE if one_rate else _REMOVE + _COMPOSED
                else:
                    cure = (
                        "a layer has one rate" if one_rate else f"put them in one list{_COMPOSED}"
                    )
                found[about, cure].append(p.target.name)
                break
        there[module].append((mine, p.target.local, p.where, p.position[0]))
    return [f"{about} {listed(names, 3)}: {why}" for (about, why), names in found.items()]


def _set_one_rate(module: nn.Module, *two: Regularizer) -> bool:
    """Whether both set the same rate of the layer, or one sets it and the other drops too."""
    retuned = [each.attribute for each in two if isinstance(each, Retune)]
    if len(retuned) == 2:
        return retuned[0] == retuned[1]
    return any(map(unit_dropped, two)) and retuned == [rate_attribute(module)]


def _with_rates(
    placements: list[Placement], epochs: int | None, warnings: list[str], problems: list[str]
) -> list[Placement]:
    """Schedules without epochs follow the training; `ByDepth` is spread over its entry's layers."""
    sizes = Counter(p.position for p in placements)
    before: Counter[tuple[int, int]] = Counter()
    kept = []
    for p in placements:
        own, regularizer = p.regularizer.rates, p.regularizer
        for rate in own.values():
            length = length_of(rate) or 0
            if epochs is not None and length > epochs:
                text = f"takes {length:g} epochs, and the training has {epochs}"
                warnings.append(f"{p.where}: {quote(rate)} {text}: it does not reach its end")
        try:
            rates = placed(own, epochs, before[p.position], sizes[p.position])
            regularizer = regularizer.with_rates(**rates) if rates != own else regularizer
        except Exception as error:  # a schedule may be anybody's
            problems.append(f"{p.where}: {quote(p.regularizer)}: {error}")
        kept.append(replace(p, regularizer=regularizer))
        before[p.position] += 1
    return kept


def _nested(placements: list[Placement]) -> list[str]:
    """A warning of layers inside others with the same class, which applies to them twice."""
    layers = {
        (p.regularizer.label, p.target.name): p.where
        for p in placements
        if not p.target.form and not isinstance(p.regularizer, Retune | Observer)
    }
    inner = []
    for kind, name in layers:
        parts = name.split(".") if name else []
        if any((kind, ".".join(parts[:n])) in layers for n in range(len(parts))):
            inner.append((kind, name))
    if not inner:
        return []
    entries = ", ".join(dict.fromkeys(layers[each] for each in inner))
    kinds = ", ".join(dict.fromkeys(kind for kind, _ in inner))
    names = listed([name for _, name in inner], 3)
    return [
        f"{entries}: {kinds} is also on layers inside its layers ({names}), and applies again in "
        "each. In a selector, ** takes the layers inside too, * only one level"
    ]


def install(
    base: nn.Module,
    placements: list[Placement],
    run: Run,
    make: Callable[[Site, Placement], SiteHook] | None = None,
) -> Attachment:
    """Put the hooks of all placements on a model. If one fails, remove them all.

    `make` makes the hook of a site, whose class the placement knows. All sites share `run`.
    """
    installed = []
    for order, (key, p) in enumerate(zip(site_keys(placements), placements, strict=True)):
        site = Site(key, p.target, p.regularizer, run, p.facts)
        site.order, site.position, site.selector = order, p.position, str(p.entry.selector)
        hook = p.hook(site, p.target.local) if make is None else make(site, p)
        installed.append((p.target.module, hook))
    attachment = Attachment(base, run, installed)
    run.keys = tuple(site.key for site in attachment)
    run.sites = attachment.sites
    try:
        for module, hook in installed:
            hook.install(module)
        attachment._look()
        facts = [p.facts or Facts() for p in placements if (p.regularizer.spatial or 0) > 1]
        if facts:  # of maps, or of tokens
            run.grids.watch(base, all((each.own or each.inside) == FIRST for each in facts))
        run.model_hook = ModelHook(run, [hook for _, hook in installed], base)
        run.model_hook.put_on(base)
    except BaseException:
        attachment.remove()
        raise
    return attachment


def site_keys(placements: list[Placement]) -> list[str]:
    """The key of each site: its layer and its regularizer, and a number if that is not unique."""
    keys: list[str] = []
    repeated: Counter[str] = Counter()
    for p in placements:
        key = f"{p.target.name or '.'}/{p.regularizer.label}"
        repeated[key] += 1
        keys.append(key if repeated[key] == 1 else f"{key}#{repeated[key]}")
    return keys
