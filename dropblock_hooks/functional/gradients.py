"""Bounds gradients by value and by norm. Non-finite values pass, so that overflows stay visible.

    g' = clamp(g, low, high)                            by value
    g' = g * min(1, bound / norm(g))                    by norm
    bound = factor * max(norm(parameter), eps)          adaptive clipping
    g' = g - mean of each row                           centralization

A bound is a number, or a 0-dim tensor on the device of the gradient. The ``*_counted`` functions
return the new gradient and the number of changed values. The ``*_measured`` functions also return
what they compared with the bound.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ..checks import POSITIVE, as_number, check_option
from .kernels import launch
from .masks import wide_dtype

Bound: TypeAlias = float | Tensor
Per: TypeAlias = Literal["tensor", "sample", "channel"]
SAFE_POWER = 7  # a sum of such powers of float32 values can't overflow in float64


def clamp_measured(
    grad: Tensor, min: Bound | None, max: Bound | None, scale: Bound
) -> tuple[Tensor, Tensor, Tensor]:
    """Clamp the gradient of a loss times `scale`.

    Returns the new gradient, the number of changed values, and the largest magnitude of the
    unscaled gradient.
    """

    def with_torch() -> tuple[Tensor, Tensor, Tensor]:
        low = None if min is None else min * scale
        high = None if max is None else max * scale
        largest = largest_magnitude(grad, min is not None, max is not None)
        clamped, changed = clamp_counted(grad, low, high)
        return clamped, changed, unscaled(largest, scale)

    if isinstance(min, Tensor) or isinstance(max, Tensor) or not _kernels_take(grad):
        return with_torch()

    from .kernels import clamp  # not above, because Triton may be missing

    return launch.or_else(lambda: clamp.clamp(grad, min, max, scale), with_torch)


def _kernels_take(grad: Tensor) -> bool:
    """Return whether kernels are used for this gradient. They take no float64 and nothing empty."""
    return grad.numel() > 0 and grad.dtype is not torch.float64 and launch.takes(grad)


def clamp_counted(grad: Tensor, min: Bound | None, max: Bound | None) -> tuple[Tensor, Tensor]:
    """Clamp a gradient; return the new gradient, and the number of changed values."""
    low = fit(min, grad.dtype)
    high = fit(max, grad.dtype)
    within = grad.clamp(low, high)
    clamped = torch.where(grad.isinf(), grad, within)
    if clamped.dtype != grad.dtype:  # a bound in a tensor promotes a 0-dim gradient
        clamped = clamped.to(grad.dtype)

    changed = (clamped != grad) & ~grad.isnan()
    return clamped, changed.sum()


def fit(bound: Bound | None, dtype: torch.dtype) -> Any:
    """Return a bound within the finite numbers of a type, because torch refuses a larger number.

    A bound in a tensor is returned unchanged, because torch casts a larger tensor to Inf.
    """
    if not isinstance(bound, float):
        return bound
    largest = torch.finfo(dtype).max
    return max(-largest, min(bound, largest))


def largest_magnitude(grad: Tensor, below: bool, above: bool) -> Tensor:
    """Return the largest magnitude; with one bound only, the one on the side of this bound."""
    if grad.numel() == 0:
        return grad  # no magnitude

    lowest, highest = grad.aminmax()
    if below and above:
        return torch.maximum(-lowest, highest)
    towards_bound = -lowest if below else highest
    return towards_bound.clamp_min(0.0)


def unscaled(norms: Tensor, scale: Bound) -> Tensor:
    """Return norms in units of the loss, from norms of a loss that was multiplied by `scale`."""
    if isinstance(scale, Tensor) or scale != 1.0:
        norms = norms.to(wide_dtype(norms.device)) / scale
    return norms


def relative_norms(norms: Tensor, weight_norms: Tensor, eps: float, scale: Bound) -> Tensor:
    """Divide norms of gradients of a loss times `scale` by the norms of the weights.

    The result is that of the unscaled loss. A norm of weights counts as at least `eps`.
    """
    smallest = weight_norms.clamp_min(eps)
    if isinstance(scale, Tensor) or scale != 1.0:
        smallest = smallest * scale
    return norms / smallest


def scale_counted(grad: Tensor, max_norm: Bound, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply a gradient by ``min(max_norm / norm, 1)``.

    Returns the new gradient, and the number of changed values. `norm` is the norm of the gradient,
    of each of its groups, or of a list of gradients.
    """
    over = (norm > max_norm) & norm.isfinite()
    ratio = max_norm / norm.clamp_min(max_norm)
    factor = torch.where(over, ratio, 1.0)

    # two factors, because float32 would round a very small one to 0
    most = factor.clamp_min(1e-30)
    rest = factor / most
    dtype = torch.promote_types(grad.dtype, torch.float32)
    clipped = grad * most.to(dtype) * rest.to(dtype)

    values_of_group = grad.numel() // max(norm.numel(), 1)
    changed = over.sum() * values_of_group
    return clipped.to(grad.dtype), changed


