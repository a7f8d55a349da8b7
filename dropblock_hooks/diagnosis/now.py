"""Finds all faults at this moment, and the faults of an epoch that ends.

`Attachment.verify` calls `find_faults`, and `Attachment.step` calls `find_before_step` before the
time moves. The callbacks of trainers call `tell_faults` when an epoch ends. The end of a training
and the history ask `find_in_open_epoch` about the epoch that no step has ended.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from .. import messages
from .._torch import NO_TASK, graph_task
from ..findings import Finding, Kind, Severity, merged, tell
from ..observers.updates import writes_to
from ..selectors.wrappers import bare_type
from ..sites.hooks import SiteHook
from ..sites.run import Run
from ..sites.site import LiveSite
from ..sites.windows import Window, windows
from ..tables import counted
from ..warn import warn
from .alerts import alerts_now, new_alerts, tell_alerts
from .behind import find_behind
from .blocks import find_whole_maps
from .endings import find_zero_rates, not_stepped
from .first import find_unknown_scaler
from .idle import diagnose, find_idle
from .late import find_late_step
from .lost import find_frozen, find_overwritten, find_split_groups
from .skipped import find_skipped

AFTER_THE_END = (".", "after_the_end")
"""In `Run.told` after the warning of `_check_end`. Trainers put it there to prevent the warning."""


def find_faults(
    base: nn.Module,
    run: Run,
    hooks: Sequence[SiteHook],
) -> list[Finding]:
    """Find all faults in the open window.

    If the model was not trained in the open window, the last window is judged, provided that a
    layer was called there. A model whose parameters were updated was trained, although it may have
    been in evaluation mode.
    """
    if not run.installed:
        return [messages.REMOVED.finding(epoch=run.epoch)]

    window = _window_to_judge(base, run, hooks)
    sites = [hook.site for hook in hooks]

    findings = find_unknown_scaler(run) + _find_failed(run, window)
    was_run = window.failed or window.has("calls", "active")
    if not was_run and _is_counted(hooks):
        not_run = messages.NOT_RUN.finding(epoch=run.epoch)
        findings.append(not_run)

    findings += _missing_sites(run, sites)
    for hook in hooks:
        fault = diagnose(hook, base, window)
        if fault is not None:
            findings.append(fault)

    findings += find_behind(base, run, hooks, window)
    findings += find_skipped(sites, window, run.epoch)
    findings += find_whole_maps(sites, window)
    findings += run.no_batch  # found in the first forward of the window
    findings += find_frozen(base, run, hooks)
    findings += find_overwritten(base, run, hooks)
    findings += find_split_groups(base, run, hooks)
    if run.epoch >= 1:
        findings += find_zero_rates(run, sites)
    findings += not_stepped(sites)
    findings += run.late  # found by an earlier step
    return findings


def _window_to_judge(base: nn.Module, run: Run, hooks: Iterable[SiteHook]) -> Window:
    """Return the open window, or the last one by the rule of `find_faults`."""
    window, last_window = windows(run, hooks)
    was_trained = window.has("trained", "active") or _was_updated(base, run)
    if not was_trained and last_window.has("calls", "active"):
        return last_window
    return window


def _missing_sites(run: Run, sites: Iterable[LiveSite]) -> list[Finding]:
    """Find the sites whose hooks are missing, because a copy may have lost hooks."""
    present = {site.key for site in sites}
    missing = set(run.keys) - present

    findings = []
    for key in sorted(missing):
        finding = messages.REPLACED.finding(key, epoch=run.epoch)
        findings.append(finding)
    return findings


def tell_faults(attached: Any) -> list[Finding]:
    """Warn of each fault once, let each `Watchdog` look and act, and return all findings."""
    base = attached._base
    run = attached._run
    hooks = attached._hooks
    found = find_faults(base, run, hooks)
    faults = [finding for finding in found if finding.severity != Severity.NOTE]
    run.history.note_findings(faults)
    tell(faults, run.told)
    if faults:
        window, _ = windows(run, hooks)
        if not window.has("trained", "active"):
            run.told.add((".", Kind.NOT_TRAINED))  # the next step would say the same

    # each alert is told, or raised, only when it is new
    alerts = new_alerts(base, run, hooks)
    tell_alerts(run, hooks, alerts)
    # the result has all alerts that hold now, also those that were told before
    present_alerts = alerts_now(base, run, hooks)
    return merged(faults + present_alerts)


def find_before_step(
    t: float,
    base: nn.Module,
    run: Run,
    hooks: Sequence[SiteHook],
) -> list[Finding]:
    """Find the faults to report when the time moves to `t`, which may close the window."""
    if graph_task() != NO_TASK:
        _warn_once(run, (".", "step_in_backward"), messages.STEP_IN_BACKWARD)
    if not run.installed:
        return [messages.REMOVED.finding(epoch=run.epoch)]

    _check_end(t, run, hooks)
    return find_late_step(t, run, hooks) + find_at_boundary(t, base, run, hooks)


def find_at_boundary(
    t: float,
    base: nn.Module,
    run: Run,
    hooks: Sequence[SiteHook],
) -> list[Finding]:
    """Find the faults of the open window, if it closes when the time moves to `t`."""
    boundaries = math.floor(t) - math.floor(run.epoch)  # of epochs, between the two times
    if not boundaries:
        return []

    window, _ = windows(run, hooks)
    was_off = window.has("off")
    was_trained = window.has("trained", "active")
    failed = _find_failed(run, window)
    if was_trained and not was_off:
        # without a backward, gradients that did not come are no fault
        had_backward = _had_backward(base, run, hooks, window)
        judged = replace(window, backward=had_backward)
        idle = find_idle(base, hooks, judged)
        behind = find_behind(base, run, hooks, window)
        whole_maps = find_whole_maps([hook.site for hook in hooks], window)
        return failed + idle + behind + whole_maps

    # the time may have been set, as in a resumed training
    time_was_set = boundaries != 1 or run.fresh
    if was_off or time_was_set:
        return []
    if failed or not _is_counted(hooks):
        return failed
    finding = _not_trained(base, run, window)
    return [finding]


def _find_failed(run: Run, window: Window) -> list[Finding]:
    """Report a window in which training forwards raised errors, and none came to its end."""
    return [messages.FORWARD_RAISED.finding(epoch=run.epoch)] if window.failed else []


def find_in_open_epoch(
    base: nn.Module,
    run: Run,
    hooks: Sequence[SiteHook],
) -> list[Finding]:
    """Find the faults that ``step`` would report if the present epoch ended now.

    Before the first training call of the epoch there are none, unless parameters were updated.
    """
    if not run.was_trained() and not _was_updated(base, run):
        return []
    next_epoch = math.floor(run.epoch) + 1
    return find_at_boundary(next_epoch, base, run, hooks)


def _check_end(t: float, run: Run, hooks: Iterable[SiteHook]) -> None:
    """Warn once if the time is after the end of the training, and a rate follows a schedule."""
    # a `step()` after the last epoch moves the time to `run.epochs`, which is no fault
    if run.epochs is None or t < run.epochs + 1:
        return
    for hook in hooks:
        rates = hook.site.regularizer.rates.values()
        if any(map(callable, rates)):
            text = messages.AFTER_THE_END.format(t=t, epochs=run.epochs)
            _warn_once(run, AFTER_THE_END, text)
            return


def _warn_once(run: Run, name: tuple[str, str], text: str) -> None:
    """Warn, unless this attachment has done it before."""
    if name not in run.told:
        run.told.add(name)
        warn(text)


def _had_backward(
    base: nn.Module,
    run: Run,
    hooks: Iterable[SiteHook],
    window: Window,
) -> bool:
    """Return whether a backward of the model ran in the window.

    Gradients show it, and so do updates of parameters: a loop may set the gradients to None after
    each update.
    """
    for hook in hooks:
        counts = window.sites[hook.site.key]
        acts_on_gradient = hook.site.regularizer.acts_on == "gradient"
        if acts_on_gradient and counts.active:
            return True
    if any(p.grad is not None for p in base.parameters()):
        return True
    return _was_updated(base, run)


def _was_updated(base: nn.Module, run: Run) -> bool:
    """Return whether parameters were updated after the first forward of the open window."""
    return run.writes is not None and writes_to(base) != run.writes


def _not_trained(base: nn.Module, run: Run, window: Window) -> Finding:
    """Make the finding that an epoch has ended without a training forward."""
    model = bare_type(base).__name__
    forwards = window.model.evaluated
    if not forwards:
        return messages.NOT_TRAINED.finding(
            epoch=run.epoch,
            model=model,
        )
    return messages.EVALUATED.finding(
        epoch=run.epoch,
        model=model,
        forwards=counted(forwards, "forward"),
    )


def _is_counted(hooks: Iterable[SiteHook]) -> bool:
    """Return whether a window without counts shows that nothing ran.

    False if all sites only set a rate for other code, because this code may not call the layers.
    """
    return any(hook.needs_calls or not hook.holds_rate for hook in hooks)
