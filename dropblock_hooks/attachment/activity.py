"""The proof that what was attached is on: looked at in every epoch, or a warning.

The first training forward of each window is looked at; when an epoch ends, what compiled code has
done, what gradients have done, and whether the model was trained at all.
"""

from __future__ import annotations

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
from .verify import Window, faults, windows


class ProofHook:
    """Forward hook of the model: counts its forwards, looks at the first one of each window.

    In compiled code it does nothing, and ``Attachment.step`` looks.
    """

    def __init__(self, control: Control, hooks: Iterable[SiteHook]) -> None:
        self.control = control
        self.hooks = tuple(hooks)

    def __call__(self, model: nn.Module, *args: Any) -> None:
        control = self.control
        if torch.compiler.is_compiling():
            return
        if not control.installed or torch._C._current_graph_task_id() != -1:
            return  # a recomputation of checkpointing is no other forward
        record = control.record
        next(record.trained if model.training else record.evaluated)
        if not model.training and torch.is_grad_enabled():
            control.evaluated_with_grad = True
        # in training, a copy may well go its own way
        if control.origin is not None and not model.training and control.falls_behind():
            _tell_of_copy(control, [hook.site for hook in self.hooks])
        if model.training and control.enabled and not control.looked:
            control.looked = True
            look_at_forward(model, control, self.hooks)


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
    if not all(map(_at_work, hooks)):  # else done, and no compiled code was waited for
        window, _ = windows(control, hooks)
        at_layers = [hook for hook in hooks if not isinstance(hook, ParameterHook)]
        shown = [hook for hook in at_layers if not _waits(hook, window)]
        found = _untold(base, control, shown, window)
        text = _listed(found, len(hooks), "the first training forward")
        if text:
            warn(text)


def _at_work(hook: SiteHook) -> bool:
    """Whether eager mode has seen it at work in this window, as far as a forward can show."""
    if isinstance(hook, ParameterHook):
        return True
    counts = hook.site.record.eager_window()
    later = hook.site.regularizer.acts_on == "gradient"  # its turn is in the backward
    return counts.trained > 0 if later else counts.active > 0


def _waits(hook: SiteHook, window: Window) -> bool:
    """Whether it was called, and acts in the backward, which is still to come."""
    site = hook.site
    return site.regularizer.acts_on == "gradient" and window.sites[site.key].calls > 0


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
        if ended and something and news and not control.was_off and not control.is_copy:
            return [_of_no_training(base, control, hooks, window)]
        return []
    if window.off:
        return []
    judged = [hook for hook in hooks if _shows(hook, control)]
    if not _backward_ran(base, hooks, window):
        judged = [hook for hook in judged if hook.site.regularizer.acts_on != "gradient"]
    text = _listed(_untold(base, control, judged, window), len(hooks), "the epoch that has ended")
    return [text] if text else []


def _shows(hook: SiteHook, control: Control) -> bool:
    """Whether the end of a window shows more of a site than its first forward did."""
    return not control.looked or hook.site.regularizer.acts_on == "gradient"


def _backward_ran(base: nn.Module, hooks: Sequence[SiteHook], window: Window) -> bool:
    gradients = (hook.site for hook in hooks if hook.site.regularizer.acts_on == "gradient")
    came = any(window.sites[site.key].active for site in gradients)
    return came or any(p.grad is not None for p in base.parameters())


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
        causes = _lines(_untold(base, control, hooks, ran))
        text += f"; or compiled code ran it, and called none of these layers:\n{causes}"
    return text


def _untold(
    base: nn.Module, control: Control, hooks: Iterable[SiteHook], window: Window
) -> dict[str, list[str]]:
    """Keys of sites that did nothing, by cause; each site once for each kind of fault."""
    found: dict[str, list[str]] = {}
    for hook in hooks:
        key = hook.site.key
        if window.sites[key].active:
            continue
        kind, cause = next(faults(base, hook, window), ("", ""))
        if _is_news(hook, kind) and (key, kind) not in control.told:
            control.told.add((key, kind))
            found.setdefault(cause, []).append(key)
    return found


def _is_news(hook: SiteHook, kind: str) -> bool:
    """Whether a fault is one to warn of: that a parameter is frozen is likely meant."""
    if isinstance(hook, ParameterHook):
        return kind in ("replaced", "never_active")
    return bool(kind)


def _listed(found: dict[str, list[str]], sites: int, when: str) -> str:
    n = sum(map(len, found.values()))
    return f"{n} of {sites} sites did nothing in {when}:\n{_lines(found)}" if n else ""


def _lines(found: dict[str, list[str]]) -> str:
    return "\n".join(f"  - {', '.join(keys)}: {cause}" for cause, keys in found.items())


def proofs_on(module: nn.Module) -> list[ProofHook]:
    """Our proofs on this very module."""
    return [hook for hook in module._forward_hooks.values() if isinstance(hook, ProofHook)]


def take_off_proof(control: Control, module: nn.Module) -> None:
    """Take off the proof of this Attachment."""
    for proof in proofs_on(module):
        if proof.control is control:
            take_off(proof, module)
