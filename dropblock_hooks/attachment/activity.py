"""Whether what was attached is on: looked at in every epoch, with a warning where it is not.

The first training forward of each window is looked at; when an epoch ends, what compiled code has
done, what gradients have done, and whether the model was trained at all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..selectors.wrappers import bare_type
from ..sites.counts import Counts
from ..sites.hooks import SiteHook, take_off
from ..sites.parameters import ParameterHook
from ..sites.shared import Control, graphs_built
from ..sites.site import Site
from ..tables import counted
from ..warn import warn
from .compiled import has_compiled
from .faults import Window, fault_of, needs_calls, runs_unseen
from .verify import windows
from .watchdog import Watching


class ModelHook:
    """Forward hook of the model: counts its forwards, looks at the first one of each window.

    In compiled code it does nothing, and ``Attachment.step`` looks.
    """

    closes = True  # it is called behind the hooks of sites

    def __init__(self, control: Control, hooks: Iterable[SiteHook]) -> None:
        self.control = control
        self.hooks = tuple(hooks)
        self.watching = Watching.of(self.hooks)

    def __call__(self, model: nn.Module, *args: Any) -> None:
        control = self.control
        if torch.compiler.is_compiling():
            return
        if not control.installed or torch._C._current_graph_task_id() != -1:
            return  # a recomputation of checkpointing is no other forward
        record = control.record
        if model.training:
            record.trained += 1
        else:
            record.evaluated += 1
        if not model.training and torch.is_grad_enabled():
            control.evaluated_with_grad = True
        # in training, a copy may well go its own way
        if control.origin is not None and not model.training and control.falls_behind():
            _tell_of_copy(control, [hook.site for hook in self.hooks])
        if not (model.training and control.enabled):
            return
        if torch._C._are_functorch_transforms_active():
            return  # no number can be read there
        if not control.looked:
            control.looked = True
            look_at_forward(model, control, self.hooks)
        if self.watching is not None:
            self.watching.pass_forward(model, control, self.hooks, args)


def _tell_of_copy(control: Control, sites: Sequence[Site]) -> None:
    """Warn, once, of rates that stand still in a copy."""
    moving = [s.key for s in sites if s.regularizer.moving and s.acts(False)]
    if not moving:
        return
    control.origin = None
    warn(
        f"{', '.join(moving[:3])}{' and others' if len(moving) > 3 else ''} of a copied model: its "
        f"rates are still those of epoch {control.epoch:g}, which its original has left: call "
        "attachments(copy)[0].step(epoch) beside attached.step(epoch)"
    )


def look_at_forward(base: nn.Module, control: Control, hooks: Sequence[SiteHook]) -> None:
    """Warn of the sites that did nothing in the first training forward of a window."""
    idle = [hook for hook in hooks if not _at_work(hook) and needs_calls(hook)]
    if idle:  # else done, and no compiled code was waited for
        window = replace(windows(control, hooks)[0], backward=False)
        lines = _news(base, control, idle, window)
        if lines:
            warn(_did_nothing(lines, len(hooks), "the first training forward"))


def _at_work(hook: SiteHook) -> bool:
    """Whether eager mode has seen it at work in this window, as far as a forward can show."""
    if isinstance(hook, ParameterHook):
        return True
    counts = hook.site.record.eager_window()
    later = hook.site.regularizer.acts_on == "gradient"  # its turn is in the backward
    return counts.trained > 0 if later else counts.active > 0


def look_back(
    base: nn.Module, control: Control, hooks: Sequence[SiteHook], ended: bool
) -> list[str]:
    """What there is to warn of when a window closes.

    Args:
        base: the model.
        control: of the Attachment.
        hooks: of its sites.
        ended: whether an epoch has ended, rather than time been set.
    """
    window, _ = windows(control, hooks)
    if not window.trained:
        something = graphs_built() != control.graphs  # else nobody trains: a look at the rates
        news = (".", "not_trained") not in control.told
        known = not control.was_off and not control.is_copy
        if ended and something and news and known and not runs_unseen(base, hooks):
            return [_of_no_training(base, control, hooks, window)]
        return []
    if window.off:
        return []
    gradients = [hook for hook in hooks if hook.site.regularizer.acts_on == "gradient"]
    # of the others, the first forward has shown what the end of a window shows
    judged = [hook for hook in (gradients if control.looked else hooks) if needs_calls(hook)]
    came = any(window.sites[hook.site.key].active for hook in gradients)
    window = replace(window, backward=came or any(p.grad is not None for p in base.parameters()))
    lines = _news(base, control, judged, window)
    return [_did_nothing(lines, len(hooks), "the epoch that has ended")] if lines else []


def _of_no_training(
    base: nn.Module, control: Control, hooks: Sequence[SiteHook], window: Window
) -> str:
    """Why no training forward was seen: compiled code that calls none of the layers can't tell."""
    control.told.add((".", "not_trained"))
    if control.evaluated_with_grad:  # without gradients, it was but validated
        forwards = counted(window.model.evaluated, "forward")
        return (
            f"an epoch has ended in which this {bare_type(base).__name__} ran {forwards}, all in "
            "evaluation mode: call model.train() before training"
        )
    text = (
        f"an epoch has ended in which autograd worked, and this {bare_type(base).__name__} ran no "
        "training forward: if another model is trained (a copy, or one that a trainer has made "
        "anew), attach to that one"
    )
    if has_compiled():
        ran = replace(window, model=Counts(trained=1), compiled=True)
        causes = "\n".join(_lines(_news(base, control, hooks, ran)))
        text += f"; or compiled code ran it, and called none of these layers:\n{causes}"
    return text


def _news(
    base: nn.Module, control: Control, hooks: Iterable[SiteHook], window: Window
) -> dict[str, list[str]]:
    """Keys of sites that did nothing, by cause; each site once for each kind of fault."""
    found: dict[str, list[str]] = {}
    for hook in hooks:
        key = hook.site.key
        if window.sites[key].active:
            continue
        fault = fault_of(base, hook, window)
        if fault is None or (key, fault.kind) in control.told:
            continue
        # that a parameter is frozen is likely meant
        if not isinstance(hook, ParameterHook) or fault.kind in _TOLD:
            control.told.add((key, fault.kind))
            found.setdefault(str(fault), []).append(key)
    return found


_TOLD = ("replaced", "never_active", "no_optimizer")
"""Of parameters, what there is a warning of."""


def _did_nothing(found: dict[str, list[str]], sites: int, when: str) -> str:
    n = sum(map(len, found.values()))
    return "\n".join([f"{n} of {sites} sites did nothing in {when}:", *_lines(found)])


def _lines(found: dict[str, list[str]]) -> list[str]:
    return [f"  - {', '.join(keys)}: {cause}" for cause, keys in found.items()]


def take_off_model_hook(control: Control, module: nn.Module) -> None:
    """Take off the hook of this Attachment on the model."""
    for hook in list(module._forward_hooks.values()):
        if isinstance(hook, ModelHook) and hook.control is control:
            take_off(hook, module)
