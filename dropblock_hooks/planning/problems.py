"""The problems and findings of a plan."""

from collections.abc import Iterator

from torch import nn

from ..attachment.report import is_clipped
from ..attachment.resolve import Placement
from ..findings import Finding, Kind, Severity
from ..quoting import listed, quote
from ..sites.retune import RetuneHook
from ..tables import shown as cell
from .dropped_twice import find_doubled
from .probe import Probed, SiteMet

_MOST = 8  # names in one line of a plan
_WARNINGS = (Kind.LEFT, Kind.NO_PASS, Kind.NEVER_CALLED, Kind.NEVER_ACTIVE, Kind.LOSES_SAMPLES)
"""The kinds that ``attach`` warns of when it plans first; the others are good to know."""


def note(kind: Kind, text: str, sites: tuple[str, ...] = ()) -> Finding:
    """A line of a plan; the text names the layers."""
    severity = Severity.WARNING if kind in _WARNINGS else Severity.NOTE
    return Finding(kind, severity, sites, text)


def problems_of(placements: list[Placement], probed: Probed | None) -> list[str]:
    """The reasons why sites can't work; each reason once for each entry."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for p, met in zip(placements, probed.sites if probed else (), strict=probed is not None):
        if met.error is not None:
            at = " at the input" if p.regularizer.at == "input" else ""
            group = quote(p.entry.selector), p.regularizer.label + at, met.error
            groups.setdefault(group, []).append(p.target.name or ".")
    return [
        f"{selector}: {label} can't work on {listed(names, _MOST)}: {error}"
        for (selector, label, error), names in groups.items()
    ]


def findings_of(
    base: nn.Module, placements: list[Placement], keys: list[str], probed: Probed | None
) -> list[Finding]:
    """What is likely not meant, and then what is good to know; layers that share it in one line."""
    if probed is None:
        return find_doubled(base, placements, keys)
    groups: dict[tuple[Kind, str], dict[str, str]] = {}
    for p, key, met in zip(placements, keys, probed.sites, strict=True):
        for kind, text in _of_site(p, met):
            groups.setdefault((kind, text), {})[key] = p.target.name or "."
    findings = [
        note(kind, f"{text}: {listed(dict.fromkeys(sites.values()), _MOST)}", tuple(sites))
        for (kind, text), sites in groups.items()
    ]
    if probed.left_out:
        text = (
            "the dry run skipped your own hooks, because they may change objects outside the copy"
        )
        findings.append(note(Kind.LEFT_OUT, f"{text}: {listed(probed.left_out, _MOST)}"))
    findings += find_doubled(base, placements, keys, probed.calls)
    return sorted(findings, key=lambda each: each.severity == Severity.NOTE)


def _of_site(p: Placement, met: SiteMet) -> Iterator[tuple[Kind, str]]:
    site, label = met.site, p.regularizer.label
    if met.fault is not None:
        yield met.fault.kind, met.fault.text
    if isinstance(met.hook, RetuneHook):
        yield from _of_own_rate(p, met.hook, met)
    if p.target.form or not site.calls:
        return
    if met.loses_samples:
        yield (
            Kind.LOSES_SAMPLES,
            f"{label} loses the whole sample, since no shortcut runs around the layer (use "
            "StochasticDepth on a block, DropPath on its branch)",
        )
    if met.without_gradient:
        yield Kind.NO_GRADIENT, f"{label} gets no gradient: nothing in front can be trained"
    if is_clipped(site.block_size, p.regularizer):
        asked = cell(getattr(p.regularizer, "block_size", None))
        yield Kind.CLIPPED, f"the block of {asked} is clipped to the map {cell(site.map_size)}"


def _of_own_rate(p: Placement, hook: RetuneHook, met: SiteMet) -> Iterator[tuple[Kind, str]]:
    """Findings about a rate that is set in its attribute."""
    if met.site.calls == 0 and met.fault is None and not p.target.form:
        yield (
            Kind.READ,
            "the layer is not called; the module around it reads the rate, as fused attention "
            "does. What it drops is not counted",
        )
    if p.regularizer.moving and not hook.ours:
        yield (
            Kind.RECOMPILES,
            "torch.compile reads the rate as a constant and compiles again for each new value "
            "(a StepSchedule has few)",
        )
