"""Gaussian noise: added, multiplied, or (Disout) added in the blocks of DropBlock."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import NON_NEGATIVE, as_number, check_block_size, check_floating
from ..registry import described_in
from .dropblock import draw_blocks, drop_block2d
from .dropout import dropout
from .masks import check_call, in_format_of


def add_noise(x: Tensor, std: float | Tensor, generator: torch.Generator | None = None) -> Tensor:
    """`x` plus normal noise. A 0-dim tensor `std` is never read."""
    if not isinstance(std, Tensor) and std == 0.0:
        return x
    return (x + _normal_like(x, std, generator)).to(x.dtype)


def multiply_noise(x: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """`x` times normal noise of mean 1 and variance p / (1 - p)."""
    if p == 0.0:
        return x
    noise = _normal_like(x, (p / (1 - p)) ** 0.5, generator)
    return (x * (noise + 1.0)).to(x.dtype)


def _normal_like(
    x: Tensor, std: float | Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Normal noise, drawn in row-major order in at least float32; in the memory format of `x`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    noise = torch.empty(x.shape, dtype=dtype, device=x.device).normal_(generator=generator)
    return in_format_of(x, noise * std)


@described_in(dropout)
def gaussian_noise(
    input: Tensor, std: float, training: bool = True, *, generator: torch.Generator | None = None
) -> Tensor:
    """Adds zero-mean normal noise of standard deviation `std`; otherwise as `dropout`.

    Example:
        >>> gaussian_noise(torch.zeros(1000), 0.1).std() < 0.2
        tensor(True)

    Args:
        std: standard deviation in the units of the tensor, a number >= 0.

    Reference:
        Bishop, 1995, "Training with Noise is Equivalent to Tikhonov Regularization".
    """
    std = as_number("std", std, allowed=NON_NEGATIVE)
    if not training:
        return input
    check_floating(input)
    return add_noise(input, std, generator)


@described_in(dropout)
def gaussian_dropout(
    input: Tensor, p: float, training: bool = True, *, generator: torch.Generator | None = None
) -> Tensor:
    """As `dropout`, but multiplies by normal noise of mean 1 and variance p / (1 - p), p below 1.

    Example:
        >>> gaussian_dropout(torch.ones(1000), 0.2).std() < 1
        tensor(True)

    Args:
        p: sets the variance of the noise to p / (1 - p), a number in [0, 1).

    Reference:
        Srivastava et al., 2014, section 10 (https://jmlr.org/papers/v15/srivastava14a.html).
    """
    rate = check_call(input, p, training)
    if p == 1:
        raise ValueError("p must be in [0, 1), got 1")
    return multiply_noise(input, rate, generator)


def distort_blocks(
    x: Tensor,
    p: float,
    edges: Sequence[int],
    alpha: float,
    share_channels: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | int]:
    """Disout with checked arguments, and the number of distorted elements."""
    if p == 0.0 or alpha == 0.0 or x.numel() == 0:
        return x, 0
    places, drawn = draw_blocks(x, p, edges, "exact", share_channels, generator)
    spread = x.detach().to(torch.promote_types(x.dtype, torch.float32)).std(correction=0)
    noise = _normal_like(x, alpha * spread, generator)
    y = (x + noise.masked_fill_(~places.mask(drawn), 0.0)).to(x.dtype)
    return y, places.count(drawn)


@described_in(drop_block2d)
def disout(
    input: Tensor,
    p: float,
    block_size: int | Sequence[int],
    alpha: float = 1.0,
    training: bool = True,
    *,
    share_channels: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Adds noise to blocks of feature maps (N, C, H, W).

    Returns ``input + m * alpha * std(input) * z``. m is 1 in blocks as of `drop_block2d` and 0
    elsewhere; z is standard normal for each element. The standard deviation of the whole tensor is
    a constant to autograd, so the gradient passes unchanged. Inf or NaN in `input` make every
    distorted element NaN.

    The authors scale the noise by weights of the next layer, which a hook does not have; `alpha`
    takes their place. Their code replaces the features by noise and scales the rest.

    Example:
        >>> x = torch.randn(8, 16, 14, 14)
        >>> y = disout(x, 0.2, 5)
        >>> 0.1 < (y != x).float().mean() < 0.3
        tensor(True)

    Args:
        alpha: strength of the noise in standard deviations of the tensor, a number >= 0.

    Reference:
        Tang et al., 2020 (https://arxiv.org/abs/2002.11022); https://github.com/huawei-noah/Disout.
    """
    p = check_call(input, p, training, 2)
    alpha = as_number("alpha", alpha, allowed=NON_NEGATIVE)
    edges = check_block_size(block_size, 2)
    return distort_blocks(input, p, edges, alpha, share_channels, generator)[0]
