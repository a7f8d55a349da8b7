"""Base of penalties: regularizers that add the gradient of a penalty in the backward.

`ZLoss`, `ActivityL1` and `ActivityL2` are its subclasses. In the forward, the site only saves the
activation. In the backward, it calls `Penalty.apply` with the gradient of the loss as ``x``, and
with the saved activation as `Now.activation`.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor, nn

from ..functional.penalties import GradientAndPenalty, add_gradient
from .base import Applied, Now, Regularizer


class Penalty(Regularizer):
    """Base of penalties of activations, whose gradients are added to the gradients of the loss.

    The sum is the gradient of ``loss + weight * penalty``. A loop that divides the loss by n, to
    accumulate gradients over n backwards, must also divide the weight by n.

    Args:
        weight: factor of the penalty, a number >= 0 or a schedule.
        layout: without effect, because the penalty needs neither channels nor a map.
        active: ``"train"``; no other value is allowed.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.
    """

    acts_on: ClassVar[Literal["activation", "gradient"]] = "gradient"
    unit: ClassVar[None] = None
    random: ClassVar[bool] = False
    reads_grad_scale: ClassVar[bool] = True
    needs_activation: ClassVar[bool] = True
    penalizes: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True
    traced: ClassVar[bool] = True

    def check(self, values: Mapping[str, float]) -> None:
        if self.active != "train":
            raise ValueError(f"{self.label} adds to the loss of a training: it takes no active")

    def refusal(self, module: nn.Module, parameter: nn.Parameter | None) -> str | None:
        if parameter is None:
            return None
        return f"{self.label} penalizes activations: leave out param: before the selector"

    def penalty_gradient(self, activation: Tensor) -> GradientAndPenalty:
        """Return the gradient of the penalty with respect to an activation, and the penalty.

        Both are without the weight.
        """
        raise NotImplementedError

    def apply(self, x: Tensor, now: Now) -> Applied:
        """Add the gradient of the penalty to `x`, the gradient of the loss at ``now.activation``.

        The penalty goes to the report as ``now.norms``, also while the weight is 0, because sites
        of gradients call ``apply`` at this rate, too.
        """
        penalty_gradient, now.norms = self.penalty_gradient(now.activation)
        # compiled code passes the weight as a tensor, whose value is not known here
        if not isinstance(now.weight, Tensor) and now.weight == 0.0:
            return x, 0

        changed = (now.weight != 0.0) * x.numel()
        weight = now.weight * now.grad_scale  # `x` is the gradient of the scaled loss
        return add_gradient(x, penalty_gradient, weight), changed
