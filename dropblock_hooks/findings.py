"""What ``verify`` finds wrong with an Attachment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from .causes import why_inactive, why_not_called
from .control import Control
from .hooks import ParameterHook, SiteHook
from .site import ran_compiled
from .wrappers import bare_type, find_module, shard_refusal


@dataclass(frozen=True)
class Finding:
    """Something that is wrong at a site; `kind` is for programs, `message` for people."""

    key: str
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


_GONE = (
    "it was replaced, or written out, as torch.fx.symbolic_trace does with containers; attach to "
    "the model that is here"
)


def find_faults(
    base: nn.Module, control: Control, installed: list[tuple[nn.Module, SiteHook]]
) -> list[Finding]:
    """All that is wrong, in the order of the sites."""
    if not control.installed:
        return [Finding(".", "removed", "the attachment was removed")]
    found = []
    if control.expects_scaler and control.grad_scaler is None:
        message = "gradient bounds are not scaled: set attached.grad_scaler again after loading"
        found.append(Finding(".", "grad_scaler", message))
    ran = control.forwards > 0 or any(hook.site.calls for _, hook in installed)
    compiled = ran_compiled(hook.site for _, hook in installed)
    if not ran:
        message = "no layer was called since it was attached: run a training step first"
        found.append(Finding(".", "not_run", message))
    calls = {hook.site.name: hook.site.calls for _, hook in installed}
    here = {hook.site.key for _, hook in installed}
    for key in control.keys:
        if key not in here:
            message = f"its layer is none of this {type(base).__name__}: {_GONE}"
            found.append(Finding(key, "gone", message))
    for module, hook in installed:
        for kind, message in _faults(base, module, hook, calls if ran else None, compiled):
            found.append(Finding(hook.site.key, kind, message))
    return found


def _faults(
    base: nn.Module, module: nn.Module, hook: SiteHook, calls: dict[str, int] | None, compiled: bool
) -> Iterator[tuple[str, str]]:
    site, owner = hook.site, hook.owner_name
    current = find_module(base, owner)
    if isinstance(hook, ParameterHook) and current is not None and hook.follows(current):
        pass  # also where another layer has taken the place of the one that was attached to
    elif current is not module:
        now = "is gone" if current is None else f"is another {bare_type(current).__name__}"
        yield "replaced", f"the layer '{owner}' {now} since it was attached: attach again"
    elif isinstance(hook, ParameterHook) and shard_refusal(module) is not None:
        yield "sharded", str(shard_refusal(module))
    elif hook.lost(module):
        yield "lost", _why_lost(module, hook)
    if calls is not None and not site.calls and site.at != "parameter" and current is module:
        cause = why_not_called(base, owner, calls, compiled)
        yield "never_called", f"the layer '{owner}' ({site.module_type}) was never called: {cause}"
    elif site.calls and not site.active_calls:
        enabled, acts_on = site.control.enabled, site.regularizer.acts_on
        cause = why_inactive(base, module, enabled, acts_on)
        yield "never_active", f"called {site.calls} times and never active: {cause}"
    if site.stands_still:
        rate = f"its rate is still {site.rate} after {site.active_calls} calls"
        yield "not_stepped", f"{rate}: call attached.step(epoch) at the start of each epoch"


def _why_lost(module: nn.Module, hook: SiteHook) -> str:
    if not isinstance(hook, ParameterHook):
        return f"its hook is no longer on '{hook.owner_name}': attach again"
    parameter = module._parameters.get(hook.parameter)
    if parameter is None:
        return f"'{hook.owner_name}' no longer has this parameter: attach again"
    if not parameter.requires_grad:
        return "the parameter is frozen (requires_grad is False) and gets no gradient"
    return (
        "the parameter is another object: a forward that is not compiled, or step(), will hook it"
    )
