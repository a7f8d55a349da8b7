"""Finds out why a site did nothing in a window.

`Attachment.verify` and `plan` ask `diagnose` about each site. `find_idle` does so when
`Attachment.step` ends an epoch. After the first training forward of a window, it does so for the
layers that this forward should have called.

There is one function for each cause. It takes the `IdleSite` and returns a `Cause` from
``messages``, or None if this is not the cause. The first cause that holds is reported.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import messages
from ..findings import Cause, Finding, Kind, Message, Severity
from ..selectors.wrappers import find_module
from ..sites.counter import Snapshot
from ..sites.held import ParameterHook
from ..sites.hooks import SiteHook
from ..sites.windows import Window
from ..tables import counted
from .lost import find_frozen, find_lost

# so many calls without an update are normal, because a GradScaler skips updates at first
_MOST_WAITING = 100


@dataclass(frozen=True)
class IdleSite:
    """A site that did nothing in a window in which the model or another site ran."""

    hook: SiteHook
    model: nn.Module
    module: nn.Module  # that the hook is on
    window: Window

    @property
    def counts(self) -> Snapshot:
        """The counts of the site in the window."""
        return self.window.sites[self.hook.site.key]

    @property
    def trained(self) -> bool:
        """Whether any site or the model was trained in the window."""
        return self.window.has("trained", "active")

    @property
    def enabled(self) -> bool:
        """Whether the attachment is on, and was on during the whole window."""
        return self.hook.run.enabled and not self.window.has("off")

    @property
    def on_gradient(self) -> bool:
        """Whether the site acts on a gradient."""
        return self.hook.site.regularizer.acts_on == "gradient"

    @property
    def misses_call(self) -> bool:
        """Whether the layer was not called, rather than called without effect."""
        if not (self.enabled or self.hook.by_call):
            return False
        only_evaluated = self.trained and self.module.training and not self.counts.trained
        return not self.counts.calls or only_evaluated

    @property
    def missed_training(self) -> bool:
        """Whether the model was trained without a call of the layer, and then evaluated."""
        return self.trained and not self.model.training and not self.counts.trained


def find_idle(base: nn.Module, hooks: Iterable[SiteHook], window: Window) -> list[Finding]:
    """Find the faults of the sites that did nothing in a window.

    A parameter that is frozen after some training is no fault. Neither is one that waits for an
    update.
    """
    idle = [hook for hook in hooks if not window.sites[hook.site.key].active]
    findings = []
    for hook in idle:
        fault = diagnose(hook, base, window)
        if fault is not None and fault.severity != Severity.NOTE:
            findings.append(fault)

    never = [hook for hook in idle if not hook.site.active_calls]
    if never:
        findings += find_frozen(base, never[0].run, never)
    return findings


def diagnose(hook: SiteHook, model: nn.Module, window: Window) -> Finding | None:
    """Return why a site did nothing in a window, or can't act any more; None if it works."""
    owner = hook.find(model)
    lost = find_lost(hook, owner)
    if lost is not None or owner is None:
        return lost

    something_ran = window.has("calls", "active")
    acted = window.sites[hook.site.key].active
    if acted or window.failed or not something_ran or not hook.needs_calls:
        return None

    site = IdleSite(hook, model, owner, window)
    if isinstance(hook, ParameterHook):
        return _idle_parameter(hook, site)
    return _idle_site(site)


def _idle_parameter(hook: ParameterHook, site: IdleSite) -> Finding | None:
    """Find out why the gradient of a parameter was not regularized."""
    was_frozen = hook.site.frozen  # when the window began
    if was_frozen or hook.is_frozen(site.module):
        return None
    if hook.site.regularizer.accumulates:
        return _no_update(site)
    if site.trained or site.counts.calls:
        return _idle_site(site)
    return None


def _no_update(site: IdleSite) -> Finding | None:
    """Find out why a regularizer of accumulated gradients saw no step of an optimizer."""
    if not (site.trained and site.enabled):
        return None
    if not site.hook.run.optimizers:
        return _finding(messages.STEP_UNKNOWN, site)
    if site.counts.calls and not site.counts.trained:
        return _idle_site(site)  # the layer was in evaluation mode
    if not _others_updated(site):
        waits = _waits_for_update(site)
        return _finding(messages.NO_STEP_YET if waits else messages.NO_STEP, site)
    if site.hook.site.active_calls:
        return None  # heads of several tasks may take turns
    return _finding(messages.UPDATES_WITHOUT_IT, site)


