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
mean over all; FSDP shards the parameters, and hooks on them are refused, but for what follows.

With ``when="accumulated"`` a parameter's gradient is regularized once per update instead, when the
optimizer that ``attach`` was given begins its step: all that has accumulated, unscaled, and under
DistributedDataParallel and ``fully_shard`` the mean over all processes. Of 3 in one backward and -2
in the next, a bound of 1 leaves 1 - 1 = 0 when it acts in each of them, and the sum, 1, when it
acts once. The rates are those of the step; where that takes a closure, it acts after each call.

Forward-mode derivatives (``torch.func.jvp``) have no gradient that could be changed, and pass by.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from ..checks import check_option
from ..functional.dropout import drop_channels
from ..functional.gradients import (
    Per,
    check_bounds,
    check_norm,
    clamp_counted,
    clip_norm_counted,
    common_norm,
    scale_counted,
    values_met,
)
from ..functional.noise import add_noise
from ..registry import register
from .base import Applied, Now, Regularizer
from .dropout import DropsShare
from .rates import NonNegative, Positive, Probability, Rate

When: TypeAlias = Literal["backward", "accumulated"]


@dataclass(frozen=True, repr=False)
class OnGradients:
    """What regularizers of gradients share: a mix-in, also for those of your own.

    Example:
        >>> @register
        ... class SignGrad(OnGradients, Regularizer):
        ...     def apply(self, x, now):
        ...         return x.sign(), None
        >>> SignGrad(when="accumulated")
        SignGrad(when='accumulated')

    Args:
        when: regularize what each ``"backward"`` brings, or, of parameters, what has
            ``"accumulated"`` when the optimizer begins its step: it must be given to ``attach``.
    """

    when: When = field(default="backward", kw_only=True)
    acts_on: ClassVar[Literal["activation", "gradient"]] = "gradient"
    random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_option("when", self.when, get_args(When))
        super().__post_init__()  # type: ignore[misc]  # of Regularizer, which follows

    @property
    def accumulates(self) -> bool:
        """Whether it acts once per update."""
        return self.when == "accumulated" or self.together

    @property
    def together(self) -> bool:
        """Whether it looks at all parameters of its entry at once, by `measure`."""
        return False

    def measure(self, grads: Sequence[Tensor]) -> dict[str, Tensor]:
        """What ``apply`` needs to know of all these gradients, by name: attributes of ``now``."""
        raise NotImplementedError(f"{type(self).__name__} must define measure(grads)")


@register
class ClampGrad(OnGradients, Regularizer):
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
class ClipGradNorm(OnGradients, Regularizer):
    """Scales the gradient down to a norm of `max_norm`; see `functional.clip_grad_norm`.

    Example:
        >>> ClipGradNorm(1.0, per="sample")
        ClipGradNorm(max_norm=1.0, norm_type=2.0, per='sample')

    Args:
        max_norm: largest norm, above 0.
        norm_type: order of the norm; inf allowed.
        per: one norm for the whole ``"tensor"``, for each ``"sample"`` or for each ``"channel"``
            (of a parameter: its axis 0).
        group: one norm over all parameters of the entry, as ``torch.nn.utils.clip_grad_norm_``
            takes it; once per update, as with ``when="accumulated"``.
    """

    max_norm: Positive
    norm_type: float = 2.0
    per: Per = "tensor"
    group: bool = False
    reads_grad_scale: ClassVar[bool] = True

    def check(self, values: Mapping[str, float]) -> None:
        object.__setattr__(self, "norm_type", check_norm(self.norm_type, self.per))
        if self.group and self.per != "tensor":
            raise ValueError(f"with group=True, per must be 'tensor', got {self.per!r}")
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

    @property
    def together(self) -> bool:
        return self.group

    def measure(self, grads: Sequence[Tensor]) -> dict[str, Tensor]:
        return {"common_norm": common_norm(grads, self.order)}

    def refusal(self, module: nn.Module, parameter: nn.Parameter | None) -> str | None:
        if parameter is not None and self.per == "sample":
            return "a parameter has no samples: per must be 'tensor' or 'channel'"
        return None

    def bounds_at(self, norm: float) -> dict[str, float]:
        return {"max_norm": norm}

    def apply(self, x: Tensor, now: Now) -> Applied:
        limit = now.max_norm * now.grad_scale
        if self.group:
            y, clipped = scale_counted(x, limit, now.common_norm.to(x.device))
        else:
            y, clipped = clip_norm_counted(x, limit, self.order, self.per)
        now.norms = clipped.met.unscaled(now.grad_scale)
        return y, clipped.changed


@register
class ScaleGrad(OnGradients, Regularizer):
    """Multiplies the gradient; a negative scale reverses it (domain-adversarial training).

    Ganin et al., 2016, "Domain-Adversarial Training of Neural Networks"
    (https://arxiv.org/abs/1505.07818).

    Example:
        >>> ScaleGrad(-0.1)
        ScaleGrad(scale=-0.1)
    """

    scale: Rate

    def apply(self, x: Tensor, now: Now) -> Applied:
        unchanged = not isinstance(now.scale, Tensor) and now.scale == 1.0
        return (x if unchanged else x * now.scale), None


@register
class ZeroGrad(OnGradients, Regularizer):
    """Replaces the gradient by zeros: nothing flows back through here.

    Example:
        >>> ZeroGrad()
        ZeroGrad()
    """

    def apply(self, x: Tensor, now: Now) -> Applied:
        return torch.zeros_like(x), None


@register
class GradNoise(OnGradients, Regularizer):
    """Adds zero-mean normal noise to the gradient; `std` is in the unit of the unscaled loss.

    Neelakantan et al., 2015, "Adding Gradient Noise Improves Learning for Very Deep Networks"
    (https://arxiv.org/abs/1511.06807), lets it fall with the updates t: (eta / (1 + t) ** 0.55) **
    0.5. In float16, a GradScaler's scale times `std` must stay well below 65,504, which that scale
    finds by itself. Under DistributedDataParallel the noise of n processes is averaged, to std /
    n ** 0.5 where their seeds differ; ``when="accumulated"`` is refused there.

    Example:
        >>> GradNoise(0.01)
        GradNoise(std=0.01)
    """

    std: NonNegative
    idle_at_zero: ClassVar[bool] = True
    random: ClassVar[bool] = True
    reads_grad_scale: ClassVar[bool] = True

    def apply(self, x: Tensor, now: Now) -> Applied:
        if not isinstance(now.std, Tensor) and now.std == 0.0:
            return x, None
        return add_noise(x, now.std * now.grad_scale), None


@register
class DropGrad2d(DropsShare, OnGradients, Regularizer):
    """Zeroes channels of the gradient of feature maps (N, C, H, W), each with chance p.

    The forward is left alone; the channels that are kept are scaled by 1 / (1 - p). It is
    `functional.dropout2d` of the gradient, after Tseng et al., 2020, "Regularizing Meta-Learning
    via Gradient Dropout" (https://arxiv.org/abs/2004.05859), who drop elements of gradients of
    parameters. Inf and NaN pass.

    Example:
        >>> DropGrad2d(0.2)
        DropGrad2d(p=0.2)
    """

    p: Probability = 0.5
    spatial: ClassVar[int] = 2
    random: ClassVar[bool] = True

    def apply(self, x: Tensor, now: Now) -> Applied:
        y, dropped = drop_channels(x, now.p)
        return (y if y is x else torch.where(x.isfinite(), y, x)), dropped
