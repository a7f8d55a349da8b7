"""Judges the numbers of a `Watchdog` when it looks, and finds the first cause of its findings."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from .. import messages
from ..findings import Finding, Kind, tell
from ..observers.watchdog import Clock
from ..quoting import listed
from ..sites.hooks import SiteHook
from ..sites.run import Run
from ..sites.scaler import is_enabled
from .nonfinite import find_nonfinite
from .rules import judge_statistics
from .sights import Sight, sights_of, with_rule

_OF_LOOP = (Kind.NO_UPDATE, Kind.EVAL_NORM)  # faults of the training loop, which no layer causes
_OF_BACKWARD = (Kind.NO_GRADIENT, Kind.VANISHING, Kind.EXPLODING)


def new_alerts(
    base: nn.Module, run: Run, hooks: Sequence[SiteHook], statistics: bool = True
) -> list[Finding]:
    """Look at all sites: return the findings that the last look did not have; begin new counts.

    Without `statistics`, only values that are not finite are judged.
    """
    run.take_counts()
    sights = sights_of(base, hooks)
    clock = Clock.of(run.shared)
    if not sights or not run.installed:
        return []

    if is_enabled(run.scaler):
        clock.note_scale(run.scaler.get_scale())
    statistics = statistics and any(sight.judged for sight in sights)
    if statistics:
        clock.begin()

    before = clock.alerts
    findings = _judge(base, run, sights, statistics)
    run.history.note_findings(findings.values())
    if any(sight.measured for sight in sights):
        run.told -= before.keys() - findings.keys()  # these have cleared, and may come again
        clock.alerts = findings
    clock.looks += statistics
    for sight in sights:
        sight.watched.forget(statistics)
    if statistics:
        clock.batches.forget()

    new = [finding for key, finding in findings.items() if key not in before]
    return _first_cause(new, sights)


def alerts_now(base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> list[Finding]:
    """Return the findings of the last look that hold, and those since then. Reports nothing."""
    run.take_counts()
    sights = sights_of(base, hooks)
    statistics = any(sight.judged for sight in sights)
    findings = Clock.of(run.shared).alerts | _judge(base, run, sights, statistics)
    return _first_cause(list(findings.values()), sights)


def tell_alerts(run: Run, hooks: Sequence[SiteHook], findings: Sequence[Finding]) -> None:
    """Report findings by the `action` of the `Watchdog` of their site, a WatchdogError last."""
    dogs: dict[str, Any] = {hook.site.key: hook.site.regularizer for hook in hooks}

    actions = [(dogs[finding.sites[0]].action, finding) for finding in findings]
    for action, finding in sorted(actions, key=lambda pair: pair[0] == "raise"):
        tell([finding], run.told, action)


def _first_cause(findings: Sequence[Finding], sights: Sequence[Sight]) -> list[Finding]:
    """Return the first finding, whose text lists the others as its likely effects.

    NaN and Inf come first. Then come findings of the forward, in the order of the layers, and
    findings of the backward, in reverse order. Layers that were never called, and faults of the
    training loop, stay separate.
    """
    last_calls = {sight.site.key: sight.watched.at for sight in sights}

    def order(finding: Finding) -> tuple[bool, int, int]:
        """Sort by kind, then by the time of the last call."""
        time = last_calls[finding.sites[0]]
        in_backward = finding.kind in _OF_BACKWARD
        stage = in_backward + (finding.kind in _OF_BACKWARD[1:])  # a missing gradient comes first
        return finding.kind != Kind.NONFINITE, stage, -time if in_backward else time

    called: list[Finding] = []
    separate: list[Finding] = []
    for finding in findings:
        is_called = last_calls.get(finding.sites[0])
        group = called if is_called and finding.kind not in _OF_LOOP else separate
        group.append(finding)
    if len(called) < 2:
        return called + separate

    first, *effects = sorted(called, key=order)
    layers = defaultdict(list)
    for effect in effects:
        layers[effect.kind].append(effect.layer)
    effects_text = "; ".join(f"{kind} at {listed(names, 5)}" for kind, names in layers.items())
    text = messages.WITH_EFFECTS.format(text=first.text, effects=effects_text)
    return [replace(first, text=text), *separate]


def _judge(
    base: nn.Module, run: Run, sights: list[Sight], statistics: bool
) -> dict[tuple[str, str], Finding]:
    """Apply all rules; return the findings by site and kind.

    Without `statistics`, the findings of the last look about statistics hold.
    """
    clock = Clock.of(run.shared)
    clock.batches.read()
    last_findings = list(clock.alerts.values())

    nonfinite = list(find_nonfinite(run, with_rule(Kind.NONFINITE, sights)))
    had_nonfinite = any(finding.kind == Kind.NONFINITE for finding in last_findings)
    if nonfinite and had_nonfinite:
        return clock.alerts  # NaN comes from NaN

    if statistics:
        others = list(judge_statistics(base, clock, sights))
    else:
        others = [finding for finding in last_findings if finding.kind != Kind.NONFINITE]
    return {(finding.sites[0], finding.kind): finding for finding in nonfinite + others}
