"""Whether the sites of an attachment act: checked in every epoch, with warnings.

The first training forward of a window shows sites that were not called. The end of an epoch shows
the rest: what compiled code did, which gradients came, and whether the model was trained at all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..findings import Finding, Kind, Severity, tell
from ..selectors.wrappers import bare_type
from ..sites.hooks import SiteHook
from ..sites.parameters import ParameterHook
from ..sites.run import Run
from ..tables import counted
from .faults import Window, fault_of, needs_calls, runs_unseen
from .verify import windows
from .watchdog import interval, watch_forward


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
            watch_forward(model, run, self.hooks, self.every)


def look_at_forward(base: nn.Module, run: Run, hooks: Sequence[SiteHook]) -> None:
    """Warn of the sites that did nothing in the first training forward of a window."""
    idle = [hook for hook in hooks if not _at_work(hook) and needs_calls(hook)]
    if idle:  # otherwise all is well, and compiled code need not be waited for
        window = replace(windows(run, hooks)[0], backward=False)
        tell(_idle_sites(base, idle, window), run.told)


def _at_work(hook: SiteHook) -> bool:
    """Whether eager mode has seen it at work in this window, as far as a forward can show."""
    if isinstance(hook, ParameterHook):
        return True
    trained, active = hook.site.counter.trained_in_window
    later = hook.site.regularizer.acts_on == "gradient"  # its turn is in the backward
    return trained > 0 if later else active > 0


def look_back(base: nn.Module, run: Run, hooks: Sequence[SiteHook], ended: bool) -> list[Finding]:
    """What is wrong with a window that closes.

    Args:
        base: the model.
        run: of the attachment.
        hooks: of its sites.
        ended: whether an epoch has ended, rather than the time been set.
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
        if window.sites[hook.site.key].active:
            continue
        fault = fault_of(base, hook, window)
        if fault and (not isinstance(hook, ParameterHook) or fault.kind in _OF_PARAMETERS):
            found.append(fault)
    return found
