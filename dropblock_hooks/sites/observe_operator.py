"""The way from compiled code to an observer: operators that run the eager code.

torch.compile does not trace into these operators. When compiled code runs, ``observe`` finds the
site by its handle and hands it the tensors of one call, and ``observe_gradient`` hands it a
gradient. So an observer is switched on and off without a new compilation.

``observe`` says that it changes the handle, so that the compiler neither leaves it out nor changes
the order of calls. The backward holds no handle, because autograd refuses tensors that were changed
after they were saved: it holds the ticket of the call, which begins with the number of the handle.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checkpointing import NO_TASK, graph_task
from ..handles import define_operator, find
from .act import regularize_any, see, see_gradient

RECOMPUTED = -1
"""The number of a call that activation checkpointing recomputes, or of a site that is off."""


def written(nesting: Any) -> str:
    """Return a nested structure of numbers and None as a Python literal."""
    if isinstance(nesting, dict):
        return "{" + "".join([f"{key!r}: {written(each)}, " for key, each in nesting.items()]) + "}"
    if isinstance(nesting, (list, tuple)):
        inside = "".join([f"{written(each)}, " for each in nesting])
        return f"[{inside}]" if isinstance(nesting, list) else f"({inside})"
    return str(nesting)


@define_operator(
    "observe",
    "(Tensor(a!) handle, Tensor[] tensors, Tensor[] given, str nesting, bool training, "
    "bool differentiable) -> Tensor",
    fake=lambda *given: torch.empty(2, dtype=torch.int64, device="cpu"),
)
def observe(
    handle: Tensor,
    tensors: Sequence[Tensor],
    given: Sequence[Tensor],
    nesting: str,
    training: bool,
    differentiable: bool,
) -> Tensor:
    """Hand the tensors of one call to an observer; return the numbers of handle and call."""
    number = int(handle)
    site, call = find(number), None
    if site is not None and graph_task() == NO_TASK and site.enter(training):
        read = partial(ast.literal_eval, nesting)
        call = see(site, tensors, given, read, training, differentiable)
    return torch.tensor([number, RECOMPUTED if call is None else call], device="cpu")


@define_operator(
    "observe_gradient",
    "(Tensor grad, Tensor ticket, int at) -> ()",
    fake=lambda grad, ticket, at: None,
)
def observe_gradient(grad: Tensor, ticket: Tensor, at: int) -> None:
    """Hand the gradient of one tensor of a call to an observer."""
    number, call = ticket.tolist()
    site = find(number)
    if site is not None:
        see_gradient(site, grad, at, call)


torch.fx.has_side_effect(observe_gradient)


def watch_gradient(x: Tensor, see: Callable[[Tensor | None], None]) -> Tensor:
    """Return the tensor, whose gradient `see` is called with.

    A view and a leaf are copied: work in place would lose the hook of a view, and a parameter would
    keep it. So is a tensor whose gradient is regularized: of two hooks on it, the first acts first.
    """
    hooks: dict[int, Any] = x._backward_hooks or {}
    regularized = any(getattr(hook, "func", None) is regularize_any for hook in hooks.values())
    if regularized or x._is_view() or x.is_leaf:
        x = x.clone()
    x.register_hook(see)  # type: ignore[no-untyped-call]  # torch's
    return x


# Dynamo traces one operator faster than the Python code in it, which AOTAutograd decomposes later.
@define_operator(
    "observe_and_watch",
    "(Tensor(a!) handle, Tensor[] tensors, Tensor[] given, str nesting, bool training, "
    "bool gradients) -> Tensor[]",
)
def observe_and_watch(
    handle: Tensor,
    tensors: Sequence[Tensor],
    given: Sequence[Tensor],
    nesting: str,
    training: bool,
    gradients: bool,
) -> list[Tensor]:
    """Observe one call; return its tensors with watched gradients, or nothing without any."""
    if torch._C._are_functorch_transforms_active():
        return []
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    with torch.no_grad():
        ticket = observe(handle, tensors, given, nesting, training, differentiable)
    if not (gradients and differentiable):
        return []

    def hand_over(at: int, grad: Tensor | None) -> None:
        if grad is not None:  # as of a tensor that nothing was made of
            with torch.no_grad():
                observe_gradient(grad, ticket, at)

    return [watch_gradient(x, partial(hand_over, at)) for at, x in enumerate(tensors)]
