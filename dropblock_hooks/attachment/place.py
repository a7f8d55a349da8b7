"""Places a spec on a model: finds all of its faults, and then installs the hooks, all or none."""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..axes.facts import Facts, ModelFacts
from ..checks import as_count
from ..observers.base import Observer
from ..quoting import label, listed, quote, shorten
from ..regularizers.base import Regularizer
from ..regularizers.retune import Retune, rate_attribute, unit_dropped
from ..schedules import UNSAID, length_of, spread_rate
from ..selectors.index import Index, NoMatchError, Target
from ..selectors.select import match
from ..sites.held import ParameterHook, RetuneHook
from ..sites.hooks import ObserveHook, SiteHook, hooks_on
from ..sites.run import Run
from ..sites.site import Site
from ..spec.spec import Draft, Entry, SpecError
from .attachment import Attachment
from .checks import ModelHook


@dataclass(frozen=True)
class Placement:
    """A regularizer of an entry on a layer, parameter or attribute."""

    entry: Entry
    position: tuple[int, int]  # the number of the entry, and of the regularizer in it
    target: Target
    regularizer: Regularizer
    where: str  # the selector of the entry, as messages quote it, after its line in a file
    facts: Facts | None = None  # the axes of the layer, as the model shows them

    @property
    def hook(self) -> type[SiteHook]:
        """The class of hook that the target and the regularizer need."""
        kinds = (ParameterHook,) if self.target.form == "param" else _HOOKS
        return next(kind for kind in kinds if isinstance(self.regularizer, kind.takes))


def place(
    model: nn.Module, draft: Draft, epochs: int | None = None
) -> tuple[list[Placement], list[str], list[str]]:
    """Resolve a spec on a model, or raise a SpecError with all of its faults.

    Names begin at `model`; `epochs` is the length of the training. Returns the placements, the
    warnings, and schedules that need the length of the training, which is not known.
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
            placements += [Placement(entry, (i, j), t, regularizer, where) for t in targets]
    placements = [
        replace(p, regularizer=p.hook.fitted(p.target, p.regularizer, model)) for p in placements
    ]
    problems += [*_refused(placements), *_conflicts(placements)]
    if problems:
        raise SpecError(problems, draft.source)
    unsaid: list[str] = []
    facts = ModelFacts(index)
    for i, p in enumerate(_with_rates(placements, epochs, warnings, unsaid)):
        known = None if p.target.form else facts.of(p.target, p.regularizer.at)
        placements[i] = replace(p, facts=known)
    warnings += _nested(placements)
    return placements, list(dict.fromkeys(warnings)), list(dict.fromkeys(unsaid))


def _refused(placements: list[Placement]) -> list[str]:
    """The regularizers that can't work on their targets, each reason once for an entry."""
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for p in placements:
        reason = next(filter(None, p.hook.refusals(p.target, p.regularizer)), None)
        if isinstance(p.target.module, torch.jit.ScriptModule):
            reason = (
                "it is a ScriptModule, which takes no hooks: attach to the module that it was made "
                "from, and script that after remove(); or put it on a layer around it"
            )
        if reason:
            about = f"{p.where}: {quote(p.regularizer)} can't work on"
            reasons[about, shorten(reason, 500)].append(p.target.name)
    return [f"{about} {listed(names, 3)}: {why}" for (about, why), names in reasons.items()]


