"""What is wrong with the sites of an Attachment: in one window, an epoch say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from ..selectors.wrappers import bare_type, find_module, shard_refusal
from ..sites.counts import Counts, standing_still
from ..sites.grad_scaler import MISSING, in_use, key_of_bounded
from ..sites.hooks import ParameterHook, SiteHook, hooks_on
from ..sites.shared import Control
from .inactive import why_inactive, why_not_called

_GONE = (
    "it was replaced, or written out, as torch.fx.symbolic_trace does with containers; attach to "
    "the model that is here"
)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong at a site; `kind` is for programs, `message` for people."""

    key: str
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


@dataclass(frozen=True)
class Window:
    """The calls of one window.

    Attributes:
        sites: of each site, by its key.
        layers: of each layer that has a site, by its name.
        model: forwards of the model; none where it was compiled.
        off: whether a training forward met the regularizers switched off.
        compiled: whether compiled code has ever called a site.
    """

    sites: dict[str, Counts]
    layers: dict[str, int]
    model: Counts
    off: bool
    compiled: bool

    @property
    def ran(self) -> bool:
        """Whether anything was called."""
        return self.model.calls > 0 or any(each.calls or each.active for each in self._all)

    @property
    def trained(self) -> bool:
        """Whether anything was called in training mode, or regularized."""
        return self.model.trained > 0 or any(each.trained or each.active for each in self._all)

    @property
    def _all(self) -> Iterable[Counts]:
        return self.sites.values()


def windows(control: Control, hooks: Iterable[SiteHook]) -> tuple[Window, Window]:
    """The open window, and the one before. Waits for compiled code."""
    sites = [hook.site for hook in hooks]
    with standing_still([control.record, *(site.record for site in sites)]):
        read = {site.key: site.record.read(elements=False) for site in sites}
        model = control.record.read(elements=False)
    compiled = any(each.compiled for each in read.values())
    off = control.idled or (compiled and control.was_off), control.idled_before
    made = []
    for i, which in enumerate(("window", "closed")):
        counts = {key: getattr(each, which) for key, each in read.items()}
        layers = {site.name: counts[site.key].calls for site in sites}
        made.append(Window(counts, layers, getattr(model, which), off[i], compiled))
    return made[0], made[1]


def last_window(control: Control, hooks: Iterable[SiteHook]) -> Window:
    """The window that a user means: the open one, or the one before if that was not trained in.

    With ``step(epoch)`` at the start of an epoch it is the open one, at its end. After ``step()``
    at the end of an epoch it is the one just closed, also when a validation follows.
    """
    now, before = windows(control, hooks)
    return before if before.ran and not now.trained else now


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
    elif (
        control.grad_scaler is None
        and key_of_bounded(hook.site for _, hook in installed) is not None
        and in_use()
    ):
        found.append(Finding(".", "grad_scaler", MISSING))
    window = last_window(control, [hook for _, hook in installed])
    if not window.ran:
        message = (
            "no layer was called in this epoch, nor since it was attached or loaded: run a "
            "training step first"
        )
        found.append(Finding(".", "not_run", message))
    here = {hook.site.key for _, hook in installed}
    for key in control.keys:
        if key not in here:
            message = f"its layer is none of this {type(base).__name__}: {_GONE}"
            found.append(Finding(key, "gone", message))
    for module, hook in installed:
        site = hook.site
        for kind, cause in faults(base, hook, window, module):
            message = _message(kind, cause, hook, window.sites[site.key].calls)
            found.append(Finding(site.key, kind, message))
        if site.resumed():
            found.append(Finding(site.key, "not_stepped", site.waiting()))
    return found


def _message(kind: str, cause: str, hook: SiteHook, calls: int) -> str:
    if kind == "never_called":
        return f"the layer '{hook.owner_name}' ({hook.site.module_type}) was {cause}"
    if kind == "never_active" and calls:
        times = "once" if calls == 1 else f"{calls} times"
        return cause.replace("called", f"called {times}", 1)
    return cause


