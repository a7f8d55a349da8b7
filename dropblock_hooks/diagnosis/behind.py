"""Finds layers that compiled code has almost stopped calling.

`Attachment.verify` asks for them, and `Attachment.step` at the end of an epoch.
"""

from collections.abc import Iterable

from torch import nn

from .. import messages
from ..findings import Finding
from ..sites.hooks import SiteHook
from ..sites.run import Run
from ..sites.windows import Window
from ..tables import counted

_FEWEST_FORWARDS = 20  # in fewer forwards, layers that are called at random may differ much
_FEW_CALLS = 0.1  # a layer is reported below this share of the forwards of the busiest layer


def find_behind(
    base: nn.Module, run: Run, hooks: Iterable[SiteHook], window: Window
) -> list[Finding]:
    """Find the sites of layers that compiled code has almost stopped calling.

    The first forward of the window shows how often a forward calls each layer. Experts and layers
    that are skipped at random are called less often than others, so only very few calls are a
    fault. In eager mode the model decides about each call, so nothing is reported.
    """
    if not run.compiled:
        return []
    forwards = {}  # the number of forwards of the window in which the layer was called
    for hook in hooks:
        key = hook.site.key
        calls_in_a_forward = run.first_calls.get(key, 0)
        # the calls of a frozen layer are not among the calls in training
        if hook.by_call and calls_in_a_forward and not _is_frozen(hook, base):
            forwards[key] = window.sites[key].trained / calls_in_a_forward

    most = max(forwards.values(), default=0)
    if most < _FEWEST_FORWARDS:
        return []
    findings = []
    for key, number in forwards.items():
        # `diagnose` reports layers without any call
        is_behind = 0 < number <= _FEW_CALLS * most
        if not is_behind:
            continue
        cause = messages.NOT_IN_COMPILED_CODE
        finding = messages.SELDOM_CALLED.finding(
            key,
            epoch=run.epoch,
            calls=counted(round(number), "training forward"),
            most=round(most),
            why=cause.why,
            cure=cause.cure,
        )
        findings.append(finding)
    return findings


def _is_frozen(hook: SiteHook, base: nn.Module) -> bool:
    """Return whether a layer is in evaluation mode inside a model that trains."""
    owner = hook.find(base)
    return base.training and owner is not None and not owner.training
