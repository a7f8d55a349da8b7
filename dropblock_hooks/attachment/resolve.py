"""Resolves a spec on a model, and finds all of its faults before any hook is installed."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..axes.facts import Facts, ModelFacts
from ..checks import as_count
from ..observers.base import Observer
from ..quoting import label, listed, quote, shorten
from ..regularizers.base import Regularizer
from ..regularizers.retune import RATES, Retune, in_place_of, is_read, rate_attribute, unit_dropped
from ..schedules.base import UNSAID, length_of, span_of, spread_rate, within
from ..selectors.index import Index, NoMatchError, Target
from ..selectors.select import match
from ..selectors.wrappers import bare_type, shard_refusal
from ..sites.hooks import hooks_on
from ..spec.spec import Draft, Entry, SpecError

_UNKNOWN = (-math.inf, math.inf)  # the span of a function of the epoch
_MOST_TIMES = 1000  # at which such a function is tried


@dataclass(frozen=True)
class Placement:
    """A regularizer of an entry on a layer, parameter or attribute.

    Attributes:
        entry: the entry of the spec.
        position: the number of the entry, and the number of the regularizer in it.
        target: the layer.
        regularizer: the regularizer or observer.
        facts: the axes of the layer, as the model shows them.
        attribute: the attribute with the layer's own rate, if that is retuned.
        line: the line of the entry in its file, as a message begins with it.
    """

    entry: Entry
    position: tuple[int, int]
    target: Target
    regularizer: Regularizer
    facts: Facts | None = None
    attribute: str | None = None
    line: str = ""

    @property
    def where(self) -> str:
        """The selector of the entry, as messages quote it, after its line in a file."""
        return f"{self.line}{quote(self.entry.selector)}"


class Placed(NamedTuple):
    """A spec on a model, in its order."""

    placements: list[Placement]
    warnings: list[str]
    unsaid: list[str]  # schedules that need the length of the training, which is not known


def place(model: nn.Module, draft: Draft, epochs: int | None = None) -> Placed:
    """Resolve a spec on a model. Names begin at `model`; `epochs` is the length of the training.

    Raises:
        SpecError: with all that is wrong.
    """
    if epochs is not None:
        as_count("epochs", epochs)
    index = Index(model)
    placements: list[Placement] = []
    problems = list(draft.problems)
    warnings: list[str] = []
    for i, entry in enumerate(draft.entries):
        try:
            targets = match(entry.selector, index)
        except NoMatchError as error:
            problems.append(f"{draft.places[i]}{quote(entry.selector)}: {error}")
            continue
        if entry.regularizers is None:
            names = {target.name for target in targets}
            kept = [p for p in placements if p.target.name not in names]
            if len(kept) == len(placements):
                text = "None clears nothing: no earlier entry is on it"
                warnings.append(f"{quote(entry.selector)}: {text}")
            placements = kept
            continue
        for j, regularizer in enumerate(entry.regularizers):
            line = draft.places[i]
            placements += [Placement(entry, (i, j), t, regularizer, line=line) for t in targets]
    placements = [_with_own_rate(p, model) for p in placements]
    problems += [*_refused(placements), *_conflicts(placements)]
    if problems:
        raise SpecError(problems, draft.source)
    unsaid, long = _lengths(placements, epochs)
    warnings += [*long, *_nested(placements)]
    facts = ModelFacts(index)
    placements = [
        p if p.target.form else replace(p, facts=facts.of(p.target, p.regularizer.at))
        for p in _with_rates(placements, epochs)
    ]
    return Placed(placements, warnings, unsaid)


def _lengths(placements: list[Placement], epochs: int | None) -> tuple[list[str], list[str]]:
    """The schedules without a length, and those that are longer than the training."""
    unsaid: list[str] = []
    long: list[str] = []
    for p in placements:
        for rate in p.regularizer.rates.values():
            length = length_of(rate)
            if length is None and epochs is None:
                unsaid.append(f"{p.where}: {quote(rate)}: {UNSAID}")
            elif length and epochs is not None and length > epochs:
                text = f"takes {length:g} epochs, and the training has {epochs}"
                long.append(f"{p.where}: {quote(rate)} {text}: it does not reach its end")
    return list(dict.fromkeys(unsaid)), list(dict.fromkeys(long))


def _with_own_rate(p: Placement, model: nn.Module) -> Placement:
    """The placement, for `Retune` with the attribute that holds the rate of the layer."""
    target, retune = p.target, p.regularizer
    if not isinstance(retune, Retune) or target.parameter:
        return p
    attribute = target.attribute or rate_attribute(target.module)
    if attribute is None:
        return p
    ours = None if target.attribute else in_place_of(target.module)
    if ours is not None and is_read(model, (target.name, *target.aliases), attribute):
        ours = None
    return replace(p, regularizer=retune.acting_as(ours), attribute=attribute)


def _refused(placements: list[Placement]) -> list[str]:
    """The regularizers that can't work on their layers, each reason once for an entry."""
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for p in placements:
        reason = next(filter(None, _refusals(p)), None)
        if reason:
            about = f"{p.where}: {quote(p.regularizer)} can't work on"
            reasons[about, shorten(reason, 500)].append(p.target.name)
    return [f"{about} {listed(names, 3)}: {why}" for (about, why), names in reasons.items()]


