"""The checks of run time: when the sites are asked for their faults, and faults of the training.

The first training forward of a window warns of sites that were not called; its end, of the rest.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from ..checkpointing import NO_TASK, graph_task
from ..findings import Finding, Kind, Severity, tell
from ..observers.watchdog import Watchdog
from ..selectors.wrappers import bare_type, find_module
from ..sites.hooks import REPLACED, SiteHook
from ..sites.run import Run, Window, windows
from ..sites.site import Site
from ..tables import counted
from ..warn import warn
from .distributed import tell_equal_seeds
from .watchdog import look_at_forward, new_alerts, tell_alerts

_made: WeakSet[ModelHook] = WeakSet()  # of all attachments; copies are not in it
_EVALUATIONS = 2  # after which a training that nobody steps is reported


class ModelHook:
    """Forward hook of the model: counts forwards, and checks the sites at the first of a window.

    It hooks parameters whose owners are never called themselves, as in an attention that takes the
    weights of its projections. In compiled code it does nothing, and ``Attachment.step`` checks.
    """

    @property
    def __name__(self) -> str:
        """The name, which torch.jit.script asks for first."""
        raise AttributeError(
            "torch.jit.script can't compile a model with an attachment: script it after "
            "attached.remove(), or use torch.export"
        )

    def __init__(self, run: Run, hooks: Sequence[SiteHook]) -> None:
        self.run, self.hooks = run, hooks
        self.parameters = [hook for hook in hooks if not hook.by_call]
        dogs = [each for hook in hooks if isinstance(each := hook.site.regularizer, Watchdog)]
        self.every = min((dog.every for dog in dogs if dog.every), default=0)
        self._training, self._turns = False, 0  # the mode of the last forward; turns to training
        _made.add(self)

    def __call__(self, model: nn.Module, *args: Any) -> None:
        run = self.run
        if torch.compiler.is_compiling():
            return
        if not run.installed or graph_task() != NO_TASK:
            return  # a recomputation of checkpointing is no other forward
        if model.training:
            run.counter.trained += 1
        else:
            run.counter.evaluated += 1
        if model.training is not self._training and not run.stepped:
            self._training, self._turns = model.training, self._turns + model.training
            if model.training and self._turns > _EVALUATIONS:  # training goes on after two
                tell(not_stepped(hook.site for hook in self.hooks), run.told)
        for hook in self.parameters:
            owner = None if hook.site.calls else find_module(model, hook.site.owner)
            if owner is not None:
                hook.put(owner)
        if not (model.training and run.enabled) or torch._C._are_functorch_transforms_active():
            return  # under a transform no number can be read
        if not run.looked:
            run.looked = True
            window = replace(windows(run, self.hooks)[0], backward=False)
            tell(_idle(model, [hook for hook in self.hooks if hook.by_call], window), run.told)
        if self.every:
            look_at_forward(model, run, self.hooks, self.every)


@atexit.register
def tell_at_exit() -> None:
    """Warn at the end of the process of schedules that nobody has stepped."""
    for hook in list(_made):
        if hook.run.installed:
            tell(not_stepped(each.site for each in hook.hooks), hook.run.told)


def find_faults(base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> list[Finding]:
    """Everything that is wrong in the open window, or in the last one in which it was trained."""
    error = partial(Finding, severity=Severity.ERROR, sites=(), epoch=run.epoch)
    if not run.installed:
        text = "the attachment was removed"
        return [error(Kind.REMOVED, text=text, cure="Call attach again")]
    found = run.scaler_findings()
    window, before = windows(run, hooks)
    if before.has("calls", "active") and not window.has("trained", "active"):
        window = before
    if not window.has("calls", "active") and not _leaves_no_trace(hooks):
        text = "no layer was called in this epoch, or since attaching or loading"
        found.append(error(Kind.NOT_RUN, text=text, cure="Run a training step first"))
    kind, text, cure = REPLACED
    gone = sorted(set(run.keys) - {hook.site.key for hook in hooks})  # of a copy, say
    found += [error(kind, text=text, cure=cure, sites=(key,)) for key in gone]
    found += filter(None, [hook.diagnose(base, window) for hook in hooks])
    return found + not_stepped(hook.site for hook in hooks)


def tell_faults(attached: Any) -> None:
    """Warn of each fault once, and let each `Watchdog` look and act."""
    base, run, hooks = attached._base, attached._run, attached._hooks
    alerts = new_alerts(base, run, hooks)
    tell(find_faults(base, run, hooks), run.told)
    tell_alerts(run, hooks, alerts)


@contextmanager
def around_step(base: nn.Module, run: Run, hooks: Sequence[SiteHook], t: float) -> Iterator[None]:
    """Check the window before time moves to `t`, and report the findings afterwards."""
    if graph_task() != NO_TASK:
        warn(
            "step() was called during a backward: activation checkpoints that are recomputed "
            "after it use the new rates, and their gradients are wrong; call step() after "
            "backward()"
        )
    found: list[Finding] = []
    alerts: list[Finding] = []
    epochs = math.floor(t) - math.floor(run.epoch)
    if not run.installed:
        found = find_faults(base, run, hooks)  # that it was removed
    elif epochs:
        ended = epochs == 1 and not run.fresh  # otherwise the time was set
        found, alerts = _look_back(base, run, hooks, ended), new_alerts(base, run, hooks)
    yield
    run.stepped, run.fresh = True, False
    tell(found, run.told)
    tell_equal_seeds(run, [hook.site for hook in hooks])
    tell_alerts(run, hooks, alerts)


def _look_back(base: nn.Module, run: Run, hooks: Sequence[SiteHook], ended: bool) -> list[Finding]:
    """The faults in a window that closes; `ended` says whether an epoch has ended."""
    window, _ = windows(run, hooks)
    if window.has("off"):
        return []
    if window.has("trained", "active"):
        gradients = [hook for hook in hooks if hook.site.regularizer.acts_on == "gradient"]
        came = any(window.sites[hook.site.key].active for hook in gradients)
        came = came or any(p.grad is not None for p in base.parameters())
        return _idle(base, hooks, replace(window, backward=came))
    if not ended or _leaves_no_trace(hooks):
        return []
    text = f"an epoch has ended in which this {bare_type(base).__name__} was not trained"
    if window.model.evaluated:
        text += f": it ran {counted(window.model.evaluated, 'forward')} in evaluation mode"
    cure = (
        "Call model.train() before training. If another model is trained (a trainer may have "
        "copied this one), attach to that one; if this one is compiled, its code calls none of "
        "these layers"
    )
    return [Finding(Kind.NOT_TRAINED, Severity.WARNING, (), text, cure, run.epoch)]


def _leaves_no_trace(hooks: Iterable[SiteHook]) -> bool:
    """Whether compiled code may run the model uncounted, because it only reads rates."""
    return all(hook.holds_rate and not hook.needs_calls for hook in hooks)


def _idle(base: nn.Module, hooks: Iterable[SiteHook], window: Window) -> list[Finding]:
    """The faults of sites that did nothing; freezing a parameter after training it is no fault."""
    idle = [hook for hook in hooks if not window.sites[hook.site.key].active]
    faults = [(hook, hook.diagnose(base, window)) for hook in idle]
    return [f for hook, f in faults if f and not (f.kind == Kind.LOST and hook.site.active_calls)]


def not_stepped(sites: Iterable[Site]) -> list[Finding]:
    """The finding that schedules are moving and nobody has called ``step``; or nothing."""
    for site in sites:
        if site.moves and site.counter.trained and not site.run.stepped:
            text = (
                f"the rate of {site.key} is still {site.rate} in call {site.calls} of the layer, "
                "since nobody has called step"
            )
            cure = (
                "Call attached.step(epoch) at the start of each epoch, or step() at its end; if "
                "the rate is to stand still, step(0) at the start silences this"
            )
            return [Finding(Kind.NOT_STEPPED, Severity.WARNING, (), text, cure, site.run.epoch)]
    return []
