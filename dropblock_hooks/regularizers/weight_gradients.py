"""Regularizers that need the parameter whose gradient they change: ``param:`` selectors alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from ..functional.gradients import check_norm
from ..functional.weight_gradients import check_eps, clip_adaptive_counted, without_mean
from ..registry import register
from .base import Applied, Now, Regularizer
from .gradients import OnGradients
from .rates import Positive


@dataclass(frozen=True, repr=False)
class _OfParameters(OnGradients):
    """What knows gradients of parameters alone."""

    def refusal(self, module: nn.Module, parameter: nn.Parameter | None) -> str | None:
        if parameter is None:
            name = type(self).__name__
            return f"{name} is for gradients of parameters: select them, as with 'param:**.weight'"
        return None


@register
class AdaptiveClipGrad(_OfParameters, Regularizer):
    """Scales gradients of parameters down to a share of the weights' norm, unit by unit.

    A unit is a row of a weight; a parameter of one axis is one unit. The norms that the report
    shows are those of gradients divided by those of weights. The paper leaves the last linear layer
    out. See `functional.adaptive_clip_grad`. Brock et al., 2021, "High-Performance Large-Scale
    Image Recognition Without Normalization" (https://arxiv.org/abs/2102.06171).

    Example:
        >>> AdaptiveClipGrad(0.02)
        AdaptiveClipGrad(clip_factor=0.02, eps=0.001, norm_type=2.0)

    Args:
        clip_factor: largest ratio of the norm of a unit's gradient to that of its weights.
        eps: least norm that a unit's weights count with, above 0.
        norm_type: order of the norms; inf allowed.
    """

    clip_factor: Positive = 0.01
    eps: float = 1e-3
    norm_type: float = 2.0
    reads_grad_scale: ClassVar[bool] = True
    bounds: ClassVar[Mapping[str, int]] = {"clip_factor": 1}

    def check(self, values: Mapping[str, float]) -> None:
        object.__setattr__(self, "eps", check_eps(self.eps))
        object.__setattr__(self, "norm_type", check_norm(self.norm_type, "tensor"))

    def apply(self, x: Tensor, now: Now) -> Applied:
        if now.parameter is None:
            raise ValueError("needs the parameter whose gradient this is: now has none")
        factor, eps, order = now.clip_factor, self.eps, self.norm_type
        y, changed, now.norms = clip_adaptive_counted(
            x, now.parameter, factor, eps, order, now.grad_scale
        )
        return y, changed


@register
class CentralizeGrad(_OfParameters, Regularizer):
    """Takes the mean of each row away from gradients of weights; see `functional.centralize_grad`.

    Parameters whose rows have one value are left as they are: biases, those of norms, scales of
    channels. Yong et al., 2020, "Gradient Centralization" (https://arxiv.org/abs/2004.01461).

    Example:
        >>> CentralizeGrad()
        CentralizeGrad()
    """

    def apply(self, x: Tensor, now: Now) -> Applied:
        return without_mean(x), None
