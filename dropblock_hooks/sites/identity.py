"""Identity function whose backward applies a gradient regularizer.

Its forward copies, so that the gradients of the layer's own uses of the tensor stay as they are.
An in-place operation behind the layer works on the copy: on a view, it would take the gradient past
the identity.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def may_get_gradient(x: Tensor) -> bool:
    """Whether a gradient may be computed for what is made of this tensor now.

    Inside ``torch.func.grad`` the tensor does not tell: an outer transform may want its gradient.
    """
    return torch.is_grad_enabled() and (
        x.requires_grad or (not torch.compiler.is_compiling() and is_transformed(x))
    )


class GradIdentity(torch.autograd.Function):
    """Identity function that calls `watch` with the gradient and hands its result on.

    With ``setup_context`` it works inside ``torch.func.grad`` as well.
    """

    @staticmethod
    def forward(x: Tensor, watch: Callable[[Tensor], Tensor]) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.watch = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        # the gradient is None where nothing has been made of the copy
        return (None if grad is None else ctx.watch(grad)), None
