"""Judges the numbers of a `Watchdog` when it looks, and finds the first cause of its findings.

A `ModelHook` calls `new_alerts` after the forwards at which a `Watchdog` looks. `Attachment.step`
and the callbacks of trainers call it at the end of an epoch, and an `Attachment` at the end of its
"with" block. `Attachment.alerts` and `Attachment.verify` call `alerts_now`, which changes no
counts.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
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

# faults of the training loop, which no layer causes
_OF_LOOP = (
    Kind.NO_UPDATE,
    Kind.ACCUMULATING,
    Kind.EVAL_NORM,
)
# faults that a backward pass shows
_OF_BACKWARD = (
    Kind.NO_GRADIENT,
    Kind.VANISHING,
    Kind.EXPLODING,
)


def new_alerts(
    base: nn.Module,
    run: Run,
    hooks: Sequence[SiteHook],
    statistics: bool = True,
) -> list[Finding]:
    """Look at all sites, begin new counts, and return the findings that the last look did not have.

    Args:
        base: the model.
        run: the state that all sites share.
        hooks: the hooks of all sites.
        statistics: apply all rules. If False, only the rule about NaN and Inf is applied.
    """
    run.take_counts()
    sights = sights_of(base, hooks)
    clock = Clock.of(run.shared)
    if not sights or not run.installed:  # `step` works also after `remove`
        return []

    _compare_scale(run, clock)
    enough_calls = any(sight.judged for sight in sights)
    statistics = statistics and enough_calls
    if statistics:
        clock.begin()  # the plan of the forwards to measure begins anew

    before = clock.alerts
    findings = _judge(base, run, sights, statistics)
    run.history.note_findings(findings.values())
    # without new numbers, the NaN of the last look would seem to be gone
    if any(sight.has_numbers for sight in sights):
        cleared = before.keys() - findings.keys()
        run.told -= cleared  # so that a cleared finding is reported again if it comes back
        clock.alerts = findings

    if statistics:
        clock.looks += 1
    for sight in sights:
        sight.watched.forget(statistics)
    if statistics:
        clock.batches.forget()

    return _first_cause(_not_in(before, findings), sights)


def _not_in(before: Mapping[Any, Finding], findings: Mapping[Any, Finding]) -> list[Finding]:
    """Return the findings that the last look did not have."""
    new = []
    for key, finding in findings.items():
        if key not in before:
            new.append(finding)
    return new


def _compare_scale(run: Run, clock: Clock) -> None:
    """Compare the scale of the loss with that at the last look, if a GradScaler is used."""
    if is_enabled(run.scaler):
        scale = run.scaler.get_scale()
        clock.compare_scale(scale)


def alerts_now(
    base: nn.Module,
    run: Run,
    hooks: Sequence[SiteHook],
) -> list[Finding]:
    """Return the findings of the last look, and the findings since then.

    Nothing is reported, and no counts begin anew.
    """
    run.take_counts()
    sights = sights_of(base, hooks)
    statistics = any(sight.judged for sight in sights)
    last_findings = Clock.of(run.shared).alerts
    present_findings = _judge(base, run, sights, statistics)
    findings = last_findings | present_findings
    return _first_cause(list(findings.values()), sights)


def tell_alerts(
    run: Run,
    hooks: Sequence[SiteHook],
    findings: Sequence[Finding],
) -> None:
    """Report the findings by the `action` of their `Watchdog`; a WatchdogError comes last."""
    if not findings:  # as after almost all forwards
        return
    dogs: dict[str, Any] = {}
    for hook in hooks:
        dogs[hook.site.key] = hook.site.regularizer

    actions: dict[int, Any] = {}
    by_action: dict[int, list[Finding]] = defaultdict(list)
    for finding in findings:
        action = dogs[finding.sites[0]].action
        key = id(action)  # a function need not be hashable
        actions[key] = action
        by_action[key].append(finding)

    def raises(key: int) -> bool:
        return bool(actions[key] == "raise")

    for key in sorted(by_action, key=raises):  # False comes first
        tell(by_action[key], run.told, actions[key])


def _first_cause(
    findings: Sequence[Finding],
    sights: Sequence[Sight],
) -> list[Finding]:
    """Return the first finding, whose text lists the others as its likely effects.

    NaN and Inf come first. Then come findings of the forward, in the order of the layers, and
    findings of the backward, in reverse order. Layers that were never called, and faults of the
    training loop, stay separate.
    """
    last_calls = {sight.site.key: sight.watched.at for sight in sights}

    def order(finding: Finding) -> tuple[bool, int, int]:
        """Sort by kind, then by the time of the last call."""
        is_other = finding.kind != Kind.NONFINITE
        time = last_calls[finding.sites[0]]
        if finding.kind not in _OF_BACKWARD:
            return is_other, 0, time
        # of the findings of the backward, a missing gradient comes first
        stage = 1 if finding.kind == Kind.NO_GRADIENT else 2
        return is_other, stage, -time

    called: list[Finding] = []
    separate: list[Finding] = []
    for finding in findings:
        time = last_calls.get(finding.sites[0], 0)
        was_called = time > 0
        if was_called and finding.kind not in _OF_LOOP:
            called.append(finding)
        else:
            separate.append(finding)
    if len(called) < 2:
        return called + separate

    first, *effects = sorted(called, key=order)
    text = messages.WITH_EFFECTS.format(
        text=first.text,
        effects=_effects_text(effects),
    )
    return [replace(first, text=text), *separate]


def _effects_text(effects: Sequence[Finding]) -> str:
    """List the kinds of findings with their layers."""
    layers = defaultdict(list)
    for effect in effects:
        layers[effect.kind].append(effect.layer)

    parts = []
    for kind, names in layers.items():
        parts.append(f"{kind} at {listed(names, 5)}")
    return "; ".join(parts)


def _judge(
    base: nn.Module,
    run: Run,
    sights: list[Sight],
    statistics: bool,
) -> dict[tuple[str, str], Finding]:
    """Apply all rules; return the findings by site and kind.

    Without `statistics`, the findings of the last look about statistics are kept.
    """
    clock = Clock.of(run.shared)
    clock.batches.read()
    last_findings = list(clock.alerts.values())
    kinds_of_last = {finding.kind for finding in last_findings}

    watched_for_nonfinite = with_rule(Kind.NONFINITE, sights)
    nonfinite = list(find_nonfinite(run, watched_for_nonfinite))
    if nonfinite and Kind.NONFINITE in kinds_of_last:
        return clock.alerts  # the new NaN is an effect of the NaN of the last look

    if statistics:
        others = list(judge_statistics(base, clock, sights))
    else:
        others = [finding for finding in last_findings if finding.kind != Kind.NONFINITE]

    findings: dict[tuple[str, str], Finding] = {}
    for finding in nonfinite + others:
        key = (finding.sites[0], finding.kind)
        findings[key] = finding
    return findings