def _refusals(p: Placement) -> Iterator[str | None]:
    """The reasons why a regularizer can't work on its target; the first one counts."""
    regularizer, target, module = p.regularizer, p.target, p.target.module
    if isinstance(module, torch.jit.ScriptModule):
        yield (
            "it is a ScriptModule, which takes no hooks: attach to the module that it was made "
            "from, and script that after remove(); or put it on a layer around it"
        )
    parameter = module._parameters[target.parameter] if target.parameter else None
    if parameter is not None:
        if regularizer.acts_on != "gradient":
            yield "param: takes regularizers of gradients"
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            yield "the parameter is not initialized: run a forward first"
        if parameter.is_complex():
            yield "the parameter is complex: only gradients of real parameters are regularized"
        if not parameter.requires_grad:
            yield "the parameter is frozen (requires_grad is False), it gets no gradient"
        if regularizer.at != "output" or regularizer.index is not None:
            yield "at= and index= mean nothing for a parameter"
        yield shard_refusal(module)
    elif regularizer.accumulates:
        yield "what acts once per update is for parameters: write param: before the selector"
    elif isinstance(regularizer, Retune):
        yield _retune_refusal(p, regularizer)
    elif target.attribute:
        yield "attr: selectors take Retune only"
    yield regularizer.refusal(module, parameter)


def _retune_refusal(p: Placement, retune: Retune) -> str | None:
    kind = bare_type(p.target.module).__name__
    if p.attribute is not None:
        if retune.ours is None and retune.active == "always":
            return f"the {kind} itself drops, in training mode only: leave active='always' out"
        return None
    if isinstance(p.target.module, nn.Identity):
        return (
            "it is an nn.Identity, which models put where a rate is 0. Put DropPath(p=...) on it, "
            "build the model without drop paths and use presets.drop_path(model, p), or select "
            "the other layers only, as in Select(names=..., types='DropPath')"
        )
    return (
        f"a {kind} has no {' or '.join(RATES)} that is a number in [0, 1] and can be set. "
        "builtin(model) lists all rates, with their selectors"
    )


class _Present(NamedTuple):
    """A regularizer on a layer: of an entry, or of a live attachment."""

    placement: Placement | None
    regularizer: Regularizer
    attribute: str | None
    entry: int | None = None

    @property
    def source(self) -> str:
        return "a live Attachment" if self.placement is None else self.placement.where