def faults(
    base: nn.Module, hook: SiteHook, window: Window, module: nn.Module | None = None
) -> Iterator[tuple[str, str]]:
    """Kind and cause of what is wrong at a site; the same words for sites in the same situation.

    Args:
        base: the model.
        hook: that of the site.
        window: what happened.
        module: the layer that it was put on, where that is known.
    """
    if isinstance(hook, ParameterHook):
        yield from _of_parameter(base, hook, window, module)
        return
    there = find_module(base, hook.owner_name)
    if there is None or (module is not None and there is not module):
        now = "is gone" if there is None else f"is another {bare_type(there).__name__}"
        yield "replaced", f"the layer '{hook.owner_name}' {now} since it was attached: attach again"
        return  # which is why it was not called
    if hook.lost(there):
        if module is None:  # then a layer with another hook is another layer, most likely
            yield "replaced", "the layer was replaced since it was attached: attach again"
        yield "lost", f"its hook is no longer on '{hook.owner_name}': attach again"
    if window.ran:
        yield from _of_calls(base, hook, window, there)


def _of_calls(
    base: nn.Module, hook: SiteHook, window: Window, there: nn.Module | None
) -> Iterator[tuple[str, str]]:
    site, counts = hook.site, window.sites[hook.site.key]
    if counts.active:
        return
    in_training = there is not None and there.training and window.trained and not counts.trained
    if not counts.calls or in_training:
        cause = why_not_called(base, hook.owner_name, window.layers, window.compiled)
        yield "never_called", f"never called{' in training' if counts.calls else ''}: {cause}"
    elif there is not None:
        enabled = site.control.enabled and not window.off
        cause = why_inactive(base, there, enabled, site.regularizer.acts_on)
        yield "never_active", f"called and never active: {cause}"


def _of_parameter(
    base: nn.Module, hook: ParameterHook, window: Window, module: nn.Module | None
) -> Iterator[tuple[str, str]]:
    """What matters is that a gradient comes: the layer need not be called, nor be the same."""
    owner = find_module(base, hook.owner_name)
    lost = _why_lost(hook, owner, module)
    if lost is not None:
        yield lost
        return
    counts = window.sites[hook.site.key]
    if counts.active or not (window.trained or counts.calls) or owner is None:
        return
    enabled = hook.site.control.enabled and not window.off
    cause = why_inactive(base, owner, enabled, "gradient")
    if counts.calls or not enabled:
        yield "never_active", f"called and never active: {cause}"
    else:
        why = why_not_called(base, hook.owner_name, window.layers, window.compiled)
        yield "never_active", f"no gradient has come to it, and its layer was never called: {why}"


def _why_lost(
    hook: ParameterHook, owner: nn.Module | None, module: nn.Module | None
) -> tuple[str, str] | None:
    name = hook.owner_name
    if owner is None:
        return "replaced", f"the layer '{name}' is gone since it was attached: attach again"
    refusal, parameter = shard_refusal(owner), owner._parameters.get(hook.parameter)
    if refusal is not None:
        return "sharded", refusal
    if module is not None and owner is not module and not hook.holds(parameter):
        now = bare_type(owner).__name__
        return (
            "replaced",
            f"the layer '{name}' is another {now} since it was attached: attach again",
        )
    if parameter is None:
        return "lost", f"'{name}' no longer has this parameter: attach again"
    if not parameter.requires_grad:
        return "lost", "the parameter is frozen (requires_grad is False) and gets no gradient"
    if hook not in hooks_on(owner) and not hook.holds(parameter):
        return "lost", f"its hook is no longer on '{name}': attach again"
    if not hook.holds(parameter):
        return "lost", (
            "the parameter is another object: a forward that is not compiled, or step(), will "
            "hook it"
        )
    return None
