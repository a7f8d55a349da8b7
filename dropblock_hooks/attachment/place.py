"""Places a spec on a model: finds all of its faults, then installs either all hooks or none.

``attach`` calls `place` and then `install`. `plan` calls both, too, and installs the hooks on a
copy. `call_once` installs them on the model itself, and removes them after one call.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields

import torch
from torch import nn

from ..axes.facts import Facts, ModelFacts
from ..axes.view import FIRST
from ..checks import as_count
from ..diagnosis.at_end import remember_until_exit
from ..diagnosis.first import ForwardChecks
from ..observers.base import Observer
from ..quoting import listed, quote, with_article
from ..regularizers.base import Regularizer
from ..regularizers.foreign import Retune
from ..regularizers.memory import WithMemory
from ..schedules import longer_than, rates_at_depth
from ..selectors.dropouts import rate_attribute
from ..selectors.index import Index, NoMatchError, Target
from ..selectors.kinds import ATTRIBUTE, LAYER, PARAMETER, TargetKind
from ..selectors.select import ROOT, Select, Selector, match
from ..sites.held import FreezeHook, ParameterHook, RetuneHook
from ..sites.hooks import ObserveHook, SiteHook, hooks_on
from ..sites.model_hook import ModelHook
from ..sites.run import Run
from ..sites.site import LiveSite
from ..specs.spec import Draft, Entry, SpecError
from .attachment import Attachment

# the hooks for each kind of target; the first one that takes a regularizer is used
HOOKS: dict[TargetKind, tuple[type[SiteHook], ...]] = {
    LAYER: (RetuneHook, FreezeHook, ObserveHook, SiteHook),
    PARAMETER: (ParameterHook,),
    ATTRIBUTE: (RetuneHook,),
}

_REMOVE = (
    "call attached.remove() first, or run `from dropblock_hooks import detach_all; "
    "detach_all(model)`"
)
_COMPOSED = "or allow it with Select(..., compose=True)"
_DEFAULTS = {f.name: f.default for f in fields(Regularizer)}  # the defaults of common options


@dataclass
class Placement:
    """A regularizer of an entry on a layer, parameter or attribute.

    Attributes:
        entry: the entry of the spec.
        position: the number of the entry, and of the regularizer in it.
        target: the layer, parameter or attribute.
        regularizer: the regularizer, fitted to the target by `_fit_rates`.
        where: the line in a file, if any, and the selector of the entry, for messages.
        hook: the class of the hook.
        key: the key of the site; "" until `_describe` sets it.
        facts: facts about the axes of the layer; None until `_describe` reads them.
    """

    entry: Entry
    position: tuple[int, int]
    target: Target
    regularizer: Regularizer
    where: str
    hook: type[SiteHook]
    key: str = ""
    facts: Facts | None = None


@dataclass
class Resolved:
    """A spec that was matched with a model: its placements, problems and warnings so far."""

    placements: list[Placement] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Occupant:
    """A regularizer on a module, which may collide with a placement."""

    regularizer: Regularizer
    local: str  # the name of the parameter or attribute within the module; "" for the layer
    where: str  # the name of the entry or of the attachment in messages
    entry: int | None  # the number of the entry; None for an earlier attachment


def place(
    index: Index, draft: Draft, epochs: int | None = None
) -> tuple[list[Placement], list[str]]:
    """Resolve a spec and judge it; return the placements and the warnings.

    Args:
        index: the names of the model.
        draft: the spec.
        epochs: the length of the training.

    Raises:
        SpecError: with all faults of the spec.
    """
    resolved = resolve(index, draft, epochs)
    problems = [*resolved.problems, *judge(resolved.placements)]
    if problems:
        raise SpecError(dict.fromkeys(problems), draft.source)

    placements = resolved.placements
    _describe(index, placements)
    warnings = [*resolved.warnings, *_nested(placements)]
    return placements, list(dict.fromkeys(warnings))


def resolve(index: Index, draft: Draft, epochs: int | None = None) -> Resolved:
    """Match the entries of a spec, in their order, and fit their schedules to the model."""
    if epochs is not None:
        as_count("epochs", epochs)

    resolved = Resolved(problems=list(draft.problems))
    for number, entry in enumerate(draft.entries):
        where = f"{draft.places[number]}{quote(entry.selector)}"
        try:
            targets = match(entry.selector, index)
        except NoMatchError as error:
            resolved.problems.append(_unmatched(where, entry.selector, error))
            continue

        if entry.regularizers is None:
            _clear(resolved, targets, where)
        else:
            resolved.placements += _placements_of(index, entry, number, targets, where)

    _fit_rates(resolved, epochs)
    return resolved


def _unmatched(where: str, selector: Selector, error: NoMatchError) -> str:
    """Return the problem of an entry that matches nothing. It names the selector once."""
    text = str(error)
    name = quote(selector)
    if text.startswith(f"{name} "):
        return where + text.removeprefix(name)
    return f"{where}: {text}"


def _clear(resolved: Resolved, targets: list[Target], where: str) -> None:
    """Apply an entry with None: remove the placements of earlier entries from these targets."""
    names = {target.name for target in targets}
    remaining = [p for p in resolved.placements if p.target.name not in names]
    if len(remaining) == len(resolved.placements):
        resolved.warnings.append(
            f"{where}: None has no effect: no earlier entry selects these layers"
        )
    resolved.placements = remaining


def _placements_of(
    index: Index, entry: Entry, number: int, targets: list[Target], where: str
) -> Iterator[Placement]:
    """Make the placements of an entry: all of its regularizers on all targets."""
    for i, regularizer in enumerate(entry.regularizers or ()):
        for target in targets:
            hook = _hook_for(target.kind, regularizer)
            fitted = regularizer
            if isinstance(regularizer, hook.takes):
                fitted = hook.fitted(target, regularizer, index)
            yield Placement(
                entry=entry,
                position=(number, i),
                target=target,
                regularizer=fitted,
                where=where,
                hook=hook,
            )


def _hook_for(kind: TargetKind, regularizer: Regularizer) -> type[SiteHook]:
    """Return the class of the hook that puts a regularizer on a target of this kind.

    If no hook takes it, the last one is returned, and `judge` refuses the placement.
    """
    hooks = HOOKS[kind]
    return next((hook for hook in hooks if isinstance(regularizer, hook.takes)), hooks[-1])


def judge(placements: list[Placement]) -> list[str]:
    """Find the regularizers that can't work on their targets, or together with others.

    A reason is listed once, with the names of all targets.
    """
    occupants: dict[nn.Module, list[_Occupant]] = {}
    names_by_fault: dict[tuple[str, str], list[str]] = defaultdict(list)
    for p in placements:
        module = p.target.module
        name = p.target.name

        refusal = next(_refusals(p), None)
        if refusal:
            about = f"{p.where}: {quote(p.regularizer)} can't work on"
            names_by_fault[about, refusal].append(name)

        if module not in occupants:
            occupants[module] = _live_occupants(module)
        collision = _collision(p, occupants[module])
        if collision is not None:
            names_by_fault[collision].append(name)

        entry_number, _ = p.position
        occupant = _Occupant(p.regularizer, local=p.target.local, where=p.where, entry=entry_number)
        occupants[module].append(occupant)
    return [f"{about} {listed(names, 3)}: {why}" for (about, why), names in names_by_fault.items()]


def _refusals(p: Placement) -> Iterator[str]:
    """Yield why a regularizer can't work on its target; nothing if it can."""
    target = p.target
    if isinstance(target.module, torch.jit.ScriptModule):
        yield (
            "it is a ScriptModule, which takes no hooks: attach to the module that it was made "
            "from, and script that after remove(); or put it on a layer around it"
        )
    if not isinstance(p.regularizer, p.hook.takes):
        noun = target.kind.noun
        yield f"{with_article(noun)} takes only {_taken_by(target.kind)}"
        return

    if target.kind.is_layer and p.regularizer.accumulates:
        text = "a regularizer that acts once per update is for parameters"
        yield f"{text}: write {_of_parameters(p.entry.selector)}"
    yield from filter(None, p.hook.refusals(target, p.regularizer))
    stated = [
        f"{name}="
        for name in target.kind.no_options
        if getattr(p.regularizer, name) != _DEFAULTS[name]
    ]
    if stated:
        is_one = len(stated) == 1
        means = "means" if is_one else "mean"
        which = "it" if is_one else "them"
        noun = target.kind.noun
        names = " and ".join(stated)
        yield f"{names} {means} nothing for {with_article(noun)}: leave {which} out"


