"""Hooks of parameters: they regularize gradients, whichever forward these come from."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from ..checkpointing import NO_TASK, graph_task
from ..handles import new_handle
from ..observers.base import Observer
from ..selectors.wrappers import find_module, shard_refusal
from . import operator
from .act import is_exporting, refuse_tracing, refuse_transforms, regularize_grad
from .hooks import SiteHook, Turn, hooks_of
from .site import Site


class ParameterHook(SiteHook):
    """Hooks a parameter, and again (forward pre-hook of its owner) when the object has changed.

    Copies, loaded models and ``load_state_dict(assign=True)`` hold new Parameter objects, which
    come without the hooks of the old ones.

    A gradient does not tell which forward it comes from. It is regularized where any forward with
    gradients since the last one was in training (or the site is always active): an evaluation
    between a training forward and its backward does not switch it off. Nothing but constants is
    written in a forward, so that compiled code has nothing to guard.

    Attributes:
        on: whether gradients are regularized, as decided at the last one.
        trained: whether a forward that is on has come since then.
        evaluated: whether a forward that is off, but with gradients, has come since then.
    """

    parameter: str

    def __init__(self, site: Site, parameter: str) -> None:
        super().__init__(site)
        self.parameter = parameter
        if isinstance(site.regularizer, Observer):
            self.turn = Turn.BEFORE if site.regularizer.when == "before" else Turn.LAST
        self.on = True
        self.trained = self.evaluated = False
        self.called = False  # whether its owner is ever called
        self.handle = new_handle(self)
        self._hooked: list[tuple[weakref.ref[Tensor], RemovableHandle]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handle": None, "_hooked": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.handle = new_handle(self)  # a copy is another hook

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.__call__)
        self.on = self.site.is_on(module.training)
        self.rehook(module)

    def remove(self, module: nn.Module) -> None:
        super().remove(module)
        self._unhook()

    def lost(self, module: nn.Module) -> bool:
        parameter = module._parameters.get(self.parameter)
        return super().lost(module) or not self.holds(parameter)

    def follows(self, module: nn.Module) -> bool:
        """Whether the gradient of the parameter that this module holds is met."""
        return self.holds(module._parameters.get(self.parameter))

    def holds(self, parameter: Tensor | None) -> bool:
        """Whether this very parameter is hooked."""
        for reference, _ in self._hooked:  # at every forward, so no generator
            hooked = reference()
            if hooked is not None and hooked is parameter:
                return True
        return False

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if is_compiling():
            return self._compile(module)
        self.called = True
        self.site.enter(module.training)
        if torch.is_grad_enabled():
            self.follow(module)
        return None

    def _compile(self, module: nn.Module, *given: Any) -> None:
        training = module.training
        if is_exporting():
            if self.site.acts(training):
                refuse_tracing(self.site, training)
            return
        if self.site.is_on(training):
            refuse_transforms(self.site)
        if self.site.is_on(training) or torch.is_grad_enabled() or self.site.moves:
            operator.tell_call(self, (training, torch.is_grad_enabled()))

    def note_call(self, flags: list[bool]) -> None:
        """Note a forward of the owner in compiled code; `step` looks after the parameter."""
        training, with_grad = flags
        self.called = True
        self.site.enter(training)
        if with_grad and graph_task() == NO_TASK:
            self.take_mode(training)

    def follow(self, module: nn.Module) -> None:
        """Before gradients come: take over the mode of the owner, and its parameter."""
        self.take_mode(module.training)
        self.rehook(module)

    def take_mode(self, training: bool) -> None:
        """A forward with gradients begins, in this mode."""
        if self.site.is_on(training):
            self.trained = True
        else:
            self.evaluated = True

    def is_meant(self) -> bool:
        """Whether the gradient that has come is regularized."""
        if self.trained or self.evaluated:
            self.on, self.trained, self.evaluated = self.trained, False, False
        return self.on

    def rehook(self, module: nn.Module) -> None:
        """Hook the parameter, if it is another object than before.

        One that was hooked stays so: another may stand in its place for one call only, as in
        ``torch.func.functional_call``. All sites of the parameter hook it anew, in their order;
        what watches stands first or last.
        """
        parameter = module._parameters.get(self.parameter)
        if self.holds(parameter):
            return
        refusal = shard_refusal(module) or _vmap_refusal(parameter)
        if refusal is not None:
            raise self.site.error(refusal)
        if parameter is None or not parameter.requires_grad:
            return
        for hook in self._on_the_same_parameter(module):
            hook._hook_last(parameter)

    def _on_the_same_parameter(self, module: nn.Module) -> list[ParameterHook]:
        found = [
            hook
            for hook in hooks_of(module)
            if isinstance(hook, ParameterHook) and hook.parameter == self.parameter
        ]
        found = found if any(hook is self for hook in found) else [*found, self]
        return sorted(found, key=lambda hook: hook.turn)

    def _hook_last(self, parameter: Tensor) -> None:
        """Hook a parameter behind all that have hooked it."""
        kept = []
        for reference, handle in self._hooked:
            hooked = reference()
            if hooked is parameter:
                handle.remove()
            elif hooked is not None:
                kept.append((reference, handle))
        hook = GradHook(self, parameter)
        handle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]  # torch's
        self._hooked = [*kept, (weakref.ref(parameter), handle)]

    def _unhook(self) -> None:
        for _, handle in self._hooked:
            handle.remove()
        self._hooked = []


class KeeperHook:
    """Forward pre-hook of the model: follows parameters whose owners are never called themselves.

    Such are the projections of an attention that takes their weights, and parameter lists.
    """

    def __init__(self, hooks: Iterable[ParameterHook]) -> None:
        self.hooks = tuple(hooks)

    def __call__(self, model: nn.Module, *args: Any) -> None:
        if is_exporting() or not torch.is_grad_enabled():
            return
        if is_compiling():  # constants are written, and nothing is read: no graph and no guard
            for hook in self.hooks:
                hook.take_mode((_submodule(model, hook.owner_name) or model).training)
            return
        for hook in self.hooks:
            if not hook.called:
                owner = find_module(model, hook.owner_name)
                if owner is not None:
                    hook.follow(owner)


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    """As `find_module`, but for wrappers: that is what torch.compile can trace."""
    module: nn.Module | None = model
    for key in name.split(".") if name else ():
        module = None if module is None else module._modules.get(key)
    return module


class GradHook:
    """Tensor hook of a parameter: regularizes its gradient, unless that was switched off.

    A parameter outlives its graphs, so the rates are those of the backward.
    """

    __torch_unserializable__ = True  # a ParameterHook puts it back after loading

    def __init__(self, owner: ParameterHook, parameter: Tensor) -> None:
        self.site = owner.site
        self.form = owner.site.form_of(parameter)
        self.owner = owner
        # a leaf outlives its graphs, and holds this hook; others may be gone by the backward
        self.parameter = (
            weakref.ref(parameter) if parameter.is_leaf else _always(parameter.detach())
        )

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        if grad is None or not self.owner.is_meant():
            return None
        return regularize_grad(self.site, self.form, self.site.values, grad, self.parameter())


def _always(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def _vmap_refusal(parameter: Tensor | None) -> str | None:
    """Why a parameter under ``torch.func.vmap`` can't be hooked, where it would get a gradient."""
    functorch = torch._C._functorch
    if parameter is None or not functorch.is_batchedtensor(parameter):
        return None
    below = functorch.get_unwrapped(parameter)
    if not (below.requires_grad or functorch.is_functorch_wrapped_tensor(below)):
        return None
    return (
        "torch.func.vmap has stacked the parameter, and a hook on it sees no gradient: regularize "
        "the gradient at the output of the layer, or take vmap of torch.func.grad"
    )


def keepers_on(module: nn.Module) -> list[KeeperHook]:
    """Our keepers on this very module."""
    return [hook for hook in hooks_of(module) if isinstance(hook, KeeperHook)]
