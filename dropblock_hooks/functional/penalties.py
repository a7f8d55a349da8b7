"""Penalties: numbers that are added to the loss, and their gradients.

The public functions return the penalty, which autograd differentiates. The ``*_gradient`` functions
return the gradient and the penalty, without autograd. They compute in at least float32.
"""

import torch
from torch import Tensor

from ..checks import check_floating


def z_loss(input: Tensor, dim: int = -1) -> Tensor:
    """The mean of the squared log-partition of logits; keeps them from growing.

    Example:
        >>> round(float(z_loss(torch.zeros(4, 10))), 4)  # log(10) ** 2
        5.3019

    Args:
        input: floating-point tensor of logits.
        dim: the axis of the classes or experts, an integer in [-n, n) for n axes.

    Reference:
        Zoph et al., 2022, "ST-MoE", equation 5 (https://arxiv.org/abs/2202.08906), for routers;
        Chowdhery et al., 2022, "PaLM", section 5 (https://arxiv.org/abs/2204.02311), for logits.
    """
    check_floating(input)
    _check_dim(input, dim)
    return wide(input).logsumexp(dim).square().mean()


def z_loss_gradient(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of `z_loss`, and its value."""
    _check_dim(x, dim)
    logits = wide(x)
    log_partition = logits.logsumexp(dim, keepdim=True)
    value = log_partition.square().mean()

    softmax = (logits - log_partition).exp()
    gradient = softmax * (log_partition * (2.0 / max(log_partition.numel(), 1)))
    return gradient, value


def activity_l1(input: Tensor) -> Tensor:
    """The mean magnitude of an activation; makes it sparse.

    Example:
        >>> activity_l1(torch.tensor([-1.0, 0.0, 4.0, 1.0]))
        tensor(1.5000)

    Args:
        input: floating-point tensor of any shape.

    Reference:
        Glorot, Bordes and Bengio, 2011, "Deep Sparse Rectifier Neural Networks"
        (https://proceedings.mlr.press/v15/glorot11a.html).
    """
    check_floating(input)
    return wide(input).abs().mean()


def activity_l1_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of `activity_l1`, and its value."""
    activation = wide(x)
    gradient = activation.sign() / max(x.numel(), 1)
    return gradient, activation.abs().mean()


def activity_l2(input: Tensor) -> Tensor:
    """The mean square of an activation; keeps it small.

    Example:
        >>> activity_l2(torch.tensor([-1.0, 0.0, 4.0, 1.0]))
        tensor(4.5000)

    Args:
        input: floating-point tensor of any shape.

    Reference:
        Merity, McCann and Socher, 2017, "Revisiting Activation Regularization for Language RNNs"
        (https://arxiv.org/abs/1708.01009).
    """
    check_floating(input)
    return wide(input).square().mean()


def activity_l2_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of `activity_l2`, and its value."""
    activation = wide(x)
    gradient = activation * (2.0 / max(x.numel(), 1))
    return gradient, activation.square().mean()


def l2_sp(parameter: Tensor, start: Tensor) -> Tensor:
    """Half the squared distance of a parameter from its value at the start of a training.

    Example:
        >>> l2_sp(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
        tensor(2.)

    Args:
        parameter: floating-point tensor of any shape.
        start: the value at the start, of the same shape.

    Reference:
        Li, Grandvalet and Davoine, 2018, "Explicit Inductive Bias for Transfer Learning with
        Convolutional Networks", equation 3 (https://arxiv.org/abs/1802.01483).
    """
    check_floating(parameter)
    if parameter.shape != start.shape:
        shapes = f"{tuple(start.shape)} and {tuple(parameter.shape)}"
        raise ValueError(f"start and parameter must have the same shape, got {shapes}")
    return (wide(parameter) - wide(start)).square().sum() / 2


def l2_sp_gradient(parameter: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of `l2_sp`, and its value."""
    difference = wide(parameter) - wide(start)
    return difference, difference.square().sum() / 2


def _check_dim(x: Tensor, dim: int) -> None:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim={dim} is not an axis of a tensor of shape {tuple(x.shape)}")


def wide(x: Tensor) -> Tensor:
    """Return the tensor in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def add_gradient(grad: Tensor, gradient: Tensor, weight: float | Tensor) -> Tensor:
    """``grad + weight * gradient``, rounded once to the type of `grad`."""
    if isinstance(weight, Tensor):
        total = wide(grad) + gradient * weight
    else:
        total = wide(grad).add(gradient, alpha=weight)  # one kernel in place of two
    return total.to(grad.dtype)
