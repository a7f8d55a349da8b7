"""DropBlock: drops square blocks of a feature map.

A seed drops the whole block that begins there. Each position where a whole block fits is a seed
with the chance γ (see ``gamma``).
"""

import operator
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import check_block_size, check_option
from ..registry import described_in
from .gamma import Calibration, gamma_of
from .masks import Mask, bernoulli, check_call, count_ratio, keep_scale
from .sparse import Blocks, drop_drawn, grow, once, takes

Normalize: TypeAlias = Literal["batch", "sample", "expected", None]


def drop_blocks(
    x: Tensor,
    p: float,
    edges: Sequence[int],
    calibration: Calibration,
    normalize: Normalize,
    share_channels: bool,
    inplace: bool = False,
    eps: float = 1e-6,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | int]:
    """DropBlock with checked arguments, and the number of dropped elements."""
    if p == 0.0 or x.numel() == 0:
        return x, 0
    places, drawn = draw_blocks(x, p, edges, calibration, share_channels, generator)
    dropped = places.count(drawn)
    scale: Any = keep_scale(p) if normalize == "expected" else None
    if normalize == "batch":
        scale = count_ratio(x.numel(), x.numel() - dropped, eps)
    elif normalize == "sample":
        places, drawn = Mask(x.numel()), places.mask(drawn)
        per_sample, total = drawn.flatten(1).sum(1) * (x.shape[1] // drawn.shape[1]), x[0].numel()
        scale = count_ratio(total, total - per_sample, eps)
        scale = scale.view(-1, *[1] * (x.ndim - 1))
    y = drop_drawn(x, scale, places, drawn)
    return x.copy_(y) if inplace else y, dropped


def draw_blocks(
    x: Tensor,
    p: float,
    edges: Sequence[int],
    calibration: Calibration,
    share_channels: bool,
    generator: torch.Generator | None,
) -> tuple[Blocks | Mask, Tensor]:
    """Draw the blocks of a tensor (N, C, ...): the object that applies them, and the drawn mask."""
    size = tuple(map(operator.index, x.shape[2:]))  # a compiled program has one map size
    block = tuple(map(min, size, edges))
    gamma = gamma_of(p, size, block, calibration)
    if takes(x):
        blocks = Blocks(x, (1, x.shape[1] if share_channels else 1, *block))
        return once(lambda: (blocks, blocks.draw(gamma, generator)))
    # no branch on a value from here on: torch.export traces it for any batch size
    shape = [x.shape[0], 1 if share_channels else x.shape[1]]
    borders: list[int] = []
    for s, b in zip(size, block, strict=True):
        shape.append(s - b + 1)
        borders[:0] = (b - 1, b - 1)  # `pad` begins with the last axis
    mask = bernoulli(shape, gamma, x.device, generator)
    return Mask(x.numel()), grow(pad(mask, borders), block, first=2)


def _public(
    spatial: int,
    input: Tensor,
    p: float,
    block_size: int | Sequence[int],
    training: bool,
    options: tuple[Calibration, Normalize, bool, bool, float, torch.Generator | None],
) -> Tensor:
    p = check_call(input, p, training, spatial)
    edges = check_block_size(block_size, spatial)
    check_option("calibration", options[0], get_args(Calibration))
    check_option("normalize", options[1], get_args(Normalize))
    return drop_blocks(input, p, edges, *options)[0]


def drop_block2d(
    input: Tensor,
    p: float,
    block_size: int | Sequence[int],
    inplace: bool = False,
    eps: float = 1e-6,
    training: bool = True,
    *,
    calibration: Calibration = "exact",
    normalize: Normalize = "batch",
    share_channels: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """DropBlock on feature maps (N, C, H, W): zeroes blocks, and scales the rest.

    A replacement for ``torchvision.ops.drop_block2d``. The expected dropped share is p on every map
    and block size. Inf and NaN under a block disappear. With p = 0 or in evaluation, `input` itself
    is returned and no random number is drawn.

    Example:
        >>> x = torch.ones(8, 16, 14, 14)
        >>> y = drop_block2d(x, 0.2, 5)
        >>> sorted(set((y / y.max()).flatten().tolist()))
        [0.0, 1.0]

    Args:
        input: floating-point tensor, of the shape that the function is for. Its memory format is
            kept.
        p: share of the elements to drop or distort, in [0, 1].
        block_size: edge of the block in elements, at least 1, or one edge for each spatial axis. A
            block larger than the map is clipped.
        inplace: write the result into `input`.
        eps: smallest number of kept elements that the count ratio divides by.
        training: False returns `input`.
        calibration: ``"exact"`` realizes p, ``"paper"`` uses the γ of the paper, which drops less;
            see `block_gamma`.
        normalize: factor of the kept elements: ``"batch"`` all / kept elements of the batch (the
            paper), ``"sample"`` the same for each sample, ``"expected"`` 1 / (1 - p), None no
            factor.
        share_channels: True draws one set of blocks for all channels of a sample.
        generator: source of random numbers; torch's global one by default.

    Reference:
        Ghiasi, Lin and Le, 2018 (https://arxiv.org/abs/1810.12890).
    """
    options = (calibration, normalize, share_channels, inplace, eps, generator)
    return _public(2, input, p, block_size, training, options)


@described_in(drop_block2d)
def drop_block1d(
    input: Tensor,
    p: float,
    block_size: int | Sequence[int],
    inplace: bool = False,
    eps: float = 1e-6,
    training: bool = True,
    *,
    calibration: Calibration = "exact",
    normalize: Normalize = "batch",
    share_channels: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """As `drop_block2d`, for sequences (N, C, L).

    Example:
        >>> drop_block1d(torch.ones(2, 8, 100), 0.1, 3).shape
        torch.Size([2, 8, 100])
    """
    options = (calibration, normalize, share_channels, inplace, eps, generator)
    return _public(1, input, p, block_size, training, options)


@described_in(drop_block2d)
def drop_block3d(
    input: Tensor,
    p: float,
    block_size: int | Sequence[int],
    inplace: bool = False,
    eps: float = 1e-6,
    training: bool = True,
    *,
    calibration: Calibration = "exact",
    normalize: Normalize = "batch",
    share_channels: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """As `drop_block2d`, for volumes and video (N, C, D, H, W).

    Example:
        >>> drop_block3d(torch.ones(2, 8, 4, 8, 8), 0.1, 3).shape
        torch.Size([2, 8, 4, 8, 8])
    """
    options = (calibration, normalize, share_channels, inplace, eps, generator)
    return _public(3, input, p, block_size, training, options)
