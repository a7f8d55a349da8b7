"""What ``verify`` finds wrong with an Attachment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from .hooks import SiteHook
from .site import Control, Site


@dataclass(frozen=True)
class Finding:
    """Something that is wrong at a site; `kind` is for programs, `message` for people."""

    key: str
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


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
    if not any(hook.site.calls for _, hook in installed):
        message = "no layer was called since it was attached: run a training step first"
        found.append(Finding(".", "not_run", message))
    ran = any(hook.site.calls for _, hook in installed)
    for module, hook in installed:
        for kind, message in _faults(base, module, hook, ran):
            found.append(Finding(hook.site.key, kind, message))
    return found


def _faults(
    base: nn.Module, module: nn.Module, hook: SiteHook, ran: bool
) -> Iterator[tuple[str, str]]:
    site, owner = hook.site, hook.owner_name
    current = _module(base, owner)
    if current is not module:
        now = "is gone" if current is None else f"is another {type(current).__name__}"
        yield "replaced", f"the layer '{owner}' {now} since it was attached: attach again"
    elif hook.lost(module):
        yield "lost", f"its hook is no longer on '{owner}': attach again, or run a forward"
    if ran and not site.calls and site.at != "parameter":
        yield "never_called", f"the layer '{owner}' ({site.module_type}) was never called"
    elif site.calls and not site.active_calls:
        yield "never_active", _why_inactive(base, module, site)


def _why_inactive(base: nn.Module, module: nn.Module, site: Site) -> str:
    called = f"called {site.calls} times and never active"
    if base.training and not module.training:
        return f"{called}: the layer is in evaluation mode inside a training model"
    if not site.control.enabled:
        return f"{called}: the attachment is paused"
    if site.regularizer.acts_on == "gradient":
        return f"{called}: no gradient has come through it"
    return f"{called}: only evaluation was run"


def _module(base: nn.Module, name: str) -> nn.Module | None:
    try:
        return base.get_submodule(name)
    except AttributeError:
        return None
