"""Regularizers of gradients: of the activation at a layer, or of parameters (``param:`` selectors).

A gradient passes from the loss backward: what is put on a layer's output changes the gradient that
this layer and all before it receive. Bounds are in the unit of the unscaled loss when ``attach``
was given the ``grad_scaler``; values that are not finite pass.

At a layer, a list acts in written order on the gradient of what leaves its last regularizer of
activations, whatever stands between; a later Attachment follows. Across layers the order is that
of the backward: a container before its last child. A gradient is that of what the layer hands on,
not of the layer's own uses of the tensor; to that end it is handed on as a copy, so an in-place
operation behind the layer does not reach what the layer returned a view of. The values of a
schedule are those of the forward; for a parameter, which outlives its graphs, those of the
backward.

A gradient of a parameter does not tell which forward it is of. It is regularized where any forward
with gradients since the last one was in training: an evaluation between a training forward and its
backward does not switch the site off.

Inside ``torch.func.vmap`` each sample has a gradient of its own, as in a loop over the samples.
Compiled, such a transform breaks the graph.

Under DistributedDataParallel a hook on a parameter sees the gradient of its own process, before the
mean over all; FSDP shards the parameters, and hooks on them are refused. Forward-mode derivatives
(``torch.func.jvp``) have no gradient that could be changed, and pass by.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..functional.gradients import (
    Per,
    check_bounds,
    check_norm,
    clamp_counted,
    clip_norm_counted,
    values_met,
)
from ..registry import register
from .base import Applied, Now, Regularizer
from .rates import Positive, Rate


@register
class ClampGrad(Regularizer):
    """Clamps each value of the gradient to [min, max]; see `functional.clamp_grad`.

    Example:
        >>> ClampGrad(-1.0, 1.0)
        ClampGrad(min=-1.0, max=1.0)

    Args:
        min: lower bound, or None.
        max: upper bound, or None.
    """

    min: Rate | None = None
    max: Rate | None = None
    acts_on: ClassVar[Literal["gradient"]] = "gradient"
    random: ClassVar[bool] = False
    reads_grad_scale: ClassVar[bool] = True

    def check(self, values: Mapping[str, float]) -> None:
        check_bounds(values.get("min"), values.get("max"))

    def bounds_at(self, norm: float) -> dict[str, float]:
        both = {"min": -norm, "max": norm}
        return {name: bound for name, bound in both.items() if name in self.rates}

    def apply(self, x: Tensor, now: Now) -> Applied:
        # asked of now: compiled code would guard the bounds of self as numbers
        low, high = getattr(now, "min", None), getattr(now, "max", None)
        low = None if low is None else low * now.grad_scale
        high = None if high is None else high * now.grad_scale
        now.norms = values_met(x, low is not None, high is not None).unscaled(now.grad_scale)
        return clamp_counted(x, low, high)


@register
class ClipGradNorm(Regularizer):
    """Scales the gradient down to a norm of `max_norm`; see `functional.clip_grad_norm`.

    Example:
        >>> ClipGradNorm(1.0, per="sample")
        ClipGradNorm(max_norm=1.0, norm_type=2.0, per='sample')

    Args:
        max_norm: largest norm, above 0.
        norm_type: order of the norm; inf allowed.
        per: one norm for the whole ``"tensor"``, for each ``"sample"`` or for each ``"channel"``
            (of a parameter: its axis 0).
    """

    max_norm: Positive
    norm_type: float = 2.0
    per: Per = "tensor"
    acts_on: ClassVar[Literal["gradient"]] = "gradient"
    random: ClassVar[bool] = False
    reads_grad_scale: ClassVar[bool] = True

    def check(self, values: Mapping[str, float]) -> None:
        object.__setattr__(self, "norm_type", check_norm(self.norm_type, self.per))
        _ = self.order  # known from here on: the compiler can't trace how it is found

    @cached_property
    def order(self) -> int | float:
        """The order of the norm, an integer where it is whole: torch.compile would take a float
        for an input.
        """
        whole = self.norm_type.is_integer()
        return int(self.norm_type) if whole else self.norm_type

    @property
    def channelwise(self) -> bool:  # type: ignore[override]  # a constant elsewhere
        return self.per == "channel"

    @property
    def samplewise(self) -> bool:  # type: ignore[override]  # a constant elsewhere
        return self.per == "sample"

    def refusal(self, module: nn.Module, parameter: nn.Parameter | None) -> str | None:
        if parameter is not None and self.per == "sample":
            return "a parameter has no samples: per must be 'tensor' or 'channel'"
        return None

    def bounds_at(self, norm: float) -> dict[str, float]:
        return {"max_norm": norm}

    def apply(self, x: Tensor, now: Now) -> Applied:
        limit = now.max_norm * now.grad_scale
        y, clipped = clip_norm_counted(x, limit, self.order, self.per)
        now.norms = clipped.met.unscaled(now.grad_scale)
        return y, clipped.changed


@register
class ScaleGrad(Regularizer):
    """Multiplies the gradient; a negative scale reverses it (domain-adversarial training).

    Ganin et al., 2016, "Domain-Adversarial Training of Neural Networks"
    (https://arxiv.org/abs/1505.07818).

    Example:
        >>> ScaleGrad(-0.1)
        ScaleGrad(scale=-0.1)
    """

    scale: Rate
    acts_on: ClassVar[Literal["gradient"]] = "gradient"
    random: ClassVar[bool] = False

    def apply(self, x: Tensor, now: Now) -> Applied:
        unchanged = not isinstance(now.scale, Tensor) and now.scale == 1.0
        return (x if unchanged else x * now.scale), None


@register
class ZeroGrad(Regularizer):
    """Replaces the gradient by zeros: nothing flows back through here.

    Example:
        >>> ZeroGrad()
        ZeroGrad()
    """

    acts_on: ClassVar[Literal["gradient"]] = "gradient"
    random: ClassVar[bool] = False

    def apply(self, x: Tensor, now: Now) -> Applied:
        return torch.zeros_like(x), None
