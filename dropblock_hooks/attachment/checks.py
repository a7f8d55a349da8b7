"""The checks of run time: the faults of each site, with their likely cause.

``verify`` lists them. The first training forward of a window warns of sites that were not called.
The end of an epoch warns of the rest: sites in compiled code, missing gradients, and a model that
was not trained at all. ``plan`` calls `fault_of`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from ..checkpointing import NO_TASK, graph_task
from ..findings import Finding, Kind, Severity, tell
from ..observers.watchdog import Watchdog
from ..regularizers.retune import is_read
from ..selectors.wrappers import bare_type, find_module, shard_refusal
from ..sites.counter import Snapshot, read
from ..sites.hooks import SiteHook, holder
from ..sites.parameters import ParameterHook
from ..sites.retune import RetuneHook
from ..sites.run import Run
from ..sites.site import not_stepped
from ..tables import counted
from ..warn import warn
from .distributed import tell_equal_seeds
from .watchdog import look_at_forward, look_at_step, look_for_alerts, tell_alerts

_Fault: TypeAlias = tuple[Kind, str, str]  # with text and cure
_AGAIN = "Call attach again"
_REPLACED = (
    Kind.REPLACED,
    "its layer was replaced or removed after attach, or the hook was taken off",
    _AGAIN,
)
_EVALUATIONS = 2
_CLEARED = (Kind.NEVER_CALLED, Kind.NEVER_ACTIVE, Kind.REPLACED)


class ModelHook:
    """Forward hook of the model: counts forwards, and checks the sites at the first of a window.

    It hooks parameters whose owners are never called themselves: the projections of an attention
    that takes their weights, and parameter lists. In compiled code it does nothing, and
    ``Attachment.step`` checks.
    """

    closes = True  # it is called behind the hooks of sites

    @property
    def __name__(self) -> str:
        """The name, which torch.jit.script asks for first."""
        raise AttributeError(
            "torch.jit.script can't compile a model with an attachment: script it after "
            "attached.remove(), or use torch.export"
        )

    def __init__(self, run: Run, hooks: Iterable[SiteHook]) -> None:
        self.run = run
        self.hooks = tuple(hooks)
        self.parameters = [hook for hook in self.hooks if isinstance(hook, ParameterHook)]
        self.every = _interval(self.hooks)
        self._training, self._turns = False, 0  # the mode of the last forward; turns to training

    def __call__(self, model: nn.Module, *args: Any) -> None:
        run = self.run
        if torch.compiler.is_compiling():
            return
        if not run.installed or torch._C._current_graph_task_id() != -1:
            return  # a recomputation of checkpointing is no other forward
        if model.training:
            run.counter.trained += 1
        else:
            run.counter.evaluated += 1
        if model.training is not self._training and not run.stepped:
            self._turn(model.training)
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
            look_at_forward(model, run, self.hooks, self.every)

    def _turn(self, training: bool) -> None:
        """Warn, once, where training goes on after two evaluations and nobody has called step."""
        self._training = training
        self._turns += training
        if training and self._turns > _EVALUATIONS:
            tell(not_stepped(hook.site for hook in self.hooks), self.run.told)


@dataclass(frozen=True)
class Window:
    """The calls in a window.

    Attributes:
        sites: the counts of each site, by its key.
        layers: the calls of each layer with a site, by its name.
        model: the forwards of the model; none if it was compiled.
        backward: False before a backward, when no gradient can be missing yet.
    """

    sites: Mapping[str, Snapshot]
    layers: Mapping[str, int]
    model: Snapshot
    backward: bool = True

    def has(self, *names: str) -> bool:
        """Whether the model or a site has any of these counts: ``"trained"``, say."""
        every = (self.model, *self.sites.values())
        return any(getattr(each, name) for name in names for each in every)


def windows(run: Run, hooks: Iterable[SiteHook]) -> tuple[Window, Window]:
    """The open window, and the one before."""
    sites = [hook.site for hook in hooks]
    model, *totals = read([run.counter, *(site.counter for site in sites)], wait=False)
    made = []
    for which in ("window", "closed"):
        counts = {s.key: getattr(each, which) for s, each in zip(sites, totals, strict=True)}
        layers = {site.name: counts[site.key].calls for site in sites}
        made.append(Window(counts, layers, getattr(model, which)))
    return made[0], made[1]


def find_faults(base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> list[Finding]:
    """Everything that is wrong, in the order of the sites.

    It is about the open window, or the one before if the model was not trained since then.
    """
    if not run.installed:
        return [_error(run, (), Kind.REMOVED, "the attachment was removed", _AGAIN)]
    found = run.scale.findings(run.epoch)
    now, before = windows(run, hooks)
    stale = before.has("calls", "active") and not now.has("trained", "active")
    window = before if stale else now
    if not window.has("calls", "active") and not _leaves_no_trace(base, hooks):
        text = "no layer was called in this epoch, nor after attaching or loading"
        found.append(_error(run, (), Kind.NOT_RUN, text, "Run a training step first"))
    here = {hook.site.key for hook in hooks}
    found += [_error(run, (key,), *_REPLACED) for key in run.keys if key not in here]
    for hook in hooks:
        fault = fault_of(base, hook, window)
        if fault is not None:
            found.append(fault)
    return found + not_stepped(hook.site for hook in hooks)


def _error(run: Run, sites: tuple[str, ...], kind: Kind, text: str, cure: str) -> Finding:
    return Finding(kind, Severity.ERROR, sites, text, cure, run.epoch)


def tell_faults(attached: Any) -> None:
    """Warn of each fault once, and let each `Watchdog` look and act."""
    base, run, hooks = attached._base, attached._run, attached._hooks
    alerts = look_for_alerts(base, run, hooks)
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
    epochs = math.floor(t) - math.floor(run.epoch)
    ended = epochs == 1 and not run.fresh  # otherwise the time was set
    told = [] if run.installed else find_faults(base, run, hooks)  # that it was removed
    if epochs and run.installed:
        told = _look_back(base, run, hooks, ended)
    every = _interval(hooks)
    alerts = [] if every is None else look_at_step(base, run, hooks, every, epochs != 0)
    yield
    run.stepped, run.fresh = True, False
    tell(told, run.told)
    tell_equal_seeds(run, [hook.site for hook in hooks])
    tell_alerts(run, hooks, alerts)


def _look_back(base: nn.Module, run: Run, hooks: Sequence[SiteHook], ended: bool) -> list[Finding]:
    """The faults in a window that closes; `ended` says whether an epoch has ended."""
    window, _ = windows(run, hooks)
    if not window.has("trained", "active"):
        told = ended and not _leaves_no_trace(base, hooks)
        return [_not_trained(base, run, window)] if told else []
    if window.has("off"):
        return []
    for hook in hooks:  # a site that works again is reported again when it stops
        if window.sites[hook.site.key].active and fault_of(base, hook, window) is None:
            run.told -= {(hook.site.key, kind) for kind in _CLEARED}
    gradients = [hook for hook in hooks if hook.site.regularizer.acts_on == "gradient"]
    came = any(window.sites[hook.site.key].active for hook in gradients)
    window = replace(window, backward=came or any(p.grad is not None for p in base.parameters()))
    return _idle_sites(base, hooks, window)


def _leaves_no_trace(base: nn.Module, hooks: Iterable[SiteHook]) -> bool:
    """Whether compiled code may run the model uncounted, because it only reads rates."""
    return all(_reads_rate(base, hook) for hook in hooks)


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
    """The faults of sites that did nothing, without frozen parameters, which are likely meant."""
    idle = [hook for hook in hooks if not window.sites[hook.site.key].active]
    faults = [fault_of(base, hook, window) for hook in idle]
    return [fault for fault in faults if fault is not None and fault.kind != Kind.LOST]


def fault_of(base: nn.Module, hook: SiteHook, window: Window) -> Finding | None:
    """The fault of a site, or None."""
    name = hook.owner_name
    owner = holder(hook, base, name) or find_module(base, name)
    if owner is None:
        fault: _Fault | None = _REPLACED
    else:
        fault = _broken_hook(hook, owner) or _idle(base, hook, owner, window)
    return None if fault is None else _error(hook.site.run, (hook.site.key,), *fault)


def _idle(base: nn.Module, hook: SiteHook, owner: nn.Module, window: Window) -> _Fault | None:
    """The reason why a site was not called or not active; None if it was, or need not be."""
    site, counts = hook.site, window.sites[hook.site.key]
    needless = not getattr(site.regularizer, "needs_calls", True)
    if counts.active or needless or not window.has("calls", "active"):
        return None
    trained = window.has("trained", "active")
    enabled = site.run.enabled and not window.has("off")
    if site.regularizer.accumulates:
        return _of_update(site.run) if enabled and trained else None
    gradient = site.regularizer.acts_on == "gradient"
    missed = not counts.calls or (trained and owner.training and not counts.trained)
    kind = Kind.NEVER_CALLED if missed else Kind.NEVER_ACTIVE
    if hook.parameter is not None:  # a gradient has to come to it: its layer need not be called
        kind, missed = Kind.NEVER_ACTIVE, missed and enabled
        if not (trained or counts.calls):
            return None
    elif not counts.trained and _reads_rate(base, hook):
        return None
    if gradient and kind == Kind.NEVER_ACTIVE and not window.backward:
        return None
    text = f"the layer was called {counted(counts.calls, 'time')} and never active"
    if missed:
        mode = " in training mode" if counts.calls else ""
        text = f"the layer was never called{mode}"
        text += ", and the parameter got no gradient" if hook.parameter else ""
    if base.training and not owner.training:
        why = "the layer is in evaluation mode inside a training model (frozen)"
        cure = "Call train() on the layer, or use active='always'"
    elif missed:
        why, cure = _why_not_called(base, hook.owner_name, window)
    elif not enabled:
        why, cure = "the attachment is paused", "Set attached.enabled = True"
    elif gradient and trained:
        why, cure = "no gradient reached it", "Look for a detach() or no_grad() behind the layer"
    else:
        why, cure = "the model only ran in evaluation mode", "Call model.train() before training"
    return kind, f"{text}: {why}", cure


def _reads_rate(base: nn.Module, hook: SiteHook) -> bool:
    """Whether a module reads the rate of a retuned layer, as fused attention does."""
    if not isinstance(hook, RetuneHook) or hook.ours or hook.site.at == "attribute":
        return False
    return is_read(base, (hook.site.name, *hook.site.aliases), hook.attribute)


def _broken_hook(hook: SiteHook, owner: nn.Module) -> _Fault | None:
    """The reason why a hook gets no calls, or no gradients; None if it is in place."""
    if isinstance(hook, ParameterHook):
        refusal, parameter = shard_refusal(owner), owner._parameters.get(hook.parameter)
        if refusal is not None:
            return Kind.SHARDED, refusal, ""
        if parameter is not None and not parameter.requires_grad:
            why = "the parameter is frozen (requires_grad is False) and gets no gradient"
            return Kind.LOST, why, ""
        if hook.follows(owner):
            return None
        if not hook.lost(owner):
            text = "the layer holds another tensor now, or none, and its hook is no longer there"
            cure = "Run a forward that is not compiled, or call step(): both hook a new parameter"
            return Kind.LOST, text, cure
    return _REPLACED if hook.lost(owner) else None


def _of_update(run: Run) -> _Fault:
    """The reason why the gradient of a parameter was not regularized during training."""
    text = "its gradient was not regularized at any optimizer step: the optimizer"
    if run.optimizers:
        return Kind.NEVER_ACTIVE, f"{text} made no step, or the parameter had no gradient", ""
    cure = "Pass it, attach(..., optimizer=optimizer), or set attached.optimizer = optimizer"
    return Kind.NO_OPTIMIZER, f"{text} is not known", cure


def _why_not_called(base: nn.Module, name: str, window: Window) -> tuple[str, str]:
    """The likely cause why a layer was not called, and the cure."""
    if not name:
        return "the model itself was not called, only layers inside it", "Name these layers"
    layer, parent = find_module(base, name), find_module(base, name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention) or getattr(parent, "fused_attn", False):
        return (
            "fused attention uses the weights and drops values without calling this layer",
            "Name the attention (index=0 of nn.MultiheadAttention) or the projection behind it, "
            "or set fused_attn = False",
        )
    inside = [calls for each, calls in window.layers.items() if each.startswith(f"{name}.")]
    container = isinstance(layer, nn.Sequential | nn.ModuleList | nn.ModuleDict) and len(layer)
    if any(inside) or (container and not inside):
        why = "a container that the model loops over, as gradient checkpointing does"
        return why, "Name the layers inside it"
    why = "a branch not taken, or its parent uses the layer without calling it (it reads the "
    return f"{why}weight, or calls forward() directly)", "Name the parent"


def _interval(hooks: Iterable[SiteHook]) -> int | None:
    """The smallest `every` of all `Watchdog` sites; 0 for never, None without any site."""
    observers = [hook.site.regularizer for hook in hooks]
    found = [each.every or 0 for each in observers if isinstance(each, Watchdog)]
    return min(filter(None, found), default=0) if found else None
