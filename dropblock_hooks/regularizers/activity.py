"""Penalties on the size of activations.

`Penalty.apply` calls ``penalty_gradient`` in the backward, with the activation of the forward.
"""

from torch import Tensor

from .. import functional
from ..functional.penalties import (
    GradientAndPenalty,
    activity_l1_gradient,
    activity_l2_gradient,
)
from ..registry import register
from .base import NonNegative
from .penalties import Penalty


@register
class ActivityL1(Penalty):
    """Adds the gradient of the mean magnitude of activations; see `functional.activity_l1`.
    Use it to make activations sparse. The report shows the penalty without its weight.

    Example:
        >>> spec = {"layer4": ActivityL1(1e-4)}

    Args:
        weight: factor of the penalty, a number >= 0 or a schedule.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: without effect, because the penalty needs neither channels nor a map.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"``; no other value is allowed.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        ``g' = g + weight * d/dx mean(abs(x))``

    Reference:
        Glorot, Bordes and Bengio, 2011, "Deep Sparse Rectifier Neural Networks"
        (https://proceedings.mlr.press/v15/glorot11a.html).
    """

    weight: NonNegative

    function = staticmethod(functional.activity_l1)

    def penalty_gradient(self, activation: Tensor) -> GradientAndPenalty:
        return activity_l1_gradient(activation)


@register
class ActivityL2(Penalty):
    """Adds the gradient of the mean square of activations; see `functional.activity_l2`.
    Use it to keep activations small. The report shows the penalty without its weight.

    Example:
        >>> spec = {"rnn": ActivityL2(2.0, index=0)}

    Args:
        weight: factor of the penalty, a number >= 0 or a schedule.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: without effect, because the penalty needs neither channels nor a map.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"``; no other value is allowed.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        ``g' = g + weight * d/dx mean(x ** 2)``

    Reference:
        Merity, McCann and Socher, 2017, "Revisiting Activation Regularization for Language RNNs"
        (https://arxiv.org/abs/1708.01009).
    """

    weight: NonNegative

    function = staticmethod(functional.activity_l2)

    def penalty_gradient(self, activation: Tensor) -> GradientAndPenalty:
        return activity_l2_gradient(activation)