def _of_parameters(selector: Selector) -> str:
    """Return the selector of the parameters of the layers that a selector matches."""
    is_name_or_glob = isinstance(selector, str) and ":" not in selector
    if not is_name_or_glob:
        return "'param:NAME.**', with the names of these layers"

    if selector in (ROOT, "*", "**"):
        return "'param:**'"
    names = str(selector).removesuffix(".**").removesuffix(".*")
    return quote(f"param:{names}.**")


def _taken_by(kind: TargetKind) -> str:
    """Name the classes that the hooks of a kind of target take."""
    names = dict.fromkeys(hook.takes.__name__ for hook in HOOKS[kind])
    return " or ".join(names)


def _live_occupants(module: nn.Module) -> list[_Occupant]:
    """Return the regularizers of earlier attachments on a module."""
    return [
        _Occupant(hook.site.regularizer, local=hook.local, where="an earlier attach", entry=None)
        for hook in hooks_on(module)
    ]


def _collision(p: Placement, occupants: list[_Occupant]) -> tuple[str, str] | None:
    """Find the first regularizer that can't be on a module together with a placement.

    It returns the description of the collision, and the reason or the cure; None without one.
    """
    regularizer = p.regularizer
    entry_number, _ = p.position
    selector = p.entry.selector
    composed = isinstance(selector, Select) and selector.compose
    for occupant in occupants:
        other = occupant.regularizer
        is_live = occupant.entry is None
        same_value = occupant.local == p.target.local
        labels = f"{other.label} and {regularizer.label}"
        about = f"{occupant.where} and {p.where}: {labels} can't both be on"
        if same_value and _both_clip_by_memory(other, regularizer):
            return about, "a parameter has one clipping with a memory"

        one_rate = _share_one_rate(p.target.module, other, regularizer)
        twice = other.label == regularizer.label and same_value
        may_be_twice = composed or occupant.entry == entry_number
        if one_rate or (twice and not may_be_twice):
            if is_live:
                about = f"{p.where}: an earlier attach has put {other.label} on"
            return about, _cure_of_collision(is_live, one_rate)
    return None


