"""Why a site did nothing: one diagnosis for every place that asks.

``verify`` lists what `fault_of` finds, the first training forward and the end of an epoch warn of
it, and ``plan`` groups it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from ..findings import Finding, Kind, Severity
from ..regularizers.droppers import is_read
from ..selectors.wrappers import bare_type, find_module, named_modules, shard_refusal
from ..sites.counter import Snapshot
from ..sites.hooks import SiteHook, holder
from ..sites.parameters import ParameterHook
from ..sites.retune import RetuneHook
from .compiled import has_compiled

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


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

    sites: dict[str, Snapshot]
    layers: Mapping[str, int]
    model: Snapshot
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
) -> Finding | None:
    """What is wrong at a site; None where nothing is.

    `module` is the layer that the hook was put on, where that is known.
    """
    site, name = hook.site, hook.owner_name
    owner = holder(hook, base, name) or find_module(base, name)
    if owner is None:
        return finding(hook, Kind.REPLACED, f"the model no longer has a layer '{name}'", AGAIN)
    if isinstance(hook, ParameterHook):
        fault = _of_parameter(hook, owner, module)
    else:
        fault = _of_hook(hook, owner, module)
    counts = window.sites[site.key]
    if fault or counts.active or not window.ran:
        return fault
    missed = window.trained and owner.training and not counts.trained
    gradient = site.regularizer.acts_on == "gradient"
    enabled = site.run.enabled and not window.off
    if site.regularizer.accumulates:
        return _of_update(hook) if enabled and window.trained else None
    if hook.parameter is not None:  # a gradient has to come to it: its layer need not be called
        if not (window.backward and (window.trained or counts.calls)):
            return None
        if enabled and not counts.calls:
            why, cure = why_not_called(base, owner, name, window)
            text = f"the parameter got no gradient, and its layer was never called: {why}"
            return finding(hook, Kind.NEVER_ACTIVE, text, cure)
    elif not counts.trained and reads_rate(base, hook):
        return None
    elif missed or not counts.calls:
        why, cure = why_not_called(base, owner, name, window)
        text = f"the layer was never called{' in training mode' if counts.calls else ''}: {why}"
        return finding(hook, Kind.NEVER_CALLED, text, cure)
    elif gradient and not window.backward:
        return None
    why, cure = _why_inactive(base, owner, enabled, gradient)
    times = "once" if counts.calls == 1 else f"{counts.calls} times"
    text = f"called {times} and never active: {why}"
    return finding(hook, Kind.NEVER_ACTIVE, text, cure)


AGAIN = "Call attach again"


def finding(hook: SiteHook, kind: Kind, text: str, cure: str = "") -> Finding:
    """A finding about one site."""
    site = hook.site
    return Finding(kind, Severity.ERROR, (site.key,), text, cure, site.run.epoch)


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


def _of_hook(hook: SiteHook, owner: nn.Module, module: nn.Module | None) -> Finding | None:
    if not hook.lost(owner):
        return None
    if module is None or owner is not module:
        return _replaced(hook, owner)
    return finding(hook, Kind.LOST, f"its hook is no longer on '{hook.owner_name}'", AGAIN)


def _of_parameter(
    hook: ParameterHook, owner: nn.Module, module: nn.Module | None
) -> Finding | None:
    refusal, parameter = shard_refusal(owner), owner._parameters.get(hook.parameter)
    held = hook.follows(owner)
    if refusal is not None:
        return finding(hook, Kind.SHARDED, refusal)
    if module is not None and owner is not module and not held:
        return _replaced(hook, owner)
    if parameter is None and not held:
        text, cure = f"'{hook.owner_name}' no longer has this parameter", AGAIN
    elif parameter is not None and not parameter.requires_grad:
        text, cure = "the parameter is frozen (requires_grad is False) and gets no gradient", ""
    elif held:
        return None
    elif hook.lost(owner):
        text, cure = f"its hook is no longer on '{hook.owner_name}'", AGAIN
    else:
        text = "the parameter is another tensor now"
        cure = "Run a forward that is not compiled, or call step(): both hook the new tensor"
    return finding(hook, Kind.LOST, text, cure)


def _of_update(hook: SiteHook) -> Finding:
    """A parameter whose gradient was not regularized, though training went on."""
    text = "its gradient was not regularized at any optimizer step: the optimizer"
    if not hook.site.run.optimizers:
        cure = "Pass it, attach(..., optimizer=optimizer), or set attached.optimizer = optimizer"
        return finding(hook, Kind.NO_OPTIMIZER, f"{text} is not known", cure)
    text = f"{text} made no step, or the parameter had no gradient"
    return finding(hook, Kind.NEVER_ACTIVE, text)


def _replaced(hook: SiteHook, owner: nn.Module) -> Finding:
    kind = bare_type(owner).__name__
    text = f"the layer '{hook.owner_name}' was replaced after attach, now by a {kind}"
    return finding(hook, Kind.REPLACED, text, AGAIN)


_FROZEN = (
    "the layer is in evaluation mode inside a training model (frozen)",
    "Call train() on the layer, or use active='always'",
)


def _why_inactive(
    base: nn.Module, module: nn.Module, enabled: bool, gradient: bool
) -> tuple[str, str]:
    """The likely cause why a layer was called and its regularizer did nothing, and the cure."""
    if base.training and not module.training:
        return _FROZEN
    if not enabled:
        return "the attachment is paused", "Set attached.enabled = True"
    if gradient:
        return "no gradient reached the layer", "Look for a detach() or no_grad() behind it"
    return "the model only ran in evaluation mode", "Call model.train() before training"


def why_not_called(
    base: nn.Module, module: nn.Module, name: str, window: Window
) -> tuple[str, str]:
    """The likely cause why a layer was not called, and the cure; `name` is its name."""
    if window.compiled and base.training and not module.training:  # it counts no idle calls
        return _FROZEN
    if not name:
        return "the model itself was not called, only layers inside it", "Name these layers"
    above = _parents(base, name)
    inside = [window.layers.get(f"{name}.{below}") for below, _ in named_modules(module) if below]
    plain = type(module).forward in (nn.Sequential.forward, nn.Module.forward)
    if any(inside) or (isinstance(module, _CONTAINERS) and plain and inside):
        if 0 in inside and not any(inside):
            return "nothing inside it was called either (a branch not taken)", ""
        checkpoints = any(getattr(each, "grad_checkpointing", False) is True for _, each in above)
        by = ", as gradient checkpointing does" if checkpoints else ""
        return f"a container that the model loops over{by}", "Name the layers inside it"
    parents = (pair for pair in above if not isinstance(pair[1], _CONTAINERS))
    parent_name, parent = next(parents, ("", base))
    if window.layers.get(parent_name) == 0:
        return f"its parent '{parent_name}' was not called either (a branch not taken)", ""
    if isinstance(parent, nn.MultiheadAttention):
        return (
            "fused attention: nn.MultiheadAttention uses the weight of this layer without calling "
            "the layer",
            "Name the attention itself, with index=0",
        )
    if getattr(parent, "fused_attn", False) and _is_dropout_like(name, module):
        return (
            "fused attention: scaled_dot_product_attention drops values itself and skips this "
            "layer",
            "Name the projection behind it, or set fused_attn = False",
        )
    return (
        "a branch not taken, or its parent uses the layer without calling it (it reads the weight, "
        "or calls forward() directly)",
        "Name the parent",
    )


def _parents(base: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The modules above, the nearest first, with their names."""
    parts = name.split(".")
    names = [".".join(parts[:cut]) for cut in reversed(range(len(parts)))]
    return [(each, found) for each in names if (found := find_module(base, each)) is not None]


def _is_dropout_like(name: str, module: nn.Module) -> bool:
    kinds = (nn.modules.dropout._DropoutNd, nn.Identity, nn.Softmax)
    return isinstance(module, kinds) or "drop" in name.rpartition(".")[2]
