"""The checks of run time: what ``verify`` lists, what an epoch warns of, and when a Watchdog looks.

The first training forward of a window shows sites that were not called. The end of an epoch shows
the rest: what compiled code did, which gradients came, and whether the model was trained at all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..findings import Finding, Kind, Severity, tell
from ..observers.watchdog import Watchdog
from ..observers.watched import Clock
from ..selectors.wrappers import bare_type, find_module
from ..sites.counter import read
from ..sites.hooks import SiteHook
from ..sites.parameters import ParameterHook
from ..sites.run import Run
from ..tables import counted
from .faults import AGAIN, Window, fault_of, needs_calls, runs_unseen
from .rules import Looked, Sight, first_cause, judge


class ModelHook:
    """Forward hook of the model: counts forwards, and checks the sites at the first of a window.

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
        if not (model.training and run.enabled):
            return
        if torch._C._are_functorch_transforms_active():
            return  # no number can be read there
        if not run.looked:
            run.looked = True
            look_at_forward(model, run, self.hooks)
        if self.every:
            clock = Clock.of(run.shared)
            clock.forwards += 1
            clock.waiting += 1
            due, early = clock.waiting >= self.every, clock.forwards.bit_count() == 1
            if due or early:  # early: at the forwards 1, 2, 4, 8, ..., for NaN and Inf
                alerts = look_for_alerts(model, run, self.hooks, statistics=due)
                tell_alerts(run, self.hooks, alerts)


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


def find_faults(
    base: nn.Module, run: Run, installed: list[tuple[nn.Module, SiteHook]]
) -> list[Finding]:
    """Everything that is wrong, in the order of the sites.

    It speaks of the open window. If the model was not trained in that window, as after ``step()``
    at the end of an epoch, it speaks of the window before.
    """

    def error(kind: Kind, text: str, cure: str, *sites: str) -> Finding:
        return Finding(kind, Severity.ERROR, sites, text, cure, run.epoch)

    if not run.installed:
        return [error(Kind.REMOVED, "the attachment was removed", AGAIN)]
    hooks = [hook for _, hook in installed]
    found = run.scale.findings(run.epoch)
    now, before = windows(run, hooks)
    window = before if before.ran and not now.trained else now
    if not window.ran and not runs_unseen(base, hooks):
        text = "no layer was called in this epoch, nor after attaching or loading"
        found.append(error(Kind.NOT_RUN, text, "Run a training step first"))
    here = {hook.site.key for hook in hooks}
    text = f"this {type(base).__name__} does not hold the layer any more"
    cure = "Attach to this model; torch.fx.symbolic_trace writes containers out, for example"
    found += [error(Kind.REPLACED, text, cure, key) for key in run.keys if key not in here]
    for module, hook in installed:
        fault = fault_of(base, hook, window, module)
        if fault is not None and (needs_calls(hook) or fault.kind != Kind.NEVER_CALLED):
            found.append(fault)
        waiting = hook.site.waiting()
        if waiting is not None:
            kind, site = Kind.NOT_STEPPED, (hook.site.key,)
            found.append(Finding(kind, Severity.WARNING, site, waiting, epoch=run.epoch))
    return found


def tell_faults(attached: Any) -> None:
    """Warn of what is wrong, once; each `Watchdog` looks, and acts as it was told to."""
    base, run, hooks = attached._base, attached._run, attached._hooks
    alerts = look_for_alerts(base, run, hooks)
    tell(find_faults(base, run, attached._installed), run.told)
    tell_alerts(run, hooks, alerts)


