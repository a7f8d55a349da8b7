"""A penalty on the distance of parameters from the values with which a training began."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from .. import functional
from ..functional import foreach
from ..functional.penalties import add_gradient, l2_sp_gradient
from ..registry import register
from .base import Applied, NonNegative, Now, Regularizer
from .gradients import OnGradients


@register
class L2SP(OnGradients, Regularizer):
    """Pulls parameters to the values that they had at ``attach``; see `functional.l2_sp`.
    Use it to fine-tune, on the pretrained weights, in place of weight decay.

    The new gradient is the one of ``loss + weight * penalty``. With ``when="accumulated"``, the
    penalty is added once per update. Otherwise it is added in each backward. Then a loop that
    divides the loss by n, to accumulate gradients over n backwards, must also divide the weight by
    n. A parameter that gets no gradient in an update is not pulled. ``attached.state_dict()`` holds
    the values.

    Example:
        >>> spec = {"param:backbone.**": L2SP(0.01)}

    Args:
        weight: factor of the penalty, a number >= 0 or a schedule.
        at: ``"output"``; no other value is allowed.
        index: None; no other value is allowed.
        layout: ``"auto"``; no other value is allowed.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (in evaluation
            mode, too).
        when: ``"backward"`` acts in each backward. ``"accumulated"``, for parameters only, acts on
            the sum of the gradients when the optimizer given to ``attach`` begins its step.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        ``g' = g + weight * (w - w0)``, where w0 is the value at ``attach``.

    Reference:
        Li, Grandvalet and Davoine, 2018, "Explicit Inductive Bias for Transfer Learning with
        Convolutional Networks", equation 3 (https://arxiv.org/abs/1802.01483).
    """

    weight: NonNegative

    function = staticmethod(functional.l2_sp)
    unit: ClassVar[None] = None
    reads_grad_scale: ClassVar[bool] = True
    anchored: ClassVar[bool] = True
    penalizes: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True  # at weight 0 it changes no gradient

    def refusal(self, module: nn.Module, parameter: nn.Parameter | None) -> str | None:
        if parameter is None:
            return f"{self.label} is for gradients of parameters: select them by 'param:**.weight'"
        if parameter.is_meta:
            return "the parameter has no values yet (meta device): attach after they are loaded"
        return None

    def apply(self, x: Tensor, now: Now) -> Applied:
        # the penalty is measured at a weight of 0, too, for the report
        penalty_gradient, penalty = l2_sp_gradient(now.parameter, now.anchor)
        now.norms = penalty
        if now.weight == 0.0:
            return x, 0
        return add_gradient(x, penalty_gradient, now.weight * now.grad_scale), x.numel()

    def apply_all(self, grads: Sequence[Tensor], now: Now) -> Tensor | None:
        changed, now.norms = foreach.pull_(
            grads, now.parameters, now.anchors, now.weight, now.grad_scale
        )
        return changed
