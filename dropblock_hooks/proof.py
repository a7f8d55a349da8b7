"""The proof that what was attached is on: after the first training forward, or a warning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .causes import why_inactive, why_not_called
from .control import Control
from .hooks import hooks_on, take_off
from .site import Site, ran_compiled
from .warn import warn
from .wrappers import find_module


class ProofHook:
    """Forward hook of the model: counts its forwards, and looks at its sites after the first one.

    In compiled code it does nothing, and ``Attachment.step`` looks.
    """

    def __init__(self, control: Control, sites: Iterable[Site]) -> None:
        self.control = control
        self.sites = tuple(sites)

    def __call__(self, model: nn.Module, *args: Any) -> None:
        control = self.control
        if torch.compiler.is_compiling():
            return
        if not control.installed or torch._C._current_graph_task_id() != -1:
            return  # a recomputation of checkpointing is no other forward
        control.forwards += 1
        # in training, a copy may well go its own way
        if control.origin is not None and not model.training and control.falls_behind():
            _tell_of_copy(model, control, self.sites)
        if model.training and not control.proved:
            prove(model, control, self.sites)


def _tell_of_copy(model: nn.Module, control: Control, sites: Sequence[Site]) -> None:
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


def prove(base: nn.Module, control: Control, sites: Sequence[Site]) -> None:
    """Warn, once, of the sites that did nothing in a training forward."""
    control.proved = True
    faults: dict[str, list[str]] = {}
    calls = {site.name: site.calls for site in sites if site.at != "parameter"}
    compiled = ran_compiled(sites)
    for site in sites:
        cause = _fault(base, site, calls, compiled)
        if cause is not None and site.key not in control.told:
            faults.setdefault(cause, []).append(site.key)
    if faults:
        lines = [f"  - {', '.join(keys)}: {cause}" for cause, keys in faults.items()]
        n = sum(map(len, faults.values()))
        warn(
            f"{n} of {len(sites)} sites did nothing in the first training forward:\n"
            + "\n".join(lines)
        )


def _fault(base: nn.Module, site: Site, calls: dict[str, int], compiled: bool) -> str | None:
    if site.at == "parameter":
        return None  # its owner need not be called
    module = find_module(base, site.name)
    if module is not None and all(hook.site is not site for hook in hooks_on(module)):
        return "the layer was replaced since it was attached: attach again"
    if not site.calls:
        return f"never called: {why_not_called(base, site.name, calls, compiled)}"
    works = site.active_calls or site.regularizer.acts_on == "gradient"  # whose turn is later
    if module is None or works or not site.control.enabled:
        return None
    return f"called and never active: {why_inactive(base, module, True, 'activation')}"


def proofs_on(module: nn.Module) -> list[ProofHook]:
    """Our proofs on this very module."""
    return [hook for hook in module._forward_hooks.values() if isinstance(hook, ProofHook)]


def take_off_proof(control: Control, module: nn.Module) -> None:
    """Take off the proof of this Attachment."""
    for proof in proofs_on(module):
        if proof.control is control:
            take_off(proof, module)
