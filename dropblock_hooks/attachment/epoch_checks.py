"""The checks of run time: what ``verify`` lists, and what an epoch warns of.

The first training forward of a window shows sites that were not called. The end of an epoch shows
the rest: what compiled code did, which gradients came, and whether the model was trained at all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..findings import Finding, Kind, Severity, tell
from ..observers.watched import Clock
from ..selectors.wrappers import bare_type, find_module
from ..sites.hooks import SiteHook
from ..sites.parameters import ParameterHook
from ..sites.run import Run
from ..tables import counted
from .faults import AGAIN, GONE, Window, fault_of, needs_calls, reads_rate, windows
from .looks import interval, look_for_alerts, tell_alerts


class ModelHook:
    """Forward hook of the model: counts forwards, and checks the sites at the first of a window.

    It hooks parameters whose owners are never called themselves: the projections of an attention
    that takes their weights, and parameter lists.

    In compiled code it does nothing; ``Attachment.step`` checks then.
    """

    closes = True  # it is called behind the hooks of sites

    @property
    def __name__(self) -> str:
        """What torch.jit.script asks for first."""
        raise AttributeError(
            "torch.jit.script can't compile a model with an attachment: script it after "
            "attached.remove(), or use torch.export"
        )

    def __init__(self, run: Run, hooks: Iterable[SiteHook]) -> None:
        self.run = run
        self.hooks = tuple(hooks)
        self.parameters = [hook for hook in self.hooks if isinstance(hook, ParameterHook)]
        self.every = interval(self.hooks)

    def __call__(self, model: nn.Module, *args: Any) -> None:
        run = self.run
        if torch.compiler.is_compiling():
            return
        if not run.installed or torch._C._current_graph_task_id() != -1:
            return  # a recomputation of checkpointing is no other forward
        counter = run.counter
        if model.training:
            counter.trained += 1
        else:
            counter.evaluated += 1
        for hook in self.parameters:
            owner = None if hook.site.calls else find_module(model, hook.owner_name)
            if owner is not None:
                hook.rehook(owner)
        if not (model.training and run.enabled):
            return
        if torch._C._are_functorch_transforms_active():
            return  # no number can be read there
        if not run.looked:
            run.looked = True
            layers = [hook for hook in self.hooks if not isinstance(hook, ParameterHook)]
            window = replace(windows(run, self.hooks)[0], backward=False)
            tell(_idle_sites(model, layers, window), run.told)
        if self.every:
            clock = Clock.of(run.shared)
            clock.forwards += 1
            clock.waiting += 1
            due, early = clock.waiting >= self.every, clock.forwards.bit_count() == 1
            if due or early:  # early: at the forwards 1, 2, 4, 8, ..., for NaN and Inf
                alerts = look_for_alerts(model, run, self.hooks, statistics=due)
                tell_alerts(run, self.hooks, alerts)


def find_faults(base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> list[Finding]:
    """Everything that is wrong, in the order of the sites.

    It speaks of the open window. If the model was not trained in that window, as after ``step()``
    at the end of an epoch, it speaks of the window before.
    """

    def error(kind: Kind, text: str, cure: str, *sites: str) -> Finding:
        return Finding(kind, Severity.ERROR, sites, text, cure, run.epoch)

    if not run.installed:
        return [error(Kind.REMOVED, "the attachment was removed", AGAIN)]
    found = run.scale.findings(run.epoch)
    now, before = windows(run, hooks)
    window = before if before.ran and not now.trained else now
    if not window.ran and not _leaves_no_trace(base, hooks):
        text = "no layer was called in this epoch, nor after attaching or loading"
        found.append(error(Kind.NOT_RUN, text, "Run a training step first"))
    here = {hook.site.key for hook in hooks}
    found += [error(Kind.REPLACED, GONE, AGAIN, key) for key in run.keys if key not in here]
    for hook in hooks:
        fault = fault_of(base, hook, window)
        if fault is not None and (needs_calls(hook) or fault.kind != Kind.NEVER_CALLED):
            found.append(fault)
    return found + not_stepped(hooks)


def not_stepped(hooks: Iterable[SiteHook]) -> list[Finding]:
    """The finding that schedules are moving and nobody has called ``step``; or nothing."""
    return next((found for hook in hooks if (found := hook.site.not_stepped())), [])


def tell_faults(attached: Any) -> None:
    """Warn of what is wrong, once; each `Watchdog` looks, and acts as it was told to."""
    base, run, hooks = attached._base, attached._run, attached._hooks
    alerts = look_for_alerts(base, run, hooks)
    tell(find_faults(base, run, hooks), run.told)
    tell_alerts(run, hooks, alerts)


def look_back(base: nn.Module, run: Run, hooks: Sequence[SiteHook], ended: bool) -> list[Finding]:
    """What is wrong with a window that closes.

    `ended` says whether an epoch has ended, rather than the time been set.
    """
    window, _ = windows(run, hooks)
    if not window.trained:
        silent = run.was_off or _leaves_no_trace(base, hooks)
        return [_not_trained(base, run, window)] if ended and not silent else []
    if window.off:
        return []
    for hook in hooks:  # a site that works again is reported again when it stops
        if window.sites[hook.site.key].active and fault_of(base, hook, window) is None:
            run.told -= {(hook.site.key, kind) for kind in _CLEARED}
    gradients = [hook for hook in hooks if hook.site.regularizer.acts_on == "gradient"]
    came = any(window.sites[hook.site.key].active for hook in gradients)
    window = replace(window, backward=came or any(p.grad is not None for p in base.parameters()))
    return _idle_sites(base, hooks, window)


_CLEARED = (Kind.NEVER_CALLED, Kind.NEVER_ACTIVE, Kind.REPLACED)


def _leaves_no_trace(base: nn.Module, hooks: Iterable[SiteHook]) -> bool:
    """Whether compiled code may run the model unseen: all rates are only read."""
    return all(reads_rate(base, hook) for hook in hooks)


def _not_trained(base: nn.Module, run: Run, window: Window) -> Finding:
    """An epoch without a training forward of this model."""
    text = f"an epoch has ended in which this {bare_type(base).__name__} was not trained"
    if window.model.evaluated:
        text += f": it ran {counted(window.model.evaluated, 'forward')} in evaluation mode"
    cure = (
        "Call model.train() before training. If another model is trained (a trainer may have "
        "copied this one), attach to that one; if this one is compiled, its code calls none of "
        "these layers"
    )
    return Finding(Kind.NOT_TRAINED, Severity.WARNING, (), text, cure, run.epoch)


def _idle_sites(base: nn.Module, hooks: Iterable[SiteHook], window: Window) -> list[Finding]:
    """Why sites did nothing; that a parameter is frozen is likely meant."""
    idle = [h for h in hooks if needs_calls(h) and not window.sites[h.site.key].active]
    faults = [fault_of(base, hook, window) for hook in idle]
    return [fault for fault in faults if fault is not None and fault.kind != Kind.LOST]
