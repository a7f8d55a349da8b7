"""Disout: adds noise in the blocks of DropBlock."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import as_number
from .dropblock import draw_blocks
from .gamma import check_block_size
from .masks import check_call
from .noise import normal_like


def distort_blocks(
    x: Tensor,
    p: float,
    edges: Sequence[int],
    alpha: float,
    *,
    share_channels: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | int]:
    """Disout with checked arguments, and the number of distorted elements."""
    if p == 0.0 or alpha == 0.0 or x.numel() == 0:
        return x, 0
    places, drawn = draw_blocks(x, p, edges, "exact", share_channels, generator)
    spread = x.detach().to(torch.promote_types(x.dtype, torch.float32)).std(correction=0)
    noise = normal_like(x, alpha * spread, generator)
    # -0.0 where nothing is added: adding 0.0 would change -0.0
    y = (x + noise.masked_fill_(~places.mask(drawn), -0.0)).to(x.dtype)
    return y, places.count(drawn)


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
    elsewhere; z is standard normal for each element. The standard deviation is that of the whole
    tensor. It is a constant to autograd, so the gradient passes unchanged. Inf or NaN anywhere in
    `input` stay in place and make every distorted element NaN. `alpha` is at least 0. The other
    arguments are those of `drop_block2d`. `share_channels` shares the blocks, never the noise.

    The authors scale the noise by weights of the next layer, which a hook does not have; `alpha`
    takes their place. Their code replaces the features by noise and scales everything by all / kept
    elements; this function adds the noise.

    Example:
        >>> x = torch.randn(8, 16, 14, 14)
        >>> y = disout(x, 0.2, 5)
        >>> 0.1 < (y != x).float().mean() < 0.3
        tensor(True)
        >>> disout(x, 0.2, 5, training=False) is x
        True

    Reference:
        Tang et al., 2020, "Beyond dropout: Feature map distortion to regularize deep neural
        networks" (https://arxiv.org/abs/2002.11022); https://github.com/huawei-noah/Disout.
    """
    p = check_call(input, p, training, 2)
    alpha = as_number("alpha", alpha)
    if alpha < 0:
        raise ValueError(f"alpha must be >= 0, got {alpha}")
    edges = check_block_size(block_size, 2)
    return distort_blocks(
        input, p, edges, alpha, share_channels=share_channels, generator=generator
    )[0]
