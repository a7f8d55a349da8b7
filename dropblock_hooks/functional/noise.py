"""Noise: additive and multiplicative."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..schedules import as_number
from .masks import check_floating


def _normal_like(x: Tensor, std: float, generator: torch.Generator | None) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x, dtype=dtype).normal_(0.0, std, generator=generator)


def gaussian_noise(
    input: Tensor,
    std: float,
    training: bool = True,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Adds zero-mean normal noise.

    Example:
        >>> gaussian_noise(torch.zeros(1000), 0.1).std() < 0.2
        tensor(True)

    Args:
        input: floating-point tensor of any shape.
        std: standard deviation of the noise, in the unit of `input`, at least 0.
        training: False returns `input`.
        generator: source of random numbers; torch's global one by default.
    """
    std = as_number("std", std)
    if std < 0:
        raise ValueError(f"std must be >= 0, got {std}")
    if not training or std == 0.0:
        return input
    check_floating(input)
    return (input + _normal_like(input, std, generator)).to(input.dtype)


def gaussian_dropout(
    input: Tensor,
    p: float,
    training: bool = True,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Multiplies by normal noise of mean 1 and variance p / (1 - p), as dropout of p has.

    Example:
        >>> gaussian_dropout(torch.ones(1000), 0.2).std() < 1
        tensor(True)

    Args:
        input: floating-point tensor of any shape.
        p: the rate of the dropout with the same variance, in [0, 1).
        training: False returns `input`.
        generator: source of random numbers; torch's global one by default.

    Reference:
        Srivastava et al., 2014, section 10 (https://jmlr.org/papers/v15/srivastava14a.html).
    """
    p = as_number("p", p)
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p must be in [0, 1), got {p}")
    if not training or p == 0.0:
        return input
    check_floating(input)
    noise = _normal_like(input, math.sqrt(p / (1 - p)), generator).add_(1.0)
    return (input * noise).to(input.dtype)
