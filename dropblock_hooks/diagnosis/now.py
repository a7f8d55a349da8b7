"""Finds all faults at this moment, and the faults of an epoch that ends."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from .. import messages
from .._torch import NO_TASK, graph_task
from ..findings import Finding, tell
from ..selectors.wrappers import bare_type
from ..sites.hooks import SiteHook
from ..sites.run import Run
from ..sites.windows import Window, windows
from ..tables import counted
from ..warn import warn
from .alerts import alerts_now, new_alerts, tell_alerts
from .behind import find_behind
from .endings import find_zero_rates, not_stepped
from .first import find_unknown_scaler
from .idle import diagnose, find_idle
from .lost import find_frozen, find_overwritten, find_split_groups
from .skipped import find_skipped


def find_faults(base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> list[Finding]:
    """Find all faults in the open window.

    If the model was not trained in the open window, the last window is judged, provided that a
    layer was called there.
    """
    if not run.installed:
        return [messages.REMOVED.finding(epoch=run.epoch)]

    findings = find_unknown_scaler(run)
    window, last_window = windows(run, hooks)
    if last_window.has("calls", "active") and not window.has("trained", "active"):
        window = last_window
    if not window.has("calls", "active") and not _leaves_no_trace(hooks):
        findings.append(messages.NOT_RUN.finding(epoch=run.epoch))

    sites = [hook.site for hook in hooks]
    present = {site.key for site in sites}
    missing = sorted(set(run.keys) - present)  # a copy may have lost hooks
    findings += [messages.REPLACED.finding(key, epoch=run.epoch) for key in missing]
    for hook in hooks:
        fault = diagnose(hook, base, window)
        if fault is not None:
            findings.append(fault)

    findings += find_behind(base, run, hooks, window)
    findings += find_skipped(sites, window, run.epoch)
    findings += run.no_batch
    findings += find_frozen(base, run, hooks)
    findings += find_overwritten(base, run, hooks)
    findings += find_split_groups(base, run, hooks)
    if run.epoch >= 1:
        findings += find_zero_rates(run, sites)
    return findings + not_stepped(sites)


def tell_faults(attached: Any) -> list[Finding]:
    """Warn of each fault once, let each `Watchdog` look and act, and return all findings."""
    base = attached._base
    run = attached._run
    hooks = attached._hooks
    faults = find_faults(base, run, hooks)
    run.history.note_findings(faults)
    tell(faults, run.told)
    tell_alerts(run, hooks, new_alerts(base, run, hooks))
    return faults + alerts_now(base, run, hooks)


def find_before_step(
    t: float, base: nn.Module, run: Run, hooks: Sequence[SiteHook]
) -> list[Finding]:
    """Find the faults to report when the time moves to `t`, which may close the window."""
    if graph_task() != NO_TASK:
        warn(messages.STEP_IN_BACKWARD)
    if not run.installed:
        return [messages.REMOVED.finding(epoch=run.epoch)]
    _check_end(t, run, hooks)
    epochs = math.floor(t) - math.floor(run.epoch)
    if not epochs:
        return []

    window, _ = windows(run, hooks)
    was_off = window.has("off")
    if window.has("trained", "active") and not was_off:
        had_backward = _had_backward(base, hooks, window)
        judged = replace(window, backward=had_backward)
        return find_idle(base, hooks, judged) + find_behind(base, run, hooks, window)

    time_was_set = epochs != 1 or run.fresh
    if was_off or time_was_set or _leaves_no_trace(hooks):
        return []
    return [_not_trained(base, run, window)]


AFTER_THE_END = (".", "after_the_end")
"""A member of `Run.told` when a time after the end of the training was reported, or is intended."""


def _check_end(t: float, run: Run, hooks: Iterable[SiteHook]) -> None:
    """Warn once if the time is after the end of the training, and a rate follows a schedule."""
    if run.epochs is None or t < run.epochs + 1 or AFTER_THE_END in run.told:
        return
    rates = [rate for hook in hooks for rate in hook.site.regularizer.rates.values()]
    if any(map(callable, rates)):
        run.told.add(AFTER_THE_END)
        warn(messages.AFTER_THE_END.format(t=t, epochs=run.epochs))


def _had_backward(base: nn.Module, hooks: Iterable[SiteHook], window: Window) -> bool:
    """Return whether a backward of the model ran in the window, judged by its gradients."""
    gradients = [hook for hook in hooks if hook.site.regularizer.acts_on == "gradient"]
    if any(window.sites[hook.site.key].active for hook in gradients):
        return True
    return any(p.grad is not None for p in base.parameters())


def _not_trained(base: nn.Module, run: Run, window: Window) -> Finding:
    """Make the finding that an epoch has ended without a training forward."""
    model = bare_type(base).__name__
    if not window.model.evaluated:
        return messages.NOT_TRAINED.finding(epoch=run.epoch, model=model)
    forwards = counted(window.model.evaluated, "forward")
    return messages.EVALUATED.finding(epoch=run.epoch, model=model, forwards=forwards)


def _leaves_no_trace(hooks: Iterable[SiteHook]) -> bool:
    """Return whether compiled code may run the model uncounted, because it reads only rates."""
    return all(hook.holds_rate and not hook.needs_calls for hook in hooks)
