"""What ``verify`` lists: everything that is wrong in one window, for example an epoch."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..findings import Finding, Kind, Severity, tell
from ..sites.counter import read
from ..sites.grad_scaler import missing_scaler
from ..sites.hooks import SiteHook
from ..sites.run import Run
from .faults import AGAIN, Window, fault_of, needs_calls, runs_unseen
from .watchdog import look_for_alerts, tell_alerts


def windows(run: Run, hooks: Iterable[SiteHook]) -> tuple[Window, Window]:
    """The open window, and the one before."""
    sites = [hook.site for hook in hooks]
    model, *totals = read([run.counter, *(site.counter for site in sites)], wait=False)
    found = {site.key: each for site, each in zip(sites, totals, strict=True)}
    compiled = any(each.life.compiled for each in totals)
    made = []
    for which in ("window", "closed"):
        counts = {key: getattr(each, which) for key, each in found.items()}
        layers = {site.name: counts[site.key].calls for site in sites}
        off = any(each.off for each in counts.values())
        made.append(Window(counts, layers, getattr(model, which), off, compiled))
    return made[0], made[1]


def last_window(run: Run, hooks: Iterable[SiteHook]) -> Window:
    """The window that a user means: the open one, or the one before if that was not trained in.

    With ``step(epoch)`` at the start of an epoch it is the open one. After ``step()`` at the end of
    an epoch it is the one that has just closed, also when a validation follows.
    """
    now, before = windows(run, hooks)
    return before if before.ran and not now.trained else now


def find_faults(
    base: nn.Module, run: Run, installed: list[tuple[nn.Module, SiteHook]]
) -> list[Finding]:
    """Everything that is wrong, in the order of the sites."""
    if not run.installed:
        return [_general(run, Kind.REMOVED, "the attachment was removed", AGAIN)]
    hooks = [hook for _, hook in installed]
    found = []
    if run.scale.lost and run.scale.scaler is None:
        text = "gradient bounds do not follow a GradScaler, because a loaded model has none"
        cure = "Set attached.grad_scaler again"
        found.append(_general(run, Kind.GRAD_SCALER, text, cure))
    else:
        found += missing_scaler(run)
    window = last_window(run, hooks)
    if not window.ran and not runs_unseen(base, hooks):
        text = "no layer was called in this epoch, nor after attaching or loading"
        found.append(_general(run, Kind.NOT_RUN, text, "Run a training step first"))
    here = {hook.site.key for hook in hooks}
    gone = tuple(key for key in run.keys if key not in here)
    if gone:
        text = f"this {type(base).__name__} does not hold the layer any more"
        cure = "Attach to this model; torch.fx.symbolic_trace writes containers out, for example"
        error = Severity.ERROR
        found += [Finding(Kind.REPLACED, error, (key,), text, cure, run.epoch) for key in gone]
    for module, hook in installed:
        site = hook.site
        fault = fault_of(base, hook, window, module)
        if fault is not None and (needs_calls(hook) or fault.kind != Kind.NEVER_CALLED):
            found.append(fault)
        if (waiting := site.waiting()) is not None:
            warning = Severity.WARNING
            found.append(Finding(Kind.NOT_STEPPED, warning, (site.key,), waiting, "", run.epoch))
    return found


def _general(run: Run, kind: Kind, text: str, cure: str) -> Finding:
    return Finding(kind, Severity.ERROR, (), text, cure, run.epoch)


def tell_faults(attached: Any) -> None:
    """Warn of what is wrong, once; each `Watchdog` looks, and acts as it was told to."""
    base, run, hooks = attached._base, attached._run, attached._hooks
    found = find_faults(base, run, attached._installed)
    alerts = look_for_alerts(base, run, hooks)
    tell(found, run.told)
    tell_alerts(run, hooks, alerts)
