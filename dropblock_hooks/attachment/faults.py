"""Why a site did nothing: one diagnosis for every place that asks.

``verify`` lists what `fault_of` finds, the first training forward and the end of an epoch warn of
it, and ``plan`` groups it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from ..findings import Finding, Kind, Severity
from ..regularizers.retune import is_read
from ..selectors.wrappers import find_module, shard_refusal
from ..sites.counter import Snapshot, read
from ..sites.hooks import SiteHook, holder
from ..sites.parameters import ParameterHook
from ..sites.retune import RetuneHook
from ..sites.run import Run
from ..tables import counted

AGAIN = "Call attach again"
GONE = "its layer was replaced or removed after attach, or the hook was taken off"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Window:
    """The calls of one window.

    Attributes:
        sites: of each site, by its key.
        layers: of each layer that has a site, by its name.
        model: forwards of the model; none where it was compiled.
        backward: whether gradients may have come; before a backward, none can be missing.
    """

    sites: Mapping[str, Snapshot]
    layers: Mapping[str, int]
    model: Snapshot
    backward: bool = True

    @property
    def ran(self) -> bool:
        """Whether anything was called."""
        return any(each.calls or each.active for each in (self.model, *self.sites.values()))

    @property
    def trained(self) -> bool:
        """Whether anything was called in training mode, or regularized."""
        return any(each.trained or each.active for each in (self.model, *self.sites.values()))

    @property
    def off(self) -> bool:
        """Whether a training forward met the regularizers switched off."""
        return any(each.off for each in self.sites.values())


def windows(run: Run, hooks: Iterable[SiteHook]) -> tuple[Window, Window]:
    """The open window, and the one before."""
    sites = [hook.site for hook in hooks]
    model, *totals = read([run.counter, *(site.counter for site in sites)], wait=False)
    made = []
    for which in ("window", "closed"):
        counts = {s.key: getattr(each, which) for s, each in zip(sites, totals, strict=True)}
        layers = {site.name: counts[site.key].calls for site in sites}
        made.append(Window(counts, layers, getattr(model, which)))
    return made[0], made[1]


def finding(hook: SiteHook, kind: Kind, text: str, cure: str = "") -> Finding:
    """A finding about one site."""
    return Finding(kind, Severity.ERROR, (hook.site.key,), text, cure, hook.site.run.epoch)


def fault_of(base: nn.Module, hook: SiteHook, window: Window) -> Finding | None:
    """What is wrong at a site; None where nothing is."""
    site, name = hook.site, hook.owner_name
    owner = holder(hook, base, name) or find_module(base, name)
    if owner is None:
        return finding(hook, Kind.REPLACED, GONE, AGAIN)
    fault = _of_parameter(hook, owner) if isinstance(hook, ParameterHook) else None
    if fault is None and hook.lost(owner) and not _follows(hook, owner):
        fault = finding(hook, Kind.REPLACED, GONE, AGAIN)
    counts = window.sites[site.key]
    if fault or counts.active or not window.ran:
        return fault
    enabled = site.run.enabled and not window.off
    if site.regularizer.accumulates:
        return _of_update(hook) if enabled and window.trained else None
    gradient = site.regularizer.acts_on == "gradient"
    missed = not counts.calls or (window.trained and owner.training and not counts.trained)
    kind = Kind.NEVER_CALLED if missed else Kind.NEVER_ACTIVE
    if hook.parameter is not None:  # a gradient has to come to it: its layer need not be called
        kind, missed = Kind.NEVER_ACTIVE, missed and enabled
        if not (window.trained or counts.calls):
            return None
    elif not counts.trained and reads_rate(base, hook):
        return None
    if gradient and kind == Kind.NEVER_ACTIVE and not window.backward:
        return None
    text = f"the layer was called {counted(counts.calls, 'time')} and never active"
    if missed:
        mode = " in training mode" if counts.calls else ""
        text = f"the layer was never called{mode}"
        text += ", and the parameter got no gradient" if hook.parameter else ""
    frozen = base.training and not owner.training
    if frozen:
        why = "the layer is in evaluation mode inside a training model (frozen)"
        cure = "Call train() on the layer, or use active='always'"
    elif missed:
        why, cure = why_not_called(base, name, window)
    elif not enabled:
        why, cure = "the attachment is paused", "Set attached.enabled = True"
    elif gradient:
        why, cure = "no gradient reached it", "Look for a detach() or no_grad() behind the layer"
    else:
        why, cure = "the model only ran in evaluation mode", "Call model.train() before training"
    return finding(hook, kind, f"{text}: {why}", cure)


def needs_calls(hook: SiteHook) -> bool:
    """Whether it is a fault that its layer is never called."""
    return getattr(hook.site.regularizer, "needs_calls", True)


def reads_rate(base: nn.Module, hook: SiteHook) -> bool:
    """Whether a module reads the rate of a retuned layer, as fused attention does."""
    if not isinstance(hook, RetuneHook) or hook.ours or hook.site.at == "attribute":
        return False
    return is_read(base, (hook.site.name, *hook.site.aliases), hook.attribute)


def _follows(hook: SiteHook, owner: nn.Module) -> bool:
    return isinstance(hook, ParameterHook) and hook.follows(owner)


def _of_parameter(hook: ParameterHook, owner: nn.Module) -> Finding | None:
    refusal, parameter = shard_refusal(owner), owner._parameters.get(hook.parameter)
    if refusal is not None:
        return finding(hook, Kind.SHARDED, refusal)
    if parameter is not None and not parameter.requires_grad:
        text = "the parameter is frozen (requires_grad is False) and gets no gradient"
        return finding(hook, Kind.LOST, text)
    if hook.lost(owner) or hook.follows(owner):
        return None
    text = "the layer holds another tensor now, or none, and its hook is no longer there"
    cure = "Run a forward that is not compiled, or call step(): both hook a new parameter"
    return finding(hook, Kind.LOST, text, cure)


def _of_update(hook: SiteHook) -> Finding:
    """A parameter whose gradient was not regularized, though training went on."""
    text = "its gradient was not regularized at any optimizer step: the optimizer"
    if not hook.site.run.optimizers:
        cure = "Pass it, attach(..., optimizer=optimizer), or set attached.optimizer = optimizer"
        return finding(hook, Kind.NO_OPTIMIZER, f"{text} is not known", cure)
    text = f"{text} made no step, or the parameter had no gradient"
    return finding(hook, Kind.NEVER_ACTIVE, text)


def why_not_called(base: nn.Module, name: str, window: Window) -> tuple[str, str]:
    """The likely cause why a layer was not called, and the cure."""
    if not name:
        return "the model itself was not called, only layers inside it", "Name these layers"
    layer, parent = find_module(base, name), find_module(base, name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention) or getattr(parent, "fused_attn", False):
        return (
            "fused attention uses the weights and drops values without calling this layer",
            "Name the attention (index=0 of nn.MultiheadAttention) or the projection behind it, "
            "or set fused_attn = False",
        )
    inside = [calls for each, calls in window.layers.items() if each.startswith(f"{name}.")]
    if any(inside) or (isinstance(layer, _CONTAINERS) and len(layer) and not inside):
        return (
            "a container that the model loops over, as gradient checkpointing does",
            "Name the layers inside it",
        )
    return (
        "a branch not taken, or its parent uses the layer without calling it (it reads the weight, "
        "or calls forward() directly)",
        "Name the parent",
    )
