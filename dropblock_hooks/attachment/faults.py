"""Faults: what is wrong at a site, and the likely cause.

There is one finder, `fault_of`. ``verify`` lists what it finds, the first training forward and the
end of an epoch warn of it, ``plan`` groups it: they differ in how they tell it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from ..regularizers.droppers import is_read
from ..selectors.wrappers import bare_type, find_module, named_modules, shard_refusal
from ..sites.counts import Counts
from ..sites.hooks import SiteHook, hooks_on
from ..sites.parameters import ParameterHook
from ..sites.retune import RetuneHook
from ..sites.updates import MISSING, UpdateHook
from .compiled import has_compiled

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Fault(NamedTuple):
    """What is wrong at a site: the same words for sites in the same situation.

    Attributes:
        kind: for programs.
        what: for people.
        why: the likely cause, where `what` does not tell it.
    """

    kind: str
    what: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" if self.why else self.what


@dataclass(frozen=True)
class Window:
    """The calls of one window.

    Attributes:
        sites: of each site, by its key.
        layers: of each layer that has a site, by its name.
        model: forwards of the model; none where it was compiled.
        off: whether a training forward met the regularizers switched off.
        compiled: whether compiled code has ever called a site.
        backward: whether gradients may have come; before a backward, none can be missing.
    """

    sites: dict[str, Counts]
    layers: Mapping[str, int]
    model: Counts
    off: bool
    compiled: bool
    backward: bool = True

    @property
    def ran(self) -> bool:
        """Whether anything was called."""
        return self.model.calls > 0 or any(
            each.calls or each.active for each in self.sites.values()
        )

    @property
    def trained(self) -> bool:
        """Whether anything was called in training mode, or regularized."""
        return self.model.trained > 0 or any(
            each.trained or each.active for each in self.sites.values()
        )


def fault_of(
    base: nn.Module, hook: SiteHook, window: Window, module: nn.Module | None = None
) -> Fault | None:
    """What is wrong at a site; None where nothing is.

    Args:
        base: the model.
        hook: that of the site.
        window: what happened.
        module: the layer that it was put on, where that is known.
    """
    site, name = hook.site, hook.owner_name
    owner = find_module(base, name)
    if owner is None:
        return Fault("replaced", f"the layer '{name}' is gone since it was attached: attach again")
    if isinstance(hook, ParameterHook):
        fault = _of_parameter(hook, owner, module)
    else:
        fault = _of_hook(hook, owner, module)
    counts = window.sites[site.key]
    if fault or counts.active or not window.ran:
        return fault
    missed = window.trained and owner.training and not counts.trained
    gradient = site.regularizer.acts_on == "gradient"
    enabled = site.control.enabled and not window.off
    if isinstance(hook, UpdateHook):
        return _of_update(hook) if enabled and window.trained else None
    if hook.parameter is not None:  # a gradient has to come to it: its layer need not be called
        if not (window.backward and (window.trained or counts.calls)):
            return None
        if enabled and not counts.calls:
            what = "no gradient has come to it, and its layer was never called"
            return Fault("never_active", what, why_not_called(base, owner, name, window))
    elif not counts.trained and reads_rate(base, hook):
        return None
    elif missed or not counts.calls:
        what = f"never called{' in training' if counts.calls else ''}"
        return Fault("never_called", what, why_not_called(base, owner, name, window))
    elif gradient and not window.backward:
        return None
    why = _why_inactive(base, owner, enabled, gradient)
    return Fault("never_active", "called and never active", why)


def needs_calls(hook: SiteHook) -> bool:
    """Whether it is a fault that its layer is never called."""
    return getattr(hook.site.regularizer, "needs_calls", True)


def reads_rate(base: nn.Module, hook: SiteHook) -> bool:
    """Whether a module reads the rate of a retuned layer, as fused attention does."""
    if not isinstance(hook, RetuneHook) or hook.ours or hook.site.at == "attribute":
        return False
    return is_read(base, (hook.site.name, *hook.site.aliases), hook.attribute)


def runs_unseen(base: nn.Module, hooks: Iterable[SiteHook]) -> bool:
    """Whether compiled code may run the model and leave no trace: all rates are only read."""
    return has_compiled() and all(reads_rate(base, hook) for hook in hooks)


def _of_hook(hook: SiteHook, owner: nn.Module, module: nn.Module | None) -> Fault | None:
    if module is not None and owner is not module:
        return _replaced(hook, owner)
    if not hook.lost(owner):
        return None
    if module is None:  # then a layer without the hook is another layer, most likely
        return Fault("replaced", "the layer was replaced since it was attached: attach again")
    return Fault("lost", f"its hook is no longer on '{hook.owner_name}': attach again")


def _of_parameter(hook: ParameterHook, owner: nn.Module, module: nn.Module | None) -> Fault | None:
    refusal, parameter = shard_refusal(owner), owner._parameters.get(hook.parameter)
    refusal = None if isinstance(hook, UpdateHook) else refusal
    held = hook.follows(owner)
    if refusal is not None:
        return Fault("sharded", refusal)
    if module is not None and owner is not module and not held:
        return _replaced(hook, owner)
    if parameter is None:
        text = f"'{hook.owner_name}' no longer has this parameter: attach again"
    elif not parameter.requires_grad:
        text = "the parameter is frozen (requires_grad is False) and gets no gradient"
    elif held:
        return None
    elif hook not in hooks_on(owner):
        text = f"its hook is no longer on '{hook.owner_name}': attach again"
    else:
        text = (
            "the parameter is another object: a forward that is not compiled, or step(), will "
            "hook it"
        )
    return Fault("lost", text)


def _of_update(hook: UpdateHook) -> Fault:
    """Of a parameter whose gradient was not regularized, though training went on."""
    optimizers = hook.site.control.optimizers
    what = "its gradient was not regularized in an update"
    if not optimizers:
        return Fault("no_optimizer", f"{what}, since the optimizer is not known", MISSING)
    why = "the optimizer that was given has made no step, or no gradient had come then"
    return Fault("never_active", what, why)


def _replaced(hook: SiteHook, owner: nn.Module) -> Fault:
    what = f"the layer '{hook.owner_name}' is another {bare_type(owner).__name__} since it was"
    return Fault("replaced", f"{what} attached: attach again")


def _why_inactive(base: nn.Module, module: nn.Module, enabled: bool, gradient: bool) -> str:
    if base.training and not module.training:
        return "the layer is in evaluation mode inside a training model (frozen)"
    if not enabled:
        return "the attachment is paused"
    return "no gradient has come through it" if gradient else "only evaluation was run"


def why_not_called(base: nn.Module, module: nn.Module, name: str, window: Window) -> str:
    """The likely cause why a layer of the model was not called; `name` is its name."""
    if window.compiled and base.training and not module.training:  # it counts no idle calls
        return "the layer is in evaluation mode inside a training model (frozen)"
    if not name:
        return "the model itself was not called, only layers inside it"
    inside = [window.layers.get(f"{name}.{below}") for below, _ in named_modules(module) if below]
    if any(inside) or (isinstance(module, _CONTAINERS) and _only_holds(module)):
        if 0 in inside and not any(inside):
            return "a branch not taken: nothing inside it was called either"
        by = ", as gradient checkpointing does" if _checkpoints(base, name) else ""
        return f"a container that the model loops over{by}: name the layers inside it"
    parent_name, parent = _parent(base, name)
    if window.layers.get(parent_name) == 0:
        return f"a branch not taken: its parent '{parent_name}' was not called either"
    if isinstance(parent, nn.MultiheadAttention):
        return (
            "fused attention: nn.MultiheadAttention takes the weight of this layer and does not "
            "call it; name the attention itself, with index=0"
        )
    if getattr(parent, "fused_attn", False) and _is_dropout_like(name, module):
        return (
            "fused attention: scaled_dot_product_attention drops by itself and leaves this layer "
            "out; name the projection behind it, or set fused_attn = False"
        )
    return (
        "a branch not taken, or a layer that its parent uses without calling it, as where it takes "
        "the weight alone or calls forward() directly: name the parent"
    )


def _parent(base: nn.Module, name: str) -> tuple[str, nn.Module]:
    """The next module above, other than containers without a forward of their own."""
    while name:
        name = name.rpartition(".")[0]
        parent = find_module(base, name)
        if parent is not None and not isinstance(parent, _CONTAINERS):
            return name, parent
    return "", base


def _only_holds(module: nn.Module) -> bool:
    """Whether it does no more than to run, or hold, its children, of which there are some."""
    plain = type(module).forward in (nn.Sequential.forward, nn.Module.forward)
    return plain and len(module._modules) > 0


def _checkpoints(base: nn.Module, name: str) -> bool:
    parts = name.split(".")
    above = (find_module(base, ".".join(parts[:cut])) for cut in range(len(parts)))
    return any(getattr(module, "grad_checkpointing", False) is True for module in above)


def _is_dropout_like(name: str, module: nn.Module) -> bool:
    kinds = (nn.modules.dropout._DropoutNd, nn.Identity, nn.Softmax)
    return isinstance(module, kinds) or "drop" in name.rpartition(".")[2]
