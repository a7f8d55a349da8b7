"""The hook of an observer at what its layer is given: these values, and the gradients that the
layer hands on to them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..checkpointing import NO_TASK, graph_task
from .act import has_data, is_exported
from .hooks import SiteHook, Turn, ours
from .identity import GradIdentityTraced, may_get_gradient
from .nested import Nested


class GivenHook:
    """Forward pre-hook, the first one: it hands tensors on as views, one for each use.

    So the gradient of this use alone is seen. Where a layer works in place on what it was given, a
    view keeps that work, and its gradient is not seen. Compiled code, which can't do so, is given
    copies at layers without children, and sees nothing at others.
    """

    turn = Turn.FIRST

    def __init__(self, hook: SiteHook) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hook, site = self.hook, self.hook.site
        if is_exported() or not site.acts(module.training):
            return None
        compiling = is_compiling()
        given = Nested((args, kwargs))
        if compiling:
            if torch._C._are_functorch_transforms_active():
                return None
        elif not all(map(has_data, given.tensors)):
            return None
        if compiling or graph_task() == NO_TASK:
            hook.site.bound.give([x.detach() for x in given.tensors])
        if not compiling:
            _put_last(hook, module)
        if not any(map(may_get_gradient, given.tensors)):
            return None
        in_place = getattr(module, "inplace", False)
        # what stands behind an Identity may work in place on what that hands on
        if in_place or (isinstance(module, nn.Identity) and not compiling):
            return None if compiling else self._watch(given.tensors)
        if compiling and module._modules:
            return None
        new: dict[int, Tensor] = {}  # a tensor that is given twice stays one
        for x in given.tensors:
            if id(x) not in new:
                new[id(x)] = self._watched(x, compiling) if may_get_gradient(x) else x
        return given([new[id(x)] for x in given.tensors])

    def _watch(self, tensors: list[Tensor]) -> None:
        """Watch the very tensors, where the layer is taken for their only use."""
        for x in tensors:
            if may_get_gradient(x) and not x.is_leaf:
                x.register_hook(_Handed(self.hook))  # type: ignore[no-untyped-call]  # torch's
                put_first(x._backward_hooks)

    def _watched(self, x: Tensor, compiling: bool) -> Tensor:
        if compiling:
            traced: Tensor = GradIdentityTraced.apply(x, _TracedHanded(self.hook))
            return traced
        view = x.view_as(x)
        view.register_hook(_Handed(self.hook))  # type: ignore[no-untyped-call]  # torch's
        return view


def put_first(hooks: Any) -> None:
    """Move the hook that was registered last to the front."""
    for key in list(hooks)[:-1]:  # not by `move_to_end`: torch reads a plain dict
        hooks[key] = hooks.pop(key)


def _put_last(hook: SiteHook, module: nn.Module) -> None:
    """See what the layer hands on: behind hooks that others have put on it since."""
    hooks = module._forward_hooks
    for there in reversed(hooks.values()):
        last = ours(there)
        if isinstance(getattr(last, "turn", None), Turn):
            return
        if not getattr(last, "closes", False):
            break
    behind = [key for key, each in hooks.items() if getattr(each, "closes", False)]
    for key in [*(key for key, each in hooks.items() if ours(each) is hook), *behind]:
        hooks[key] = hooks.pop(key)


class _Handed:
    """Tensor hook: sees a gradient. It holds no tensor of the graph."""

    def __init__(self, hook: SiteHook) -> None:
        self.hook = hook

    def __call__(self, grad: Tensor | None) -> None:
        control = self.hook.site.control
        if grad is not None and has_data(grad) and control.installed and control.enabled:
            self.hook.site.bound.see_handed(grad.detach())


class _TracedHanded(_Handed):
    """The same in compiled code."""

    def __call__(self, grad: Tensor, *_: Tensor) -> Tensor:  # type: ignore[override]
        self.hook.site.bound.see_handed(grad.detach())
        return grad