def _both_clip_by_memory(first: Regularizer, second: Regularizer) -> bool:
    """Return whether both clip the same gradient by the norms of earlier updates."""
    return all(isinstance(item, WithMemory) and item.clips for item in (first, second))


def _cure_of_collision(is_live: bool, one_rate: bool) -> str:
    """Return the cure for two regularizers that collide, or the reason."""
    if is_live:
        return _REMOVE if one_rate else f"{_REMOVE}, {_COMPOSED} in this entry"
    if one_rate:
        return "a layer has one rate"
    return f"put them in one list, {_COMPOSED} in the later entry"


def _share_one_rate(module: nn.Module, first: Regularizer, second: Regularizer) -> bool:
    """Return whether both set the same rate of the layer, or one sets it and the other drops."""
    both = (first, second)
    retuned = [item.attribute for item in both if isinstance(item, Retune)]
    if len(retuned) == 2:
        return retuned[0] == retuned[1]
    drops = any(item.unit is not None for item in both)  # an `item` without a unit drops nothing
    # a Retune of another attribute leaves the layer's own rate alone
    return drops and retuned == [rate_attribute(module)]


def _fit_rates(resolved: Resolved, epochs: int | None) -> None:
    """Fit the schedules to the training and to the layers.

    A schedule without epochs follows the training. A `ByDepth` is spread over the layers of its
    entry.
    """
    sizes = Counter(p.position for p in resolved.placements)
    placed_before: Counter[tuple[int, int]] = Counter()
    for p in resolved.placements:
        rates = p.regularizer.rates
        try:
            if epochs is not None:
                too_long = longer_than(epochs, rates)
                resolved.warnings += [f"{p.where}: {text}" for text in too_long]
            new_rates = rates_at_depth(
                rates, epochs, i=placed_before[p.position], n=sizes[p.position]
            )
            if new_rates != rates:
                p.regularizer = p.regularizer.with_rates(**new_rates)
        except Exception as error:  # a schedule may be anybody's
            resolved.problems.append(f"{p.where}: {quote(p.regularizer)}: {error}")

        placed_before[p.position] += 1


