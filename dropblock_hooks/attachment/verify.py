"""What is wrong with the sites of an Attachment: in one window, an epoch say."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..sites.grad_scaler import MISSING, in_use, key_of_bounded
from ..sites.hooks import SiteHook
from ..sites.record import standing_still
from ..sites.shared import Control
from ..warn import warn
from .faults import Fault, Window, fault_of, needs_calls, runs_unseen
from .finding import Alert, Finding
from .watchdog import alerts_now, look_for_alerts, tell_alerts

_GONE = (
    "it was replaced, or written out, as torch.fx.symbolic_trace does with containers; attach to "
    "the model that is here"
)


def windows(control: Control, hooks: Iterable[SiteHook]) -> tuple[Window, Window]:
    """The open window, and the one before. Waits for compiled code."""
    sites = [hook.site for hook in hooks]
    with standing_still([control.record, *(site.record for site in sites)]):
        read = {site.key: site.record.read(elements=False) for site in sites}
        model = control.record.read(elements=False)
    compiled = any(each.compiled for each in read.values())
    off = control.idled or (compiled and control.was_off), control.idled_before
    made = []
    for i, which in enumerate(("window", "closed")):
        counts = {key: getattr(each, which) for key, each in read.items()}
        layers = {site.name: counts[site.key].calls for site in sites}
        made.append(Window(counts, layers, getattr(model, which), off[i], compiled))
    return made[0], made[1]


def last_window(control: Control, hooks: Iterable[SiteHook]) -> Window:
    """The window that a user means: the open one, or the one before if that was not trained in.

    With ``step(epoch)`` at the start of an epoch it is the open one, at its end. After ``step()``
    at the end of an epoch it is the one just closed, also when a validation follows.
    """
    now, before = windows(control, hooks)
    return before if before.ran and not now.trained else now


def find_faults(
    base: nn.Module, control: Control, installed: list[tuple[nn.Module, SiteHook]]
) -> list[Finding]:
    """All that is wrong, in the order of the sites."""
    if not control.installed:
        return [Finding(".", "removed", "the attachment was removed")]
    found = []
    if control.expects_scaler and control.grad_scaler is None:
        message = "gradient bounds are not scaled: set attached.grad_scaler again after loading"
        found.append(Finding(".", "grad_scaler", message))
    elif (
        control.grad_scaler is None
        and key_of_bounded(hook.site for _, hook in installed) is not None
        and in_use()
    ):
        found.append(Finding(".", "grad_scaler", MISSING))
    hooks = [hook for _, hook in installed]
    window = last_window(control, hooks)
    if not window.ran and not runs_unseen(base, hooks):
        message = (
            "no layer was called in this epoch, nor since it was attached or loaded: run a "
            "training step first"
        )
        found.append(Finding(".", "not_run", message))
    here = {hook.site.key for _, hook in installed}
    for key in control.keys:
        if key not in here:
            message = f"its layer is none of this {type(base).__name__}: {_GONE}"
            found.append(Finding(key, "gone", message))
    for module, hook in installed:
        site = hook.site
        fault = fault_of(base, hook, window, module)
        if fault is not None and (needs_calls(hook) or fault.kind != "never_called"):
            message = _message(fault, hook, window.sites[site.key].calls)
            found.append(Finding(site.key, fault.kind, message))
        if site.resumed():
            found.append(Finding(site.key, "not_stepped", site.waiting()))
    return [*found, *alerts_now(base, control, hooks)]


def tell_faults(attached: Any) -> None:
    """Warn of what is wrong, once of each; a `Watchdog` looks, and does what it was told to do."""
    control = attached._control
    found = [each for each in attached.verify() if not isinstance(each, Alert)]
    news = [each for each in found if (each.key, each.kind) not in control.told]
    control.told.update((each.key, each.kind) for each in news)
    for each in news:
        warn(str(each))
    with standing_still(attached._records):
        alerts = look_for_alerts(attached._base, control, attached._hooks)
    tell_alerts(control, alerts)


def _message(fault: Fault, hook: SiteHook, calls: int) -> str:
    if fault.kind == "never_called":
        return f"the layer '{hook.owner_name}' ({hook.site.module_type}) was {fault}"
    if fault.kind == "never_active" and calls:
        times = "once" if calls == 1 else f"{calls} times"
        return str(fault).replace("called", f"called {times}", 1)
    return str(fault)
