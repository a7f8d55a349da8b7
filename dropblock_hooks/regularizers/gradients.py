"""Regularizers of gradients, of activations or of parameters.

All except `ZeroGrad` let Inf and NaN pass.

A tensor hook calls them in the backward, through `regularize_grad`. With ``when="accumulated"``,
``sites.updates`` calls them once per update.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from .. import functional
from .._torch import foreach_mul_, foreach_zero_
from ..checks import POSITIVE, as_number
from ..functional import foreach, gradients
from ..functional.dropout import add_noise, drop_units
from ..functional.masks import scaled
from ..registry import register, store
from .base import Applied, NonNegative, Now, Positive, Probability, Rate, Regularizer
from .dropout import DropsShare


@dataclass(frozen=True, repr=False)
class OnGradients:
    """Mix-in of regularizers of gradients, also for your own.

    Example:
        >>> @register
        ... class SignGrad(OnGradients, Regularizer):
        ...     def apply(self, x, now):
        ...         return x.sign(), None
        >>> SignGrad(when="accumulated")
        SignGrad(when='accumulated')

    Args:
        when: ``"backward"`` acts in each backward. ``"accumulated"``, for parameters only, acts on
            the sum of the gradients when the optimizer given to ``attach`` begins its step.
    """

    when: Literal["backward", "accumulated"] = field(default="backward", kw_only=True)
    acts_on: ClassVar[Literal["activation", "gradient"]] = "gradient"
    random: ClassVar[bool] = False

    @property
    def accumulates(self) -> bool:
        return self.when == "accumulated"


@register
class ClampGrad(OnGradients, Regularizer):
    """Clamps each value of the gradient to [min, max]; see `functional.clamp_grad`.
    Use it against single very large values. Unlike `ClipGradNorm` it changes the direction.

    Example:
        >>> spec = {"fc": ClampGrad(-1.0, 1.0)}

    Args:
        min: lower bound, any number; None for no bound. A single number is `min`, and it can't be
            above 0 then: two bounds are ``ClampGrad(-0.5, 0.5)``.
        max: upper bound, any number >= `min`; None for no bound. One of the two is needed. Without
            `min`, it can't be below 0.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (in evaluation
            mode, too).
        when: ``"backward"`` acts in each backward. ``"accumulated"``, for parameters only, acts on
            the sum of the gradients when the optimizer given to ``attach`` begins its step.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed, both bounds are missing, `min` is above
            `max`, or the only bound moves a gradient of 0.

    Equation:
        ``g' = minimum(maximum(g, min), max)``; Inf and NaN pass.
    """

    min: Rate | None = None
    max: Rate | None = None
    function = staticmethod(functional.clamp_grad)
    reads_grad_scale: ClassVar[bool] = True
    bounds: ClassVar[Mapping[str, int]] = {"min": -1, "max": 1}
    traced: ClassVar[bool] = True
    off: ClassVar[Mapping[str, float]] = {"min": -math.inf, "max": math.inf}
    parts: ClassVar[Literal["", "rows", "any"]] = "any"

    def check(self, values: Mapping[str, float]) -> None:
        gradients.check_bounds(values.get("min"), values.get("max"))

    def apply(self, x: Tensor, now: Now) -> Applied:
        rates = vars(now)  # has no bound that is None
        low = rates.get("min")
        high = rates.get("max")
        clamped, changed, norms = gradients.clamp_measured(x, low, high, now.grad_scale)
        now.norms = norms
        return clamped, changed


@register
class ClipGradNorm(OnGradients, Regularizer):
    """Scales the gradient down to a norm of `max_norm`; see `functional.clip_grad_norm`.
    Use it against exploding gradients. ``attached.suggest()`` proposes bounds from measured norms.

    Example:
        >>> spec = {"param:**": ClipGradNorm(1.0, group=True)}

    Args:
        max_norm: largest norm, in the unit of the gradient, a number > 0.
        norm_type: order of the norm, above 0; inf allowed.
        per: one norm for the whole ``"tensor"``, for each ``"sample"`` or for each ``"channel"``
            (of a parameter: its axis 0).
        group: True takes one norm over all parameters of the entry, like
            ``torch.nn.utils.clip_grad_norm_``, once per update.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (in evaluation
            mode, too).
        when: ``"backward"`` acts in each backward. ``"accumulated"``, for parameters only, acts on
            the sum of the gradients when the optimizer given to ``attach`` begins its step.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed, or `per` is not ``"tensor"`` with
            ``group=True``.

    Equation:
        ``g' = g * minimum(1, max_norm / norm(g))``; a norm that is not finite passes.

    Reference:
        Pascanu et al., 2013 (https://arxiv.org/abs/1211.5063).
    """

    max_norm: Positive
    norm_type: float = 2.0
    per: gradients.Per = "tensor"
    group: bool = False
    function = staticmethod(functional.clip_grad_norm)
    reads_grad_scale: ClassVar[bool] = True
    bounds: ClassVar[Mapping[str, int]] = {"max_norm": 1}
    traced: ClassVar[bool] = True
    off: ClassVar[Mapping[str, float]] = {"max_norm": math.inf}
    parts: ClassVar[Literal["", "rows", "any"]] = "any"

    def __post_init__(self) -> None:
        super().__post_init__()
        norm_type = gradients.check_norm(self.norm_type, self.per)
        store(self, norm_type=norm_type)

    @property
    def accumulates(self) -> bool:
        return self.group or super().accumulates

    @property
    def channelwise(self) -> bool:  # type: ignore[override]  # objects of a class may differ
        return self.per == "channel"

    @property
    def samplewise(self) -> bool:  # type: ignore[override]
        return self.per == "sample"

    def check(self, values: Mapping[str, float]) -> None:
        if self.group and self.per != "tensor":
            raise ValueError(f"with group=True, per must be 'tensor', got {self.per!r}")

    def apply(self, x: Tensor, now: Now) -> Applied:
        if self.group:  # the common norm of the entry is measured before
            norm = now.common_norm.to(x.device)
            bound = now.max_norm * now.grad_scale
            now.norms = gradients.unscaled(norm, now.grad_scale)
            return gradients.scale_counted(x, bound, norm)

        clipped, changed, norms = gradients.clip_measured(
            x,
            now.max_norm,
            self.norm_type,
            self.per,
            now.grad_scale,
        )
        now.norms = norms
        return clipped, changed

    def apply_all(self, grads: Sequence[Tensor], now: Now) -> Tensor | None:
        if self.per == "channel":
            units = foreach.rows_as_units(grads, least_axes=1)
        else:
            units = foreach.whole_tensors(grads)
        if self.group:
            norms = now.common_norm.to(grads[0].device)
        else:
            norms = foreach.unit_norms(grads, units, self.norm_type)
            norms = now.reduce_norms(norms, self.norm_type, by_rows=self.per == "channel")

        unscaled_norms = gradients.unscaled(norms, now.grad_scale)
        number_of_units = sum(units.counts)
        now.norms = unscaled_norms.expand(number_of_units)  # with group=True, there is one norm
        now.norm_counts = units.counts

        bound = now.max_norm * now.grad_scale
        return foreach.shrink_(grads, units, norms, bound)


@register
class ScaleGrad(OnGradients, Regularizer):
    """Multiplies the gradient; a negative scale reverses it (domain-adversarial training).
    Use it between a backbone and a head. See Ganin et al., 2016 (https://arxiv.org/abs/1505.07818).

    Example:
        >>> spec = {"backbone": ScaleGrad(-0.1)}

    Args:
        scale: factor of the gradient, any finite number or a schedule.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
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
        ``g' = scale * g``
    """

    scale: Rate
    traced: ClassVar[bool] = True
    off: ClassVar[Mapping[str, float]] = {"scale": 1.0}
    parts: ClassVar[Literal["", "rows", "any"]] = "any"

    def apply(self, x: Tensor, now: Now) -> Applied:
        is_off = not isinstance(now.scale, Tensor) and now.scale == 1.0
        if is_off:
            return x, None
        return scaled(x, now.scale), None

    def apply_all(self, grads: Sequence[Tensor], now: Now) -> Tensor | None:
        if now.scale != 1.0:
            foreach_mul_(grads, now.scale)
        return None


@register
class ZeroGrad(OnGradients, Regularizer):
    """Replaces the gradient by zeros: nothing flows back through here.
    Use it to freeze all that comes before a layer while the rest trains.

    Example:
        >>> spec = {"layer2": ZeroGrad()}

    Args:
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (in evaluation
            mode, too).
        when: ``"backward"`` acts in each backward. ``"accumulated"``, for parameters only, acts on
            the sum of the gradients when the optimizer given to ``attach`` begins its step.

    Raises:
        ValueError: if an option has a value that is not allowed.

    Equation:
        ``g' = 0``
    """

    traced: ClassVar[bool] = True
    parts: ClassVar[Literal["", "rows", "any"]] = "any"

    def apply(self, x: Tensor, now: Now) -> Applied:
        return torch.zeros_like(x), None

    def apply_all(self, grads: Sequence[Tensor], now: Now) -> Tensor | None:
        foreach_zero_(grads)
        return None


@register
class GradNoise(OnGradients, Regularizer):
    """Adds zero-mean normal noise to the gradient; `std` is in units of the unscaled loss.
    Use it on parameters of very deep networks. Neelakantan et al., 2015
    (https://arxiv.org/abs/1511.06807) use ``std = (eta / (1 + t) ** 0.55) ** 0.5`` at update t.
    DistributedDataParallel averages the noise of n processes to ``std / n ** 0.5``.

    Example:
        >>> spec = {"param:**": GradNoise(0.01)}

    Args:
        std: standard deviation in units of the unscaled loss, a number >= 0 or a schedule.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
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
        ``g' = g + std * z``, where z is standard normal noise.
    """

    std: NonNegative
    random: ClassVar[bool] = True
    reads_grad_scale: ClassVar[bool] = True
    traced: ClassVar[bool] = True
    off: ClassVar[Mapping[str, float]] = {"std": 0.0}

    def apply(self, x: Tensor, now: Now) -> Applied:
        is_off = not isinstance(now.std, Tensor) and now.std == 0.0
        if is_off:
            return x, None
        std = now.std * now.grad_scale
        return add_noise(x, std), None


@register
class DropGrad2d(DropsShare, OnGradients, Regularizer):
    """Zeroes channels of the gradient of feature maps (N, C, H, W), each with chance p.
    Inf and NaN pass. Use it where the forward must stay deterministic. Tseng et al., 2020
    (https://arxiv.org/abs/2004.05859) drop elements of gradients of parameters.

    Example:
        >>> spec = {"layer2": DropGrad2d(0.2)}

    Args:
        p: expected share of the elements to drop, a number in [0, 1] or a schedule.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: size of the map that tokens form, ``(height, width)``, each at least 1; None asks the
            model.
        prefix_tokens: number of class and register tokens before the map, at least 0, which stay
            unchanged. None asks the model.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (in evaluation
            mode, too).
        when: ``"backward"``; no other value is allowed.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        ``g' = g * keep / (1 - p)``, with one ``keep`` for each channel: 0 with chance p, else 1.
    """

    p: Probability = 0.5
    spatial: ClassVar[int] = 2
    random: ClassVar[bool] = True
    traced: ClassVar[bool] = True
    off: ClassVar[Mapping[str, float]] = {"p": 0.0}

    def apply(self, x: Tensor, now: Now) -> Applied:
        y, dropped = drop_units(x, now.p, 2)
        if y is not x:
            is_finite = (x - x) == 0  # isfinite() starts four kernels on a GPU
            y = torch.where(is_finite, y, x)
        return y, dropped


class _OfParameters(OnGradients, Regularizer):
    """Base of regularizers that take gradients of parameters only."""

    def refusal(self, module: nn.Module, parameter: nn.Parameter | None) -> str | None:
        if parameter is not None:
            return None
        return f"{self.label} is for gradients of parameters: select them by 'param:**.weight'"


@register
class AdaptiveClipGrad(_OfParameters):
    """Scales gradients of parameters down; see `functional.adaptive_clip_grad`.
    Use it for large batches and networks without norms, on all parameters except the last linear
    layer. The report shows the norms of gradients divided by the norms of weights.

    Each row of a weight has a norm, and each bias. With ``group=True`` there is one norm over the
    gradients of the entry, and one norm over the parameters that have these gradients.

    Example:
        >>> spec = {"param:layer*.**": AdaptiveClipGrad(0.02)}

    Args:
        clip_factor: largest ratio of the norms, a number > 0.
        eps: least norm of weights, above 0, so that zero weights can learn.
        norm_type: order of the norm, above 0; inf allowed.
        group: True compares one norm over all gradients of the entry with one norm over their
            parameters, once per update. All gradients are then scaled by the same factor.
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
        ``g' = g * minimum(1, clip_factor * maximum(norm(w), eps) / norm(g))``

    Reference:
        Brock et al., 2021 (https://arxiv.org/abs/2102.06171), section 4.
    """

    clip_factor: Positive = 0.01
    eps: float = 1e-3
    norm_type: float = 2.0
    group: bool = False
    function = staticmethod(functional.adaptive_clip_grad)
    reads_grad_scale: ClassVar[bool] = True
    bounds: ClassVar[Mapping[str, int]] = {"clip_factor": 1}
    parts: ClassVar[Literal["", "rows", "any"]] = "any"

    def __post_init__(self) -> None:
        super().__post_init__()
        eps = as_number("eps", self.eps, allowed=POSITIVE)
        norm_type = gradients.check_norm(self.norm_type, "tensor")
        store(self, eps=eps, norm_type=norm_type)

    @property
    def accumulates(self) -> bool:
        return self.group or super().accumulates

    def apply(self, x: Tensor, now: Now) -> Applied:
        if self.group:
            now.norms = self._common_ratio(now, x.device)
            return gradients.scale_counted(x, now.clip_factor, now.norms)

        clipped, changed, norms = gradients.clip_adaptive_measured(
            x,
            now.parameter,
            now.clip_factor,
            self.eps,
            self.norm_type,
            now.grad_scale,
        )
        now.norms = norms
        return clipped, changed

    def apply_all(self, grads: Sequence[Tensor], now: Now) -> Tensor | None:
        if self.group:
            units = foreach.whole_tensors(grads)
            ratio = self._common_ratio(now, grads[0].device)
            now.norms = ratio.expand(len(grads))
            return foreach.shrink_(grads, units, ratio, now.clip_factor)

        # the same for all gradients if they are sharded; other norms are not reduced
        has_rows = grads[0].ndim > 1
        changed, norms, units = foreach.clip_adaptive_(
            grads,
            now.parameters,
            now.clip_factor,
            self.eps,
            self.norm_type,
            now.grad_scale,
            reduce_norms=partial(now.reduce_norms, norm_type=self.norm_type, by_rows=has_rows),
        )
        now.norms = norms
        now.norm_counts = units.counts
        return changed

    def _common_ratio(self, now: Now, device: torch.device) -> Tensor:
        """Return the ratio of the norms of the entry, which were measured before."""
        norm = now.common_norm.to(device)
        weight_norm = now.common_weight_norm.to(device)
        return gradients.relative_norms(norm, weight_norm, self.eps, now.grad_scale)


@register
class CentralizeGrad(_OfParameters):
    """Subtracts the mean of each row from gradients of weights; see `functional.centralize_grad`.
    Use it on the weights of convolutions and linear layers.

    Example:
        >>> spec = {"param:**.weight": CentralizeGrad()}

    Args:
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
        ValueError: if an option has a value that is not allowed.

    Equation:
        ``g' = g - mean(g)``, the mean over all axes but the first.

    Reference:
        Yong et al., 2020 (https://arxiv.org/abs/2004.01461).
    """

    function = staticmethod(functional.centralize_grad)
    parts: ClassVar[Literal["", "rows", "any"]] = "rows"

    def apply(self, x: Tensor, now: Now) -> Applied:
        return gradients.centralize_grad(x), None

    def apply_all(self, grads: Sequence[Tensor], now: Now) -> Tensor | None:
        foreach.centralize_(grads)
        return None