def _conflicts(placements: list[Placement]) -> list[str]:
    """Targets with a class from two entries, or with two regularizers that set their own rate."""
    there: dict[nn.Module, list[tuple[Regularizer, str, str, int]]] = {}
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for p in placements:
        module, mine = p.target.module, p.regularizer
        if module not in there:
            live = "a live Attachment"
            there[module] = [(h.site.regularizer, h.local, live, -1) for h in hooks_on(module)]
        composed = getattr(p.entry.selector, "compose", False) or isinstance(mine, Retune)
        for other, local, where, entry in there[module]:
            one_rate = _set_one_rate(module, other, mine)
            twice = other.kind == mine.kind and local == p.target.local
            if not one_rate and (composed or not twice or entry == p.position[0]):
                continue
            cure = "A layer has one rate" if one_rate else "Put them in one list"
            if entry < 0:
                cure = "Call its remove(), or run `from dropblock_hooks import detach_all; "
                cure += "detach_all(model)`"
            cure += "" if one_rate else ", or allow it with Select(..., compose=True)"
            kinds = f"{other.label} and {mine.label}"
            found[f"{where} and {p.where}: {kinds}", cure].append(p.target.name)
            break
        there[module].append((mine, p.target.local, p.where, p.position[0]))
    return [
        f"{both} can't both be on {listed(names, 3)}. {cure}"
        for (both, cure), names in found.items()
    ]


def _set_one_rate(module: nn.Module, *two: Regularizer) -> bool:
    """Whether both set the same rate of the layer, or one sets it and the other drops too."""
    retuned = [each.attribute for each in two if isinstance(each, Retune)]
    if len(retuned) == 2:
        return retuned[0] == retuned[1]
    return any(map(unit_dropped, two)) and retuned == [rate_attribute(module)]


def _with_rates(
    placements: list[Placement], epochs: int | None, warnings: list[str], unsaid: list[str]
) -> Iterator[Placement]:
    """Schedules without epochs follow the training; `ByDepth` is spread over its entry's layers."""
    sizes = Counter(p.position for p in placements)
    before: Counter[tuple[int, int]] = Counter()
    for p in placements:
        own, rates = p.regularizer.rates, {}
        depth = before[p.position], sizes[p.position]
        before[p.position] += 1
        try:
            for name, rate in own.items():
                length = length_of(rate)
                if length is None and epochs is None:
                    unsaid.append(f"{p.where}: {quote(rate)}: {UNSAID}")
                elif length and epochs is not None and length > epochs:
                    text = f"takes {length:g} epochs, and the training has {epochs}"
                    warnings.append(f"{p.where}: {quote(rate)} {text}: it does not reach its end")
                rates[name] = spread_rate(rate, *depth, epochs)
            changed = any(rates[name] is not rate for name, rate in own.items())
            regularizer = p.regularizer.with_rates(**rates) if changed else p.regularizer
        except Exception as error:  # a schedule may be anybody's
            text = f"{p.where}: {quote(p.regularizer)} at {label(p.target.name)}: {error}"
            raise SpecError([text]) from error
        yield replace(p, regularizer=regularizer)


def _nested(placements: list[Placement]) -> list[str]:
    """A warning of layers inside others with the same class, which applies to them twice."""
    layers = {
        (p.regularizer.label, p.target.name): p.where
        for p in placements
        if not p.target.form and not isinstance(p.regularizer, Retune | Observer)
    }
    inner = [(kind, name) for kind, name in layers if _lies_inside(kind, name, layers)]
    if not inner:
        return []
    entries = ", ".join(dict.fromkeys(layers[each] for each in inner))
    return [
        f"{entries}: {len(inner)} layers lie inside others that have the same class "
        f"({listed([name for _, name in inner], 3)}), which applies again in each. In a selector, "
        "** takes the layers inside too, * only one level"
    ]


def _lies_inside(kind: str, name: str, layers: Container[tuple[str, str]]) -> bool:
    parts = name.split(".") if name else []
    return any((kind, ".".join(parts[:n])) in layers for n in range(len(parts)))


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
    run.keys = tuple(hook.site.key for _, hook in installed)
    attachment = Attachment(base, run, installed)
    try:
        for module, hook in installed:
            hook.install(module)
        attachment._look()
        if any((p.regularizer.spatial or 0) > 1 for p in placements):  # of maps, or of tokens
            run.grids.watch(base)
        base.register_forward_hook(ModelHook(run, [hook for _, hook in installed]))
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


_HOOKS = (RetuneHook, ObserveHook, SiteHook)
"""The hooks of layers and attributes; the first one that takes the regularizer is used."""
