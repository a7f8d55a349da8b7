"""GradientStats: moments and shares of the gradient that comes back to a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..registry import register
from .base import Watch
from .measuring import Measuring
from .moments import Moments
from .statistics import Statistics


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


class GradientWatch(Watch):
    """What one site has seen of its gradients."""

    def __init__(self, options: GradientStats) -> None:
        self.every = options.every
        self.moments = Moments(options.octaves)

    def see_gradient(self, grad: Tensor, at: int, scale: float | Tensor, ticket: Any) -> None:
        self.moments.add(grad, self.every, scale=scale)

    def to(self, device: torch.device) -> None:
        self.moments.to(device)

    def close_window(self) -> None:
        self.moments.close()

    def tensors(self) -> list[Tensor]:
        return self.moments.tensors()

    def read(self, numbers: Mapping[int, list[float]]) -> Statistics | None:
        return self.moments.read(numbers)

    def state_dict(self) -> dict[str, Tensor]:
        return self.moments.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.moments.load_state_dict(state)