def _conflicts(placements: list[Placement]) -> list[str]:
    """Layers with a class from two entries, or with two regularizers that set their own rate."""
    layers: dict[tuple[nn.Module, str | None], list[_Present]] = {}
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for p in placements:
        module, parameter = p.target.module, p.target.parameter
        if (module, parameter) not in layers:
            layers[module, parameter] = [
                _Present(None, h.site.regularizer, getattr(h, "attribute", None))
                for h in hooks_on(module)
                if h.parameter == parameter
            ]
        mine = _Present(p, p.regularizer, p.attribute, p.position[0])
        composed = getattr(p.entry.selector, "compose", False)
        for other in layers[module, parameter]:
            one_rate = _set_one_rate(module, other, mine)
            alike = other.regularizer.kind == p.regularizer.kind and other.entry != mine.entry
            if not one_rate and (composed or not alike or isinstance(p.regularizer, Retune)):
                continue
            cure = "A layer has one rate" if one_rate else "Put them in one list"
            if other.entry is None:
                cure = "Call its remove(), or run `from dropblock_hooks import detach_all; "
                cure += "detach_all(model)`"
            cure += "" if one_rate else ", or allow it with Select(..., compose=True)"
            kinds = f"{other.regularizer.label} and {mine.regularizer.label}"
            found[f"{other.source} and {mine.source}: {kinds}", cure].append(p.target.name)
            break
        layers[module, parameter].append(mine)
    return [
        f"{both} can't both be on {listed(names, 3)}. {cure}"
        for (both, cure), names in found.items()
    ]


def _set_one_rate(module: nn.Module, *two: _Present) -> bool:
    """Whether both set the same rate of the layer, or one sets it and the other drops too."""
    retuned = [each.attribute for each in two if isinstance(each.regularizer, Retune)]
    if len(retuned) == 2:
        return retuned[0] == retuned[1]
    drops = any(unit_dropped(each.regularizer) for each in two)
    return drops and retuned == [rate_attribute(module)]


def _with_rates(placements: list[Placement], epochs: int | None) -> list[Placement]:
    """Schedules without epochs follow the training; `ByDepth` is spread over its entry's layers."""
    groups: dict[tuple[int, int], list[Placement]] = defaultdict(list)
    for p in placements:
        groups[p.position].append(p)
    changed: dict[int, Placement] = {}
    for group in groups.values():
        for i, p in enumerate(group):
            rates: dict[str, Any] = {}
            try:
                for name, rate in p.regularizer.rates.items():
                    timed = rate if epochs is None else within(rate, epochs)
                    rates[name] = spread_rate(timed, i, len(group))
                if any(rates[name] is not rate for name, rate in p.regularizer.rates.items()):
                    changed[id(p)] = replace(p, regularizer=p.regularizer.with_rates(**rates))
                at_end = i in (0, len(group) - 1)  # the rates of the other sites lie between
                if epochs and at_end and _UNKNOWN in map(span_of, rates.values()):
                    for t in range(0, epochs, -(-epochs // _MOST_TIMES)):
                        changed.get(id(p), p).regularizer.values(t)  # raises if out of range
            except Exception as error:  # a schedule may be anybody's
                text = f"{p.where}: {quote(p.regularizer)} at {label(p.target.name)}: {error}"
                raise SpecError([text]) from error
    return [changed.get(id(p), p) for p in placements]


def _nested(placements: list[Placement]) -> list[str]:
    """Warnings of layers inside others with the same class, which applies to them twice."""
    groups: dict[str, dict[str, Placement]] = defaultdict(dict)
    for p in placements:
        if not p.target.form and not isinstance(p.regularizer, Retune | Observer):
            groups[p.regularizer.label][p.target.name] = p
    warnings = []
    for kind, layers in groups.items():
        inner = [name for name in layers if name and not layers.keys().isdisjoint(_around(name))]
        if inner:
            entries = ", ".join(dict.fromkeys(p.where for p in layers.values()))
            warnings.append(
                f"{entries}: {kind} is put on {len(layers)} "
                f"layers of which {len(inner)} lie inside others ({listed(inner, 3)}), and applies "
                "again in each. In a selector, ** takes the layers inside too, * only one level"
            )
    return warnings


def _around(name: str) -> list[str]:
    """The names of the modules around a layer."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts))]