def _waits_for_update(site: IdleSite) -> bool:
    """Return whether the optimizer of the parameter has made no step in a window that is short.

    A GradScaler has skipped the step, or gradients are accumulated over several windows. If the
    parameters have changed, an optimizer that the attachment does not know makes the steps.
    """
    hook: Any = site.hook
    parameter = hook.held(site.module)
    window = site.window
    unchanged = []  # for each optimizer of the parameter
    for held, is_unchanged in zip(window.held, window.unchanged, strict=True):
        if id(parameter) in held:
            unchanged.append(is_unchanged)
    if not unchanged or not all(unchanged):
        return False

    was_updated = hook.site.active_calls > 0
    calls = site.counts.trained if was_updated else hook.site.counter.trained
    return calls < _MOST_WAITING


def _others_updated(site: IdleSite) -> bool:
    """Return whether the optimizer of the parameter has updated other parameters."""
    window = site.window
    if len(window.held) > 1:
        return False  # it is unknown which of them has made a step

    hook: Any = site.hook
    parameter = hook.held(site.module)
    return id(parameter) in window.held[0] and window.had_update


def _idle_site(site: IdleSite) -> Finding | None:
    """Find out why a site did nothing, from the counts and modes of the layer and the model."""
    message = _what_is_missing(site)
    never_active = message.kind == Kind.NEVER_ACTIVE
    if site.on_gradient and never_active and not site.window.backward:
        return None  # the gradient comes later

    cause = next(cause for find in _CAUSES if (cause := find(site)) is not None)
    calls = counted(site.counts.calls, "time")
    return _finding(message, site, why=cause.why, cure=cause.cure, calls=calls)


def _what_is_missing(site: IdleSite) -> Message:
    """Return the message: the layer was not called, not called in training, or without effect."""
    if not site.misses_call:
        return messages.NEVER_ACTIVE
    called = site.counts.calls
    if site.hook.by_call:
        return messages.NEVER_CALLED_IN_TRAINING if called else messages.NEVER_CALLED
    return messages.NO_GRADIENT_IN_TRAINING if called else messages.NO_GRADIENT_NO_CALL


def _frozen_layer(site: IdleSite) -> Cause | None:
    if site.model.training and not site.module.training:
        return messages.FROZEN_LAYER
    return None


def _not_called(site: IdleSite) -> Cause | None:
    # compiled code has no operation for a site that does not act in evaluation mode
    by_compiled_code = site.missed_training and site.hook.by_call and site.hook.run.compiled
    if not (site.misses_call or by_compiled_code):
        return None
    return _why_not_called(site.model, site.hook.site.owner, site.hook.run.compiled)


def _paused(site: IdleSite) -> Cause | None:
    return None if site.enabled else messages.PAUSED


def _needs_no_gradient(site: IdleSite) -> Cause | None:
    if site.on_gradient and not site.hook.site.differentiable:
        return messages.NEEDS_NO_GRADIENT
    return None


def _no_gradient(site: IdleSite) -> Cause | None:
    return messages.NO_GRADIENT_REACHED if site.on_gradient and site.trained else None


def _not_while_training(site: IdleSite) -> Cause | None:
    return messages.NOT_WHILE_TRAINING if site.missed_training else None


def _raised(site: IdleSite) -> Cause | None:
    # the causes before this one in `_CAUSES` do not hold
    return messages.RAISED if site.counts.trained else None


def _only_evaluated(site: IdleSite) -> Cause:
    return messages.ONLY_EVALUATED


_CAUSES: tuple[Callable[[IdleSite], Cause | None], ...] = (
    _frozen_layer,
    _not_called,
    _paused,
    _needs_no_gradient,
    _not_while_training,
    _no_gradient,
    _raised,
    _only_evaluated,
)


def _why_not_called(model: nn.Module, name: str, compiled: bool) -> Cause:
    """Return the likely reason why a layer was not called.

    Args:
        model: the model.
        name: the name of the layer; "" is the model itself.
        compiled: whether compiled code has called other sites.
    """
    if not name:
        return messages.ONLY_LAYERS_CALLED

    parent = find_module(model, name.rpartition(".")[0])
    is_attention = isinstance(parent, nn.MultiheadAttention)
    if is_attention or getattr(parent, "fused_attn", False):
        return messages.FUSED_ATTENTION
    if compiled:
        return messages.NOT_IN_COMPILED_CODE

    layer = find_module(model, name)
    if isinstance(layer, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return messages.CONTAINER
    return messages.BRANCH_NOT_TAKEN


def _finding(message: Message, site: IdleSite, **values: object) -> Finding:
    """Make a finding about an idle site."""
    key = site.hook.site.key
    return message.finding(key, epoch=site.hook.run.epoch, **values)
