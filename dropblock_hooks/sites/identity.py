"""The identity whose backward regularizes: how what acts on gradients acts at a layer.

Its forward copies. So only what the layer hands on is meant, not the layer's own uses of the tensor
and not its other uses in a list or an attribute; and an in-place operation behind the layer works
on the copy: on a view, it would take the gradient past the identity.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Watch: TypeAlias = Callable[..., Tensor]
"""What is done to the gradient: it, and the tensors that the forward was given → another."""

is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def may_get_gradient(x: Tensor) -> bool:
    """Whether a gradient may come to what is made of this tensor now.

    Inside a function transform (``torch.func``) the tensor does not tell: one of an outer transform
    may want its gradient.
    """
    return torch.is_grad_enabled() and (
        x.requires_grad or (not torch.compiler.is_compiling() and is_transformed(x))
    )


class GradIdentityTraced(torch.autograd.Function):
    """The identity of compiled code, which traces neither ``jvp`` nor ``setup_context``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, watch: Watch, *tensors: Tensor) -> Tensor:
        ctx.watch = watch
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,), tensors = grads, ctx.saved_tensors
        if grad is not None:  # as it is where nothing has been made of the copy
            grad = ctx.watch(grad, *tensors)
        return (grad, None, *[None] * len(tensors))


class GradIdentity(GradIdentityTraced):
    """The same in eager mode, where tangents pass by."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0].clone()


class GradIdentityTransformed(torch.autograd.Function):
    """The same inside ``torch.func.grad``, ``vmap`` and the like; slower."""

    generate_vmap_rule = True  # each sample of vmap has a gradient of its own

    @staticmethod
    def forward(x: Tensor, watch: Watch) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.watch = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        (grad,) = grads
        return (None if grad is None else ctx.watch(grad)), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0].clone()
