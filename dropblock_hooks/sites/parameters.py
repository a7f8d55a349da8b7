"""Hooks of parameters: they regularize gradients, whichever forward these come from."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from ..checkpointing import NO_TASK, graph_task
from ..findings import Finding, Kind, Severity, tell
from ..handles import check_version, is_exporting
from ..observers.base import Observer
from ..selectors.wrappers import find_module, shard_refusal
from . import operator
from .act import refuse_tracing, regularize_grad
from .hooks import SiteHook, Turn, hooks_of
from .run import Run
from .site import Site


class ParameterHook(SiteHook):
    """Forward pre-hook of the owner of a parameter: counts its calls, and hooks the parameter.

    Copies, loaded models and ``load_state_dict(assign=True)`` hold new Parameter objects, which
    come without the hooks of the old ones. They are hooked before the next forward.

    The mode of the owner when the gradient comes decides whether it is regularized, because a
    gradient does not tell which forward it comes from.
    """

    parameter: str

    def __init__(self, site: Site, parameter: str) -> None:
        super().__init__(site)
        self.parameter = parameter
        if isinstance(site.regularizer, Observer):
            self.turn = Turn.BEFORE if site.regularizer.when == "before" else Turn.LAST
        self._handles: list[RemovableHandle] = []
        self.backward = NO_TASK  # in which the last forward ran, as recomputations do

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": []}

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.__call__)
        self.rehook(module)

    def remove(self, module: nn.Module) -> None:
        super().remove(module)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def follows(self, module: nn.Module) -> bool:
        """Whether the gradient of the parameter that this module holds now will be met.

        What acts once per update needs no hook on the parameter: an optimizer has a `StepHook`.
        """
        if self.site.regularizer.accumulates:
            return not self.lost(module)
        parameter = module._parameters.get(self.parameter)
        if parameter is None:  # torch.nn.utils.prune keeps it under another name
            return any(self._is_on(p, module) for p in module._parameters.values())
        return self._is_on(parameter, module)

    def _is_on(self, parameter: Tensor | None, module: nn.Module) -> bool:
        """Whether this parameter has our hook, for this module."""
        hook = self.hook_of(parameter)
        if hook is None or parameter is None:
            return False
        if hook.impl != parameter._cdata:
            # torch.utils.swap_tensors gave the parameter another C++ tensor, without the hooks;
            # assigning them registers them anew
            hook.impl, parameter._backward_hooks = parameter._cdata, parameter._backward_hooks
        return hook.module() is module

    def hook_of(self, parameter: Tensor | None) -> GradHook | None:
        """Our hook on this parameter, if there is one."""
        hooks: dict[int, Any] = getattr(parameter, "_backward_hooks", None) or {}
        for hook in hooks.values():  # at every forward, so no generator
            if isinstance(hook, GradHook) and hook.site is self.site:
                return hook
        return None

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if is_compiling():
            return self._compile(module)
        self.site.enter(module.training)
        self.backward = graph_task()
        if torch.is_grad_enabled():
            if torch._C._are_functorch_transforms_active():
                refuse_tracing(self.site, module.training)
            self.rehook(module)
        return None

    def _compile(self, module: nn.Module, *given: Any) -> None:
        site, training = self.site, module.training
        check_version()
        if not is_exporting():
            refuse_tracing(site, training)
            if site.may_act(training) or site.moves:
                operator.tell_call(site, training)
        elif site.acts(training):
            refuse_tracing(site, training)

    def put(self, module: nn.Module) -> None:
        if self.site.run.installed:
            self.rehook(module)

    def rehook(self, module: nn.Module) -> None:
        """Hook the parameter, if it is another object than before.

        The old one stays hooked: another may stand in its place for one call only, as in
        ``torch.func.functional_call``.
        """
        if self.follows(module):
            return
        refusal = shard_refusal(module)
        if refusal is not None:
            raise self.site.error(refusal)
        parameter = module._parameters.get(self.parameter)
        if parameter is None or not parameter.requires_grad:
            return
        for hook in hooks_of(module):  # in the order in which they were installed
            if isinstance(hook, ParameterHook) and hook.parameter == self.parameter:
                hook.hook_tensor(module, parameter)
        self.hook_tensor(module, parameter)  # if the layer was replaced, it has no hook of ours

    def hook_tensor(self, module: nn.Module, parameter: Tensor) -> None:
        """Hook this tensor, where its turn is."""
        if self.follows(module):
            return
        hook = self.hook_of(parameter)
        if hook is not None:
            hook.module = weakref.ref(module)  # the parameter is in another module now
            return
        hook = GradHook(self, module, parameter)
        handle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]  # torch's
        alive = (handle for handle in self._handles if handle.hooks_dict_ref() is not None)
        self._handles = [*alive, handle]
        hooks: dict[int, Any] = parameter._backward_hooks or {}
        later = [k for k, h in hooks.items() if isinstance(h, GradHook) and h.turn > self.turn]
        for key in later:
            hooks[key] = hooks.pop(key)


class KeeperHook:
    """Forward pre-hook of the model: hooks parameters whose owners are never called themselves.

    Such are the projections of an attention that takes their weights, and parameter lists.
    """

    def __init__(self, run: Run, hooks: Iterable[ParameterHook]) -> None:
        self.run = run
        self.hooks = tuple(hooks)

    def __call__(self, model: nn.Module, *args: Any) -> None:
        if is_compiling() or not torch.is_grad_enabled():
            return
        for hook in self.hooks:
            if not hook.site.calls:
                owner = find_module(model, hook.owner_name)
                if owner is not None:
                    hook.rehook(owner)


class GradHook:
    """Tensor hook of a parameter: regularizes its gradient, with the rates of the backward."""

    __torch_unserializable__ = True  # a ParameterHook puts it back after loading

    def __init__(self, owner: ParameterHook, module: nn.Module, parameter: Tensor) -> None:
        self.owner, self.site, self.turn = owner, owner.site, owner.turn
        self.form = self.site.form_of(parameter)
        self.part_of = NO_TASK  # the last backward that brought this gradient in parts
        self.module = weakref.ref(module)
        self.impl = parameter._cdata
        # A leaf holds this hook, and is found in the module. Others may be gone by the backward.
        found = parameter.is_leaf and not torch._C._are_functorch_transforms_active()
        self.value = None if found else parameter.detach()

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        module = self.module()
        if grad is None or module is None or not self.site.is_on(module.training):
            return None
        outer = self.owner.backward
        if outer not in (NO_TASK, graph_task()) and self.site.regularizer.reads_grad_scale:
            if outer == self.part_of:  # a reentrant checkpoint has a backward of its own
                self._tell_parts()
            self.part_of = outer
        value = self._leaf(module) if self.value is None else self.value
        return regularize_grad(self.site, self.form, self.site.values, grad, value)

    def _leaf(self, module: nn.Module) -> Tensor | None:
        held = module._parameters.values()
        return next((p for p in held if self.owner.hook_of(p) is self), None)

    def _tell_parts(self) -> None:
        text = (
            "its bound acts on parts of the gradient, because the parameter is used in several "
            "reentrant checkpoints"
        )
        cure = 'Use checkpoint(..., use_reentrant=False), or when="accumulated"'
        run, keys = self.site.run, (self.site.key,)
        tell([Finding(Kind.IN_PARTS, Severity.WARNING, keys, text, cure, run.epoch)], run.told)
