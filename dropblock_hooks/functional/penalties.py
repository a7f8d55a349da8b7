"""Penalties: numbers that are added to the loss, and their gradients.

    penalty                     its gradient
    mean(logsumexp(x) ** 2)     2 / n * logsumexp(x) * softmax(x)      z_loss, for n rows of logits
    mean(|x|)                   sign(x) / n                            activity_l1
    mean(x ** 2)                2 / n * x                              activity_l2
    sum((w - w0) ** 2) / 2      w - w0                                 l2_sp

The public functions return the penalty, which autograd differentiates. The ``*_gradient`` functions
return the gradient in closed form, and the penalty. The classes of penalties call them in the
backward, and add the gradient with `add_gradient`. All of them compute in at least float32.
"""

from typing import TypeAlias

import torch
from torch import Tensor

from ..checks import check_floating

GradientAndPenalty: TypeAlias = tuple[Tensor, Tensor]
"""The gradient of a penalty, and the penalty itself."""


def z_loss(input: Tensor, dim: int = -1) -> Tensor:
    """Return the mean of the squared log-partition of logits, a penalty on large logits.

    Example:
        >>> round(float(z_loss(torch.zeros(4, 10))), 4)  # log(10) ** 2
        5.3019

    Args:
        input: floating-point tensor of logits, of any shape.
        dim: the axis of the classes or experts, an integer in [-n, n) for n axes.

    Raises:
        TypeError: if `input` is no floating-point tensor.
        ValueError: if `dim` is no axis of `input`.

    Reference:
        Zoph et al., 2022, "ST-MoE", equation 5 (https://arxiv.org/abs/2202.08906), for routers;
        Chowdhery et al., 2022, "PaLM", section 5 (https://arxiv.org/abs/2204.02311), for logits.
    """
    check_floating(input)
    _check_dim(input, dim)
    logits = wide(input)
    log_partition = logits.logsumexp(dim)
    return log_partition.square().mean()


def z_loss_gradient(x: Tensor, dim: int) -> GradientAndPenalty:
    """Return the gradient of `z_loss`, and its value.

    Raises:
        ValueError: if `dim` is no axis of `x`.
    """
    _check_dim(x, dim)
    logits = wide(x)
    log_partition = logits.logsumexp(dim, keepdim=True)
    value = log_partition.square().mean()

    n_rows = max(log_partition.numel(), 1)  # an empty tensor has none
    slope = log_partition * (2.0 / n_rows)
    softmax = (logits - log_partition).exp()
    gradient = softmax * slope
    return gradient, value


def activity_l1(input: Tensor) -> Tensor:
    """Return the mean magnitude of an activation, a penalty that makes it sparse.

    Example:
        >>> activity_l1(torch.tensor([-1.0, 0.0, 4.0, 1.0]))
        tensor(1.5000)

    Args:
        input: floating-point tensor of any shape.

    Raises:
        TypeError: if `input` is no floating-point tensor.

    Reference:
        Glorot, Bordes and Bengio, 2011, "Deep Sparse Rectifier Neural Networks"
        (https://proceedings.mlr.press/v15/glorot11a.html).
    """
    check_floating(input)
    activation = wide(input)
    return activation.abs().mean()


def activity_l1_gradient(x: Tensor) -> GradientAndPenalty:
    """Return the gradient of `activity_l1`, and its value."""
    activation = wide(x)
    value = activation.abs().mean()

    n_elements = max(x.numel(), 1)  # an empty tensor has none
    gradient = activation.sign() / n_elements
    return gradient, value


def activity_l2(input: Tensor) -> Tensor:
    """Return the mean square of an activation, a penalty that keeps it small.

    Example:
        >>> activity_l2(torch.tensor([-1.0, 0.0, 4.0, 1.0]))
        tensor(4.5000)

    Args:
        input: floating-point tensor of any shape.

    Raises:
        TypeError: if `input` is no floating-point tensor.

    Reference:
        Merity, McCann and Socher, 2017, "Revisiting Activation Regularization for Language RNNs"
        (https://arxiv.org/abs/1708.01009).
    """
    check_floating(input)
    activation = wide(input)
    return activation.square().mean()


def activity_l2_gradient(x: Tensor) -> GradientAndPenalty:
    """Return the gradient of `activity_l2`, and its value."""
    activation = wide(x)
    value = activation.square().mean()

    n_elements = max(x.numel(), 1)  # an empty tensor has none
    gradient = activation * (2.0 / n_elements)
    return gradient, value


def l2_sp(parameter: Tensor, start: Tensor) -> Tensor:
    """Return half the squared distance of a parameter from its value at the start.

    Example:
        >>> l2_sp(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
        tensor(2.)

    Args:
        parameter: floating-point tensor of any shape.
        start: the value at the start of the training, of the same shape.

    Raises:
        TypeError: if `parameter` is no floating-point tensor.
        ValueError: if the shapes differ.

    Reference:
        Li, Grandvalet and Davoine, 2018, "Explicit Inductive Bias for Transfer Learning with
        Convolutional Networks", equation 3 (https://arxiv.org/abs/1802.01483).
    """
    check_floating(parameter)
    if parameter.shape != start.shape:
        shapes = f"{tuple(start.shape)} and {tuple(parameter.shape)}"
        raise ValueError(f"start and parameter must have the same shape, got {shapes}")
    _, value = l2_sp_gradient(parameter, start)
    return value


def l2_sp_gradient(parameter: Tensor, start: Tensor) -> GradientAndPenalty:
    """Return the gradient of `l2_sp`, and its value."""
    difference = wide(parameter) - wide(start)
    squared_distance = difference.square().sum()
    return difference, squared_distance / 2


def _check_dim(x: Tensor, dim: int) -> None:
    """Raise ValueError for a `dim` that is no axis of a tensor."""
    if not -x.ndim <= dim < x.ndim:
        shape = tuple(x.shape)
        raise ValueError(f"dim={dim} is not an axis of a tensor of shape {shape}")


def wide(x: Tensor) -> Tensor:
    """Return the tensor in at least float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype)


def add_gradient(grad: Tensor, penalty_gradient: Tensor, weight: float | Tensor) -> Tensor:
    """Return ``grad + weight * penalty_gradient``, rounded once to the type of `grad`.

    The weight is a tensor if it is a rate in compiled code, or has the factor of the loss in it.
    """
    total = wide(grad)
    if isinstance(weight, Tensor):
        total = total + penalty_gradient * weight
    else:
        total = total.add(penalty_gradient, alpha=weight)  # one kernel in place of two
    return total.to(grad.dtype)
