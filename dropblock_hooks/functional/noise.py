"""Gaussian noise, added or multiplied."""

import torch
from torch import Tensor

from ..checks import as_number, check_floating
from .masks import check_call, in_format_of


def add_noise(x: Tensor, std: float | Tensor, generator: torch.Generator | None = None) -> Tensor:
    """`x` plus normal noise, drawn in at least float32. A 0-dim tensor `std` is never read."""
    if not isinstance(std, Tensor) and std == 0.0:
        return x
    return (x + normal_like(x, std, generator)).to(x.dtype)


def multiply_noise(x: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """`x` times normal noise of mean 1 and variance p / (1 - p)."""
    if p == 0.0:
        return x
    noise = normal_like(x, (p / (1 - p)) ** 0.5, generator)
    return (x * (noise + 1.0)).to(x.dtype)


def normal_like(x: Tensor, std: float | Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Normal noise of mean 0, drawn in at least float32, in the memory format of `x`.

    It is drawn in row-major order: an activation and its gradient may have other memory formats.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    noise = torch.empty(x.shape, dtype=dtype, device=x.device).normal_(generator=generator)
    return in_format_of(x, noise * std)


def gaussian_noise(
    input: Tensor,
    std: float,
    training: bool = True,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Adds zero-mean normal noise of standard deviation `std`, at least 0; otherwise as `dropout`.

    Example:
        >>> gaussian_noise(torch.zeros(1000), 0.1).std() < 0.2
        tensor(True)
    """
    std = as_number("std", std)
    if std < 0:
        raise ValueError(f"std must be >= 0, got {std}")
    if not training:
        return input
    check_floating(input)
    return add_noise(input, std, generator)


def gaussian_dropout(
    input: Tensor,
    p: float,
    training: bool = True,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """As `dropout`, but multiplies by normal noise of mean 1 and variance p / (1 - p), p below 1.

    Example:
        >>> gaussian_dropout(torch.ones(1000), 0.2).std() < 1
        tensor(True)

    Reference:
        Srivastava et al., 2014, section 10 (https://jmlr.org/papers/v15/srivastava14a.html).
    """
    rate = check_call(input, p, training)
    if p == 1:
        raise ValueError("p must be in [0, 1), got 1")
    return multiply_noise(input, rate, generator)
