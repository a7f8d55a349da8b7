"""What a plan has to say: what can't work, what is likely not meant, what is good to know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from ..attachment.inactive import why_inactive, why_not_called
from ..attachment.report import is_clipped
from ..attachment.resolve import Placement
from ..quoting import listed, quote
from ..tables import shown as cell
from .dropped_twice import find_doubled
from .probe import SiteTrial, Trial

_MOST = 8  # names in one line of a plan
Kind = Literal[
    "spec",
    "left",
    "no_pass",
    "fallback",
    "left_out",
    "never_called",
    "never_active",
    "loses_samples",
    "dropped_twice",
    "no_gradient",
    "clipped",
    "several_calls",
    "structure",
    "aliases",
    "in_place",
    "untraceable",
]
FAULTS: tuple[Kind, ...] = (
    "left",
    "no_pass",
    "never_called",
    "never_active",
    "loses_samples",
    "dropped_twice",
)
"""What ``attach`` warns of when it plans first; the rest is good to know."""


@dataclass(frozen=True)
class Caution:
    """One line of a plan; `kind` is for programs, `text` for people, `keys` are its sites."""

    kind: Kind
    text: str
    keys: tuple[str, ...] = ()


def problems_of(trials: list[SiteTrial]) -> list[str]:
    """Why sites can't work, the same reason once for each entry."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for trial in trials:
        if trial.error is not None:
            p = trial.placement
            at = " at the input" if p.regularizer.at == "input" else ""
            group = quote(p.entry.selector), p.regularizer.label + at, trial.error
            groups.setdefault(group, []).append(_name(p))
    return [
        f"{selector}: {label} can't work on {listed(names, _MOST)}: {error}"
        for (selector, label, error), names in groups.items()
    ]


def cautions_of(
    base: nn.Module, placements: list[Placement], keys: list[str], trial: Trial | None
) -> list[Caution]:
    """All there is to say of the sites, layers in the same situation in one line."""
    groups: dict[tuple[Kind, str], dict[str, str]] = {}
    met: list[SiteTrial | None] = [*trial.sites] if trial else [None] * len(placements)
    for p, key, each in zip(placements, keys, met, strict=True):
        found = [*_of_placement(p), *(_of_trial(base, each, trial) if each and trial else ())]
        for kind, text, name in found:
            groups.setdefault((kind, text), {})[key] = name
    cautions = [
        Caution(kind, f"{text}: {_named(kind, list(names.values()))}", tuple(names))
        for (kind, text), names in groups.items()
    ]
    if trial and trial.left_out:
        text = "hooks of yours were left out of the trial, which they could have reached out of"
        cautions.append(Caution("left_out", f"{text}: {listed(trial.left_out, _MOST)}"))
    cautions += doubled(base, placements, keys, trial)
    return sorted(cautions, key=lambda caution: caution.kind not in FAULTS)


def doubled(
    base: nn.Module, placements: list[Placement], keys: list[str], trial: Trial | None
) -> list[Caution]:
    """What the model, or the spec itself, drops twice."""
    met = [each.dropped for each in trial.sites] if trial else []
    found = find_doubled(base, placements, keys, met, trial.calls if trial else None)
    return [Caution("dropped_twice", each.text, each.keys) for each in found]


def _named(kind: Kind, names: list[str]) -> str:
    return ", ".join(dict.fromkeys(names)) if kind in FAULTS else listed(names, _MOST)


def _name(p: Placement) -> str:
    return p.target.name or "."


def _of_placement(p: Placement) -> Iterator[tuple[Kind, str, str]]:
    if p.target.aliases:
        text = "one shared layer of several names, hooked once"
        yield "aliases", text, f"{_name(p)} (= {', '.join(p.target.aliases)})"
    if not getattr(p.regularizer, "traceable", True):
        yield "untraceable", f"{p.regularizer.label} breaks the graph under torch.compile", _name(p)


def _of_trial(base: nn.Module, met: SiteTrial, trial: Trial) -> Iterator[tuple[Kind, str, str]]:
    p, site, name = met.placement, met.site, _name(met.placement)
    label = p.regularizer.label
    if site.at == "parameter":
        if met.without_gradient:
            yield "never_active", _of_unused(base, p, trial), name
        return
    if not site.calls:
        cause = why_not_called(base, p.target.name, trial.calls)
        yield "never_called", f"never called ({cause})", name
        return
    if trial.training and _is_idle(met):
        cause = why_inactive(base, p.target.module, True, "activation")
        yield "never_active", f"called and never active ({cause})", name
    if met.loses_samples:
        text = (
            f"{label} loses the whole sample, since no shortcut runs around the layer (use "
            "StochasticDepth on a block, DropPath on its branch)"
        )
        yield "loses_samples", text, name
    if met.without_gradient:
        yield "no_gradient", f"{label} gets no gradient: nothing in front can be trained", name
    yield from _of_size(met)
    if site.calls > 1:
        text = f"called {site.calls} times in a forward, and regularized each time"
        yield "several_calls", text, name
    if met.structure and met.error is None:
        text = f"a {met.structure}, of which element {p.regularizer.index!r} is regularized"
        yield "structure", text, name
    if met.followers:
        text = "the next layer works in place on the output, which is harmless"
        yield "in_place", text, f"{name} (then {', '.join(met.followers)})"


def _of_unused(base: nn.Module, p: Placement, trial: Trial) -> str:
    cause = "the output does not depend on the parameter"
    if not trial.calls.get(p.target.owner):
        why = why_not_called(base, p.target.owner, trial.calls)
        cause = f"{cause}, and its layer is never called: {why}"
    return f"{p.regularizer.label} gets no gradient ({cause})"


def _is_idle(met: SiteTrial) -> bool:
    """Whether its layer is kept in evaluation while the model trains."""
    site = met.site
    is_off = not site.active_calls and site.regularizer.acts_on == "activation"
    return is_off and met.error is None


def _of_size(met: SiteTrial) -> Iterator[tuple[Kind, str, str]]:
    block, asked = met.site.block_size, getattr(met.placement.regularizer, "block_size", None)
    if block is not None and is_clipped(block, asked):
        text = f"the block of {cell(asked)} is clipped to the map {cell(met.site.map_size)}"
        yield "clipped", text, _name(met.placement)
