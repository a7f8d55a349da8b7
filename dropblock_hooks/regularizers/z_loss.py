"""The z-loss of logits and routers."""

from torch import Tensor

from .. import functional
from ..functional.penalties import GradientAndPenalty, z_loss_gradient
from ..registry import register
from .base import NonNegative
from .penalties import Penalty


@register
class ZLoss(Penalty):
    """Adds the gradient of a penalty on large logits; see `functional.z_loss`.
    Use it on the last linear layer of a language model, with a weight of 1e-4, or on the routers of
    a mixture of experts, with 1e-3.

    The penalty is the mean over all tokens, padding among them. The report shows it, and
    ``attached.scalars()`` has it as ``penalty``. A fused cross entropy reads the weight of
    ``lm_head`` and does not call the layer. Then no penalty is added, and a warning says that the
    layer was never called. In this case, switch the fused cross entropy off.

    Example:
        >>> spec = {"lm_head": ZLoss(1e-4)}

    Args:
        weight: factor of the penalty, a number >= 0 or a schedule.
        dim: the axis of the classes or experts, an integer in [-n, n) for n axes.
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
        ``g' = g + weight * d/dx mean(logsumexp(x) ** 2)``

    Reference:
        Zoph et al., 2022, "ST-MoE", equation 5 (https://arxiv.org/abs/2202.08906), for routers;
        Chowdhery et al., 2022, "PaLM", section 5 (https://arxiv.org/abs/2204.02311), for logits.
    """

    weight: NonNegative
    dim: int = -1

    function = staticmethod(functional.z_loss)

    def penalty_gradient(self, activation: Tensor) -> GradientAndPenalty:
        return z_loss_gradient(activation, self.dim)