def clip_measured(
    grad: Tensor,
    max_norm: Bound,
    norm_type: float,
    per: Per,
    scale: Bound = 1.0,
    channel_axis: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Clip the gradient of a loss times `scale` by its norm.

    Returns the new gradient, the number of changed values, and the norms of the unscaled gradient.
    """

    def with_torch() -> tuple[Tensor, Tensor, Tensor]:
        norm = group_norm(grad, norm_type, per, channel_axis)
        clipped, changed = scale_counted(grad, max_norm * scale, norm)
        return clipped, changed, unscaled(norm, scale)

    if isinstance(max_norm, Tensor) or norm_type != 2.0 or not _kernels_take(grad):
        return with_torch()

    axis = _axis_of(grad, per, channel_axis)
    try:
        return _clip_kernels()(grad, max_norm, axis, scale)
    except launch.KernelError:
        return with_torch()


@functools.cache  # each parameter clips in each step, and an import takes longer than a lookup
def _clip_kernels() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return the function that clips with kernels."""
    from .kernels.clip import clip

    return clip


def _axis_of(grad: Tensor, per: Per, channel_axis: int) -> int | None:
    """Return the axis whose places have a norm each; None for one norm of the gradient."""
    if per == "tensor" or grad.ndim == 0:
        return None

    axis = 0 if per == "sample" else channel_axis
    if not -grad.ndim <= axis < grad.ndim:
        raise ValueError(f"channel_axis {axis} is not an axis of a {grad.ndim}-D gradient")
    return axis % grad.ndim


def clip_adaptive_measured(
    grad: Tensor, parameter: Tensor, clip_factor: Bound, eps: float, norm_type: float, scale: Bound
) -> tuple[Tensor, Tensor, Tensor]:
    """Clip the gradient of a loss times `scale` by the norms of the weights.

    Returns the new gradient, the number of changed values, and the ratios of the norms of the
    unscaled gradient and of the weights.
    """

    def with_torch() -> tuple[Tensor, Tensor, Tensor]:
        return _clip_adaptive_with_torch(grad, parameter, clip_factor, eps, norm_type, scale)

    value = parameter.detach()
    both_fit = _kernels_take(grad) and _kernels_take(value)
    if isinstance(clip_factor, Tensor) or norm_type != 2.0 or not both_fit:
        return with_torch()

    axis = 0 if grad.ndim > 1 else None
    try:
        return _clip_kernels()(grad, clip_factor, axis, scale, value, eps)
    except launch.KernelError:
        return with_torch()


def _clip_adaptive_with_torch(
    grad: Tensor, parameter: Tensor, clip_factor: Bound, eps: float, norm_type: float, scale: Bound
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `clip_adaptive_measured`, in torch operations."""
    per: Per = "sample" if grad.ndim > 1 else "tensor"  # the units are on axis 0
    weights = group_norm(parameter, norm_type, per, 0)
    scaled_weights = weights.clamp_min(eps) * scale
    largest_norm = clip_factor * scaled_weights

    norm = group_norm(grad, norm_type, per, 0)
    clipped, changed = scale_counted(grad, largest_norm, norm)
    return clipped, changed, norm / scaled_weights


def group_norm(grad: Tensor, norm_type: float, per: Per, channel_axis: int = 1) -> Tensor:
    """Return the norms of the groups, in float64 if the device has it. Reduced axes stay, as 1."""
    wide = wide_dtype(grad.device)
    if grad.numel() == 0:
        return torch.zeros((), dtype=wide, device=grad.device)

    axes = list(range(grad.ndim))
    group = _axis_of(grad, per, channel_axis)
    if group is not None:
        del axes[group]
    if not axes:
        return grad.abs().to(wide)

    norm: Callable[..., Tensor] = functools.partial(
        torch.linalg.vector_norm, dim=axes, keepdim=True, dtype=wide
    )
    if norm_type <= SAFE_POWER and grad.dtype is not torch.float64:
        return norm(grad, norm_type)

    # divided by the largest magnitude, so that no power overflows
    largest = norm(grad, math.inf)
    is_usable = largest.isfinite() & (largest > 0)
    divisor = torch.where(is_usable, largest, 1.0)
    divided = grad.to(wide) / divisor
    return norm(divided, norm_type) * divisor


def check_bounds(min: float | None, max: float | None) -> None:
    """Check the bounds of gradients.

    Raises:
        ValueError: if both bounds are missing, `min` is above `max`, or the only one moves 0.
    """
    if min is None and max is None:
        raise ValueError("min or max must be given")
    if max is None and min is not None and min > 0:
        raise ValueError(_alone("min", min))
    if min is None and max is not None and max < 0:
        raise ValueError(_alone("max", max))
    if min is not None and max is not None and min > max:
        raise ValueError(f"min must be <= max, got min={min:g}, max={max:g}")


def _alone(name: str, bound: float) -> str:
    """Return the message about one bound that moves even a gradient of 0."""
    size = abs(bound)
    return (
        f"{name}={bound:g} without another bound would set each gradient of 0 to {bound:g}: write "
        f"two bounds, min={-size:g} and max={size:g}"
    )


def check_norm(norm_type: float, per: str) -> float:
    """Check the options of a norm, and return its order as a float.

    Raises:
        TypeError: if `norm_type` is no number.
        ValueError: if `norm_type` is not above 0, or `per` has no allowed value.
    """
    kind = "a number, or float('inf')"
    if norm_type != math.inf and as_number("norm_type", norm_type, kind) <= 0:
        raise ValueError(f"norm_type must be > 0 or inf, got {norm_type}")
    check_option("per", per, get_args(Per))
    return float(norm_type)


def clamp_grad(grad: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Clamps each finite value to [min, max]; Inf and NaN pass.

    Example:
        >>> clamp_grad(torch.tensor([-3.0, 0.5, 2.0, float("inf")]), -1.0, 1.0)
        tensor([-1.0000,  0.5000,  1.0000,     inf])

    Args:
        grad: a gradient of any shape.
        min: lower bound, any number; None for no bound.
        max: upper bound, any number >= `min`; None for no bound. One of the two is needed.

    Raises:
        TypeError: if a bound is no number.
        ValueError: if an argument is outside its range, both bounds are missing, `min` is above
            `max`, or the only bound moves a gradient of 0.
    """
    low = None if min is None else as_number("min", min)
    high = None if max is None else as_number("max", max)
    check_bounds(low, high)
    if _kernels_take(grad):
        return clamp_measured(grad, low, high, 1.0)[0]
    return clamp_counted(grad, low, high)[0]  # without the search for the largest magnitude


def clip_grad_norm(
    grad: Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    per: Per = "tensor",
    channel_axis: int = 1,
) -> Tensor:
    """Scales a gradient with a larger norm down to a norm of `max_norm`.

    As ``torch.nn.utils.clip_grad_norm_``, but on one tensor, without changing it. The norm is taken
    in float64. A norm that is not finite passes.

    Example:
        >>> clip_grad_norm(torch.tensor([3.0, 4.0]), 1.0)
        tensor([0.6000, 0.8000])

    Args:
        grad: a gradient, (N, C, ...) for samples and channels.
        max_norm: largest norm, in the unit of the gradient, a number > 0.
        norm_type: order of the norm, above 0; inf allowed.
        per: one norm for the whole ``"tensor"``, for each ``"sample"`` (axis 0) or for each
            ``"channel"`` (over samples and space).
        channel_axis: the axis of the channels.

    Raises:
        TypeError: if a number has a wrong type.
        ValueError: if an argument is outside its range, or `channel_axis` is no axis of `grad`.

    Reference:
        Pascanu et al., 2013 (https://arxiv.org/abs/1211.5063).
    """
    limit = as_number("max_norm", max_norm, allowed=POSITIVE)
    order = check_norm(norm_type, per)
    clipped, _, _ = clip_measured(grad, limit, order, per, channel_axis=channel_axis)
    return clipped


def adaptive_clip_grad(
    grad: Tensor,
    parameter: Tensor,
    clip_factor: float = 0.01,
    eps: float = 1e-3,
    norm_type: float = 2.0,
) -> Tensor:
    """Scales the gradient of each unit down to ``clip_factor * max(norm of its weights, eps)``.

    A unit is an element of axis 0, such as an output of a convolution; a bias is one unit. Norms
    are taken in float64. A norm that is not finite passes.

    Example:
        >>> adaptive_clip_grad(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 10.0]]))
        tensor([[0.0600, 0.0800]])

    Args:
        grad: the gradient of a parameter.
        parameter: the parameter, of the same shape.
        clip_factor: largest ratio of the norms, a number > 0.
        eps: least norm of weights, above 0, so that zero weights can learn.
        norm_type: order of the norm, above 0; inf allowed.

    Raises:
        TypeError: if a number has a wrong type.
        ValueError: if an argument is outside its range, or the shapes differ.

    Reference:
        Brock et al., 2021 (https://arxiv.org/abs/2102.06171), section 4.
    """
    factor = as_number("clip_factor", clip_factor, allowed=POSITIVE)
    eps = as_number("eps", eps, allowed=POSITIVE)
    order = check_norm(norm_type, "tensor")
    if grad.shape != parameter.shape:
        shapes = f"{tuple(grad.shape)} and {tuple(parameter.shape)}"
        raise ValueError(f"grad and parameter must have one shape, got {shapes}")

    clipped, _, _ = clip_adaptive_measured(grad, parameter, factor, eps, order, 1.0)
    return clipped


def centralize_grad(grad: Tensor) -> Tensor:
    """Subtracts from a gradient the mean of each row, over all axes but the first.

    The mean is taken in at least float32. Rows with one value, as of a bias, are left unchanged.

    Example:
        >>> centralize_grad(torch.tensor([[1.0, 3.0]]))
        tensor([[-1.,  1.]])

    Args:
        grad: a gradient of any shape.

    Reference:
        Yong et al., 2020 (https://arxiv.org/abs/2004.01461).
    """
    if grad.ndim < 2 or grad.numel() <= grad.shape[0]:
        return grad

    axes = list(range(1, grad.ndim))
    wide = torch.promote_types(grad.dtype, torch.float32)
    mean = grad.mean(axes, keepdim=True, dtype=wide)
    return (grad - mean).to(grad.dtype)
