"""Penalties on the size of activations."""

from torch import Tensor

from ..functional.penalties import activity_l1_gradient, activity_l2_gradient
from ..registry import register
from .base import NonNegative
from .penalties import Penalty


@register
class ActivityL1(Penalty):
    """Adds the gradient of the mean magnitude of activations; see `functional.activity_l1`.
    Use it to make activations sparse. The report shows the penalty without its weight.

    Example:
        >>> spec = {"layer4": ActivityL1(1e-4)}

    Equation:
        ``g' = g + weight * d/dx mean(abs(x))``
    """

    weight: NonNegative

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return activity_l1_gradient(x)


@register
class ActivityL2(Penalty):
    """Adds the gradient of the mean square of activations; see `functional.activity_l2`.
    Use it to keep activations small. The report shows the penalty without its weight.

    Example:
        >>> spec = {"rnn": ActivityL2(2.0, index=0)}

    Equation:
        ``g' = g + weight * d/dx mean(x ** 2)``
    """

    weight: NonNegative

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return activity_l2_gradient(x)
