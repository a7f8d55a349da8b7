"""Gradients of parameters: bounded by the norm of the weights, and of mean zero."""

import torch
from torch import Tensor

from ..checks import as_number
from .gradients import Bound, Per, check_norm, group_norm, scale_counted


def clip_adaptive_counted(
    grad: Tensor, parameter: Tensor, clip_factor: Bound, eps: float, norm_type: float, scale: Bound
) -> tuple[Tensor, Tensor, Tensor]:
    """Adaptive clipping of the gradient of a loss times `scale`.

    Returns:
        The new gradient, the number of changed values, and the ratios of the norms.
    """
    per: Per = "sample" if grad.ndim > 1 else "tensor"
    unit = group_norm(parameter, norm_type, per, 0).clamp_min(eps) * scale
    norm = group_norm(grad, norm_type, per, 0)
    return *scale_counted(grad, clip_factor * unit, norm), norm / unit


def without_mean(grad: Tensor) -> Tensor:
    """`grad` minus the mean of each row, over all axes but the first."""
    if grad.ndim < 2 or grad.numel() <= grad.shape[0]:
        return grad
    axes = list(range(1, grad.ndim))
    mean = grad.mean(axes, keepdim=True, dtype=torch.promote_types(grad.dtype, torch.float32))
    return (grad - mean).to(grad.dtype)


def adaptive_clip_grad(
    grad: Tensor,
    parameter: Tensor,
    clip_factor: float = 0.01,
    eps: float = 1e-3,
    norm_type: float = 2.0,
) -> Tensor:
    """Scales the gradient of each unit down to a share of the norm of that unit's weights.

    A unit is an element of axis 0: an output of a linear layer or of a convolution. A tensor of one
    axis, such as a bias, is one unit. A gradient norm above ``clip_factor * max(norm of the
    weights, eps)`` is scaled down to it. Norms are taken in float64; those that are not finite
    pass.

    Example:
        >>> adaptive_clip_grad(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 10.0]]))
        tensor([[0.0600, 0.0800]])

    Args:
        grad: the gradient of a parameter, of any shape.
        parameter: the parameter, of the same shape.
        clip_factor: largest ratio of the norms, above 0.
        eps: least norm that weights count with, above 0: that of zeros would stop all learning.
        norm_type: order of the norm; inf allowed.

    Raises:
        ValueError: for clip_factor, eps or norm_type not above 0, or another shape.

    Reference:
        Brock et al., 2021, "High-Performance Large-Scale Image Recognition Without Normalization"
        (https://arxiv.org/abs/2102.06171), section 4.
    """
    factor = as_number("clip_factor", clip_factor)
    if factor <= 0:
        raise ValueError(f"clip_factor must be > 0, got {factor}")
    order = check_norm(norm_type, "tensor")
    if grad.shape != parameter.shape:
        raise ValueError(
            f"grad and parameter must have one shape, got {tuple(grad.shape)} and "
            f"{tuple(parameter.shape)}"
        )
    return clip_adaptive_counted(grad, parameter, factor, check_eps(eps), order, 1.0)[0]


def centralize_grad(grad: Tensor) -> Tensor:
    """Subtracts from a gradient the mean of each row, over all axes but the first.

    A gradient whose rows have one value, such as that of a bias, is returned as it is. The mean is
    taken in at least float32.

    Example:
        >>> centralize_grad(torch.tensor([[1.0, 3.0], [5.0, 6.0]]))
        tensor([[-1.0000,  1.0000],
                [-0.5000,  0.5000]])

    Args:
        grad: the gradient of a parameter, (out, ...).

    Reference:
        Yong et al., 2020, "Gradient Centralization: A New Optimization Technique for Deep Neural
        Networks" (https://arxiv.org/abs/2004.01461).
    """
    return without_mean(grad)


def check_eps(eps: float) -> float:
    """The least norm of weights, as a float."""
    eps = as_number("eps", eps)
    if eps <= 0:
        raise ValueError(f"eps must be > 0, got {eps}")
    return eps
