"""GradientStats: moments and shares of the gradient that comes back to a layer."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from ..registry import register
from .measuring import Measuring, MomentsWatch


@register
class GradientStats(Measuring):
    """Mean, deviation, largest magnitude and norm of the gradient at a layer's output, by epoch.

    In the unit of the unscaled loss, after the bounds of its layer; ``when="before"`` as it
    arrived. On ``param:`` selectors, of the gradients of parameters, as each backward brings them:
    what has accumulated, and what acts on it when the optimizer steps, comes later than any `when`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from dropblock_hooks import GradientStats, attach
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> attached = attach(model, {"0": GradientStats()})
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> attached.report()[0].observed.values
        12
    """

    low: float = 1e-12

    acts_on: ClassVar[Literal["activation", "gradient"]] = "gradient"
    sees_values: ClassVar[bool] = False
    sees_gradients: ClassVar[bool] = True
    reads_grad_scale: ClassVar[bool] = True

    def bind(self) -> Any:
        """A `GradientWatch`."""
        return GradientWatch(self)


class GradientWatch(MomentsWatch):
    """What one site has seen of its gradients."""

    def see_gradient(self, grad: Tensor, at: int, scale: float | Tensor, ticket: Any) -> None:
        self.open.add(grad.to_dense() if grad.is_sparse else grad, self.every, scale=scale)
