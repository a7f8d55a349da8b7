"""The way from compiled code to an observer: operators that run the eager code.

torch.compile does not trace into these operators. Compiled code holds the handle of the site. When
the code runs, ``observe`` finds the site and hands it the tensors of one call, and
``observe_gradient`` hands it a gradient of that call. So counts are Python numbers, and an observer
is switched on and off without a new compilation.

``observe`` says that it changes the handle, so that the compiler neither leaves it out nor changes
the order of calls. The backward holds no handle, because autograd refuses tensors that were changed
after they were saved: it holds the ticket of the call, which begins with the number of the handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..handles import find

RECOMPUTED = -1
"""The number of a call that activation checkpointing recomputes, or of a site that is off."""


@torch.library.custom_op("dropblock_hooks::observe", mutates_args=("handle",))
def observe(
    handle: Tensor,
    tensors: Sequence[Tensor],
    given: Sequence[Tensor],
    nesting: str,
    training: bool,
    differentiable: bool,
) -> Tensor:
    """Hand the tensors of one call to the hook of an observer.

    Returns:
        The ticket of the call: the number of the handle, and that of the call.
    """
    hook = find(handle)
    call = None
    if hook is not None:
        call = hook.see_compiled(tensors, given, nesting, training, differentiable)
    return torch.tensor([int(handle), RECOMPUTED if call is None else call], device="cpu")


@observe.register_fake
def _(handle: Tensor, *given: Any) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device="cpu")


@torch.library.custom_op("dropblock_hooks::observe_gradient", mutates_args=())
def observe_gradient(grad: Tensor, ticket: Tensor, at: int) -> None:
    """Hand the gradient of one tensor of a call to the hook of an observer."""
    number, call = ticket
    hook = find(number)
    if hook is not None:
        hook.see_gradient(grad, at, int(call))


@observe_gradient.register_fake
def _(grad: Tensor, ticket: Tensor, at: int) -> None:
    return None


torch.fx.has_side_effect(torch.ops.dropblock_hooks.observe_gradient.default)


class _Identity(torch.autograd.Function):
    """Identity function whose backward hands the gradient to an observer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ticket: Tensor, at: int) -> Tensor:
        ctx.at = at
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ticket)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        (grad,) = grads
        if grad is not None:
            observe_gradient(grad, *ctx.saved_tensors, ctx.at)
        return grad, None, None


def _observe_and_watch(
    handle: Tensor,
    tensors: Sequence[Tensor],
    given: Sequence[Tensor],
    nesting: str,
    training: bool,
    gradients: bool,
) -> list[Tensor]:
    """Observe one call, and watch the gradients of its tensors if `gradients`.

    Returns:
        Copies of the tensors whose gradients are watched; nothing if there are none to watch.
    """
    if torch._C._are_functorch_transforms_active():
        return []
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    values, taken = ([x.detach() for x in each] for each in (tensors, given))
    ticket = observe(handle, values, taken, nesting, training, differentiable)
    if not (gradients and differentiable):
        return []
    return [_Identity.apply(x, ticket, at) for at, x in enumerate(tensors)]


# Dynamo traces one operator faster than the Python code in it, which AOTAutograd decomposes later.
_library = torch.library.Library("dropblock_hooks", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
_library.define(  # type: ignore[no-untyped-call]
    "observe_and_watch(Tensor(a!) handle, Tensor[] tensors, Tensor[] given, str nesting, "
    "bool training, bool gradients) -> Tensor[]"
)
_library.impl("observe_and_watch", _observe_and_watch, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]

observe_and_watch = torch.ops.dropblock_hooks.observe_and_watch.default