def _describe(index: Index, placements: list[Placement]) -> None:
    """Set the key of the site and the facts of the layer of each placement.

    The key has the layer and the regularizer, and a number if these two are not unique.
    """
    facts = ModelFacts(index)
    repeated: Counter[str] = Counter()
    for p in placements:
        target = p.target
        key = f"{target.name or '.'}/{p.regularizer.label}"
        repeated[key] += 1
        number = repeated[key]
        p.key = key if number == 1 else f"{key}#{number}"
        if target.kind.is_layer:
            p.facts = facts.of(target, p.regularizer.at)


def _nested(placements: list[Placement]) -> list[str]:
    """Warn of a regularizer on a layer and on a layer inside it, because it applies there twice."""
    layers = {
        (p.regularizer.label, p.target.name): p.where
        for p in placements
        if p.target.kind.is_layer and not isinstance(p.regularizer, Retune | Observer)
    }
    inner = [
        (label, name)
        for label, name in layers
        if any((label, parent) in layers for parent in _parents(name))
    ]
    if not inner:
        return []

    entries = ", ".join(dict.fromkeys(layers[layer] for layer in inner))
    labels = ", ".join(dict.fromkeys(label for label, _ in inner))
    names = listed([name for _, name in inner], 3)
    return [
        f"{entries}: {labels} is also on layers inside its layers ({names}), and applies again in "
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
    make: Callable[[LiveSite, Placement], SiteHook] | None = None,
) -> Attachment:
    """Put the hooks of all placements on a model. If one fails, all are removed.

    Args:
        base: the model.
        placements: the placements of a spec on this model.
        run: the state that all sites share.
        make: makes the hook of a site; None uses the class in the placement.
    """
    installed = []
    for order, p in enumerate(placements):
        site = LiveSite(p.key, p.target, p.regularizer, run, p.facts)
        site.order = order
        site.position = p.position
        site.selector = str(p.entry.selector)
        hook = p.hook(site, p.target.local) if make is None else make(site, p)
        installed.append((p.target.module, hook))

    attachment = Attachment(base, run, installed)
    run.keys = tuple(p.key for p in placements)
    run.sites = attachment._sites
    try:
        for module, hook in installed:
            hook.install(module)
        # observers note the parameters at the start of the first window; all processes attach, so
        # sharded parameters can be gathered
        attachment._read_layers(together=True)
        _watch_maps(base, placements, run)
        hooks = [hook for _, hook in installed]
        run.model_hook = ModelHook(run, hooks, base, ForwardChecks())
        run.model_hook.put_on(base)
        remember_until_exit(run.model_hook)
    except BaseException:
        attachment.remove()
        raise
    return attachment


def _watch_maps(base: nn.Module, placements: list[Placement], run: Run) -> None:
    """Note the sizes of maps in each forward if a regularizer acts on maps, or on their tokens."""
    of_maps = [p for p in placements if (p.regularizer.spatial or 0) > 1]
    if of_maps:
        facts = [p.facts or Facts() for p in of_maps]
        # if all layers show channels first, no site gets tokens
        only_maps = all((fact.own or fact.inside) == FIRST for fact in facts)
        run.grids.put_on(base, only_maps)
