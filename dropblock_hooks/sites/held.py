"""The hooks of values that a module holds: of parameters, and of rates (`Retune`)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from ..checkpointing import NO_TASK, graph_task
from ..findings import Finding, Kind, Severity, tell
from ..handles import is_exporting
from ..regularizers.base import Regularizer
from ..regularizers.retune import RATES, Retune, in_place_of, is_read, rate_attribute
from ..selectors.index import Target
from ..selectors.wrappers import bare_type, shard_refusal
from . import operator
from .act import refuse_tracing, regularize_grad
from .hooks import Fault, SiteHook, Turn
from .run import Window
from .site import Site


class RetuneHook(SiteHook):
    """Sets the rate that a layer holds to 0, and drops in its place.

    Unknown layers, rates that other code reads and ``attr:`` targets get the rate of now.
    """

    takes = Retune
    turn = Turn.FIRST
    before: Any  # the value that the attribute had

    @classmethod
    def fitted(cls, target: Target, regularizer: Regularizer, model: nn.Module) -> Regularizer:
        attribute = target.local or rate_attribute(target.module)
        if attribute is None or not isinstance(regularizer, Retune):
            return regularizer
        ours = None if target.local else in_place_of(target.module)
        if ours is not None and is_read(model, (target.name, *target.aliases), attribute):
            ours = None
        return regularizer.fitted(attribute, ours)

    @classmethod
    def refusals(cls, target: Target, regularizer: Regularizer) -> Iterator[str | None]:
        kind = bare_type(target.module).__name__
        if isinstance(regularizer, Retune) and regularizer.attribute:
            if regularizer.ours is None and regularizer.active == "always":
                yield f"the {kind} itself drops, in training mode only: leave active='always' out"
        else:
            yield (
                f"a {kind} has no {' or '.join(RATES)} that is a number in [0, 1] and can be set. "
                "builtin(model) lists all rates, with their selectors. On an nn.Identity in place "
                "of a drop path, put DropPath(p=...)"
            )

    def __init__(self, site: Site, local: str = "") -> None:
        super().__init__(site, local)
        retune: Retune = site.regularizer  # type: ignore[assignment]  # by `takes`
        self.attribute, self.holds_rate = retune.attribute, retune.ours is None

    def install(self, module: nn.Module) -> None:
        self.before = getattr(module, self.attribute)
        # before all other hooks, which then see the dropped tensor
        module.register_forward_hook(self.__call__, prepend=True)
        self.put(module)

    def restore(self, module: nn.Module) -> None:
        super().restore(module)
        if hasattr(self, "before"):  # it was installed
            setattr(module, self.attribute, self.before)

    def put(self, module: nn.Module) -> None:
        """Set the attribute to the rate of now; while paused, to the value that it had before."""
        value = self.before
        if self.run.installed and self.run.enabled:
            value = self.site.rate if self.holds_rate else 0.0
        if getattr(module, self.attribute, None) is not value:
            setattr(module, self.attribute, value)

    def leaves_no_trace(self, model: nn.Module) -> bool:
        names = (self.site.name, *self.site.aliases)
        return self.holds_rate and not self.local and is_read(model, names, self.attribute)

    def _act(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        if not self.holds_rate:
            return super()._act(module, args, *rest)
        # the call is counted; how much the module has dropped is not known
        if is_compiling():
            if not is_exporting():
                operator.note(self.site.handle, module.training)
        elif graph_task() == NO_TASK:
            self.site.counter.add(None, 0, 0.0)
        return None


class ParameterHook(SiteHook):
    """Forward pre-hook of the owner of a parameter: counts its calls, and hooks new parameters."""

    by_call = False
    outer = NO_TASK  # the backward in which the last forward was recomputed
    part_of = NO_TASK  # the last outer backward that brought the gradient in parts

    @classmethod
    def refusals(cls, target: Target, regularizer: Regularizer) -> Iterator[str | None]:
        parameter: Any = target.module._parameters[target.local]
        if regularizer.acts_on != "gradient":
            yield "param: takes regularizers of gradients"
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            yield "the parameter is not initialized: run a forward first"
        if parameter.is_complex():
            yield "the parameter is complex: only gradients of real parameters are regularized"
        if not parameter.requires_grad:
            yield "the parameter is frozen (requires_grad is False), it gets no gradient"
        if regularizer.at != "output" or regularizer.index is not None:
            yield "at= and index= mean nothing for a parameter"
        yield shard_refusal(target.module)
        yield regularizer.refusal(target.module, parameter)

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.__call__)
        self.put(module)

    def restore(self, module: nn.Module) -> None:
        super().restore(module)
        for hook in filter(None, map(grad_hook, module._parameters.values())):
            if self in hook.sites:
                hook.sites.remove(self)
            if not hook.sites:
                hook.handle.remove()

    def broken(self, owner: nn.Module) -> Fault | None:
        refusal, parameter = shard_refusal(owner), owner._parameters.get(self.local)
        if refusal is not None:
            return Kind.SHARDED, refusal, ""
        if parameter is not None and not parameter.requires_grad:
            why = "the parameter is frozen (requires_grad is False) and gets no gradient"
            cure = (
                "Unfreeze it, or leave it out of the spec. If its layer was wrapped after attach, "
                "attach after that"
            )
            return Kind.LOST, why, cure
        text = "the layer holds another tensor now, or none, and its hook is no longer there"
        cure = "Run a forward that is not compiled, or call step(): both hook a new parameter"
        if self.follows(owner):
            return None
        return super().broken(owner) or (Kind.LOST, text, cure)

    def idle(self, model: nn.Module, owner: nn.Module, window: Window) -> Fault | None:
        counts, trained = window.sites[self.site.key], window.has("trained", "active")
        if not self.site.regularizer.accumulates:
            return super().idle(model, owner, window) if trained or counts.calls else None
        if not trained or not self.run.enabled or window.has("off"):
            return None
        text = "its gradient was not regularized at any optimizer step"
        if self.run.optimizers:
            text += ": no known optimizer with the parameter made a step, or it had no gradient"
            cure = "Pass all optimizers: attached.optimizer = [first, second]"
            return Kind.NEVER_ACTIVE, text, cure
        cure = "Pass it, attach(..., optimizer=optimizer), or set attached.optimizer = optimizer"
        return Kind.NO_OPTIMIZER, f"{text}: the optimizer is not known", cure

    def follows(self, module: nn.Module) -> bool:
        """Whether the gradient of the parameter that this module holds now will be met."""
        if self.site.regularizer.accumulates:  # the step of the optimizer has a hook
            return not self.lost(module)
        parameter = module._parameters.get(self.local)
        # torch.nn.utils.prune keeps it under another name
        held = module._parameters.values() if parameter is None else (parameter,)
        found = [hook for hook in map(grad_hook, held) if hook is not None]
        return any(self in hook.sites and hook.owner() is module for hook in found)

    def _act(self, module: nn.Module, *given: Any) -> None:
        if not is_compiling():
            self.outer = graph_task()
        if is_compiling() or torch._C._are_functorch_transforms_active():
            refuse_tracing(self.site, module.training)
        if is_compiling():
            operator.note(self.site.handle, module.training)
        elif torch.is_grad_enabled():
            self.put(module)

    def check_parts(self) -> None:
        """Warn if a bound gets parts of a gradient, from the backwards of reentrant checkpoints."""
        if self.outer in (NO_TASK, graph_task()) or not self.site.regularizer.reads_grad_scale:
            return
        if self.outer == self.part_of:
            keys, kind, run = (self.site.key,), Kind.IN_PARTS, self.run
            text = (
                "its bound acts on parts of the gradient, because the parameter is used in several "
                "reentrant checkpoints"
            )
            cure = 'Use checkpoint(..., use_reentrant=False), or when="accumulated"'
            tell([Finding(kind, Severity.WARNING, keys, text, cure, run.epoch)], run.told)
        self.part_of = self.outer

    def put(self, module: nn.Module) -> None:
        """Hook a new parameter, as of a copy; the old one stays hooked, as it may come back."""
        if not self.run.installed or self.site.regularizer.accumulates or self.follows(module):
            return
        refusal = shard_refusal(module)
        if refusal is not None:
            raise self.site.error(refusal)
        parameter = module._parameters.get(self.local)
        if parameter is None or not parameter.requires_grad:
            return
        found = grad_hook(parameter)
        if found is None:
            found = GradHook(parameter)
            found.handle = parameter.register_hook(found)  # type: ignore[no-untyped-call]  # torch's
        found.owner = weakref.ref(module)
        if self not in found.sites:
            found.sites.append(self)
            found.sites.sort(key=lambda hook: -hook.turn)  # hooks of a layer stand in reverse


class GradHook:
    """Tensor hook of a parameter: regularizes its gradient, with the rates of the backward."""

    __torch_unserializable__ = True  # a ParameterHook puts it back after loading
    owner: weakref.ref[nn.Module]  # the module that holds the parameter
    handle: RemovableHandle

    def __init__(self, parameter: Tensor) -> None:
        self.sites: list[ParameterHook] = []  # in the order in which they act
        self.impl = parameter._cdata
        # A leaf holds this hook, and is found in the module. Others may be gone by the backward.
        found = parameter.is_leaf and not torch._C._are_functorch_transforms_active()
        self.value = None if found else parameter.detach()

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        module, value = self.owner(), self.value
        if module is None:
            return grad
        if value is None:
            value = next((p for p in module._parameters.values() if grad_hook(p) is self), None)
        for hook in self.sites:
            site = hook.site
            # a gradient does not tell which forward it comes from, so the mode of now decides
            if grad is not None and site.is_on(module.training):
                hook.check_parts()
                grad = regularize_grad(site, None, site.values, grad, value)
        return grad


def grad_hook(parameter: Tensor | None) -> GradHook | None:
    hooks: dict[int, Any] = getattr(parameter, "_backward_hooks", None) or {}
    for hook in hooks.values():  # at every forward, so no generator
        if isinstance(hook, GradHook) and parameter is not None:
            if hook.impl != parameter._cdata:
                # torch.utils.swap_tensors gave the parameter another C++ tensor, without the
                # hooks; assigning them registers them anew
                hook.impl, parameter._backward_hooks = parameter._cdata, hooks
            return hook
    return None