def look_at_forward(base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> None:
    """Warn of the sites that did nothing in the first training forward of a window."""
    judged = [h for h in hooks if needs_calls(h) and not isinstance(h, ParameterHook)]
    window = replace(windows(run, hooks)[0], backward=False)
    tell(_idle_sites(base, judged, window), run.told)


def look_back(base: nn.Module, run: Run, hooks: Sequence[SiteHook], ended: bool) -> list[Finding]:
    """What is wrong with a window that closes.

    `ended` says whether an epoch has ended, rather than the time been set.
    """
    window, _ = windows(run, hooks)
    if not window.trained:
        silent = run.was_off or runs_unseen(base, hooks)
        return [_not_trained(base, run, window)] if ended and not silent else []
    if window.off:
        return []
    for hook in hooks:  # a site that works again is reported again when it stops
        if window.sites[hook.site.key].active and fault_of(base, hook, window) is None:
            run.told -= {(hook.site.key, kind) for kind in _CLEARED}
    gradients = [hook for hook in hooks if hook.site.regularizer.acts_on == "gradient"]
    # of the others, the first forward has shown what the end of a window shows
    judged = [hook for hook in (gradients if run.looked else hooks) if needs_calls(hook)]
    came = any(window.sites[hook.site.key].active for hook in gradients)
    window = replace(window, backward=came or any(p.grad is not None for p in base.parameters()))
    return _idle_sites(base, judged, window)


_CLEARED = (Kind.NEVER_CALLED, Kind.NEVER_ACTIVE, Kind.REPLACED)
_OF_PARAMETERS = (Kind.REPLACED, Kind.NEVER_ACTIVE, Kind.NO_OPTIMIZER)
"""What is reported of parameters: that one is frozen is likely meant."""


def _not_trained(base: nn.Module, run: Run, window: Window) -> Finding:
    """An epoch without a training forward of this model."""
    name = bare_type(base).__name__
    if window.model.evaluated:
        forwards = counted(window.model.evaluated, "forward")
        text = f"an epoch has ended in which this {name} ran {forwards}, all in evaluation mode"
        cure = "Call model.train() before training"
    else:
        text = f"an epoch has ended in which this {name} ran no training forward"
        cure = (
            "If another model is trained (a trainer may have copied this one), attach to that one; "
            "if this one is compiled, its code calls none of these layers"
        )
    return Finding(Kind.NOT_TRAINED, Severity.WARNING, (), text, cure, run.epoch)


def _idle_sites(base: nn.Module, hooks: Iterable[SiteHook], window: Window) -> list[Finding]:
    """Why sites did nothing."""
    found = []
    for hook in hooks:
        fault = None if window.sites[hook.site.key].active else fault_of(base, hook, window)
        if fault and (not isinstance(hook, ParameterHook) or fault.kind in _OF_PARAMETERS):
            found.append(fault)
    return found


def _watchdogs(hooks: Iterable[SiteHook]) -> dict[str, Watchdog]:
    """Every `Watchdog`, by the key of its site."""
    observers = {hook.site.key: hook.site.regularizer for hook in hooks}
    return {key: each for key, each in observers.items() if isinstance(each, Watchdog)}


def interval(hooks: Iterable[SiteHook]) -> int | None:
    """Return the smallest `every` of all `Watchdog` sites; 0 for never, None without any site."""
    found = [dog.every or 0 for dog in _watchdogs(hooks).values()]
    return min(filter(None, found), default=0) if found else None


def look_at_step(
    base: nn.Module, run: Run, hooks: Sequence[SiteHook], ended: bool
) -> list[Finding]:
    """What there is to report when time moves: at the end of an epoch; within one, every so often.

    A trainer may move time at every batch, and never call the model itself but a part of it.
    """
    every = interval(hooks)
    if every is None:
        return []
    clock = Clock.of(run.shared)
    clock.steps += 1
    return look_for_alerts(base, run, hooks) if ended or 0 < every <= clock.steps else []


def look_for_alerts(
    base: nn.Module, run: Run, hooks: Sequence[SiteHook], statistics: bool = True
) -> list[Finding]:
    """Judge all sites, and begin anew; the findings that hold and were not there before.

    Without `statistics`, only values that are not finite are judged.
    """
    looked = _looked(base, run, hooks, statistics)
    if looked is None or not run.installed:
        return []
    clock = Clock.of(run.shared)
    if statistics:
        clock.waiting = clock.steps = 0
    before, found = clock.alerts, _by_site(judge(looked))
    if not looked.has_statistics:  # what was found from statistics still holds
        found = {key: each for key, each in before.items() if key[1] != Kind.NONFINITE} | found
    if looked.has_calls:
        run.told -= before.keys() - found.keys()
        clock.alerts = found
    for sight in looked.sights:
        sight.site.bound.open["watched"].forget(statistics=looked.has_statistics)
    news = [found[key] for key in found if key not in before and not _follows(key, before)]
    return first_cause(news, looked)


def alerts_now(base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> list[Finding]:
    """What holds: of the last look, and what has come since then. Reports nothing."""
    looked = _looked(base, run, hooks)
    if looked is None:
        return []
    before = Clock.of(run.shared).alerts
    found = _by_site(judge(looked)).items()
    held = before | {k: each for k, each in found if not _follows(k, before)}
    return first_cause(list(held.values()), looked)


def _by_site(findings: Iterable[Finding]) -> dict[tuple[str, str], Finding]:
    return {(each.sites[0], each.kind): each for each in findings}


def _follows(key: tuple[str, str], before: dict[tuple[str, str], Finding]) -> bool:
    """Whether it is NaN that came from NaN: no other layer is named until all is finite again."""
    return key[1] == Kind.NONFINITE and any(kind == Kind.NONFINITE for _, kind in before)


def _looked(
    base: nn.Module, run: Run, hooks: Sequence[SiteHook], statistics: bool = True
) -> Looked | None:
    """All sites, read at once, which waits for the device; None where there is no `Watchdog`."""
    dogs = _watchdogs(hooks)
    sights = []
    for site in (hook.site for hook in hooks if hook.site.key in dogs):
        module = find_module(base, site.name)
        watched = site.bound.open["watched"]
        watched.read()
        if module is not None:
            sights.append(Sight(site, module, watched))
    return Looked(base, run, sights, statistics) if dogs else None


def tell_alerts(run: Run, hooks: Iterable[SiteHook], findings: Iterable[Finding]) -> None:
    """Report findings as the `Watchdog` of their site was told to.

    Raises:
        WatchdogError: where that is to raise.
    """
    dogs = _watchdogs(hooks)
    groups: dict[object, list[Finding]] = {}
    for each in findings:
        groups.setdefault(dogs[each.sites[0]].action, []).append(each)
    for action in sorted(groups, key=lambda action: action == "raise"):  # that comes last
        tell(groups[action], run.told, action)  # type: ignore[arg-type]  # a Watchdog's
