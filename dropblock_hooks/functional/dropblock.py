"""DropBlock: drops square blocks of a feature map (Ghiasi, Lin and Le, 2018, arXiv:1810.12890).

γ is the chance of each position to be a seed; a seed drops the whole block that begins there, and
seeds fall only where the whole block fits. ``block_gamma`` solves for the γ at which the expected
dropped share is exactly p.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..schedules import as_count, as_number
from .masks import (
    bernoulli,
    check_floating,
    check_probability,
    check_spatial,
    count_ratio,
    drop,
    keep_scale,
)

Calibration: TypeAlias = Literal["exact", "paper"]
Normalize: TypeAlias = Literal["batch", "sample", "expected"] | None


def check_block_size(block_size: int | Sequence[int], spatial: int) -> tuple[int, ...]:
    """One block edge per spatial axis."""
    if isinstance(block_size, list | tuple):
        if len(block_size) != spatial:
            raise ValueError(
                f"block_size must be an integer or {spatial} of them (one per spatial axis), "
                f"got {tuple(block_size)}"
            )
        return tuple(as_count("block_size", b) for b in block_size)
    return (as_count("block_size", block_size),) * spatial


def check_calibration(calibration: str) -> None:
    """Raise ValueError unless γ can be found in this way."""
    if calibration not in ("exact", "paper"):
        raise ValueError(f"calibration must be 'exact' or 'paper', got {calibration!r}")


def check_normalize(normalize: str | None) -> None:
    """Raise ValueError unless kept values can be normalized in this way."""
    if normalize not in ("batch", "sample", "expected", None):
        raise ValueError(
            f"normalize must be 'batch', 'sample', 'expected' or None, got {normalize!r}"
        )


def clipped_block(size: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """The block in force on a map of this size: larger than the map is clipped per axis."""
    return tuple(min(b, s) for b, s in zip(block, size, strict=True))


def block_gamma(
    p: float,
    size: int | Sequence[int],
    block_size: int | Sequence[int],
    calibration: Calibration = "exact",
) -> float:
    """The seed rate γ at which blocks drop the share `p` of a map.

    ``"exact"`` solves ``mean over positions of (1 - γ)^c = 1 - p``, where c is the number of seeds
    that cover the position: overlaps and edges are counted, so the expected dropped share is p on
    every map. ``"paper"`` is the formula of Ghiasi et al., 2018, ``p / block² · size² / (size -
    block + 1)²``, which ignores overlaps and drops less than p.

    Example:
        >>> block_gamma(0.1, (14, 14), 7)
        0.00676...
        >>> block_gamma(0.1, (14, 14), 7, calibration="paper")
        0.00625

    Args:
        p: share of the elements to drop, in [0, 1].
        size: edges of the map, in elements; an int is a map of one axis.
        block_size: edge of the block, in elements, or one per axis; clipped to the map.
        calibration: ``"exact"`` or ``"paper"``.

    Raises:
        ValueError: for p outside [0, 1], a block below 1, or an unknown calibration.
    """
    edges = size if isinstance(size, Sequence) else (size,)
    sizes = tuple(as_count("size", edge) for edge in edges)
    p = check_probability(as_number("p", p))
    block = clipped_block(sizes, check_block_size(block_size, len(sizes)))
    check_calibration(calibration)
    if calibration == "paper":
        seeds = math.prod(s - b + 1 for s, b in zip(sizes, block, strict=True))
        return p * math.prod(sizes) / (math.prod(block) * seeds)
    return p if p in (0.0, 1.0) else _exact_gamma(p, sizes, block)


@functools.lru_cache(maxsize=4096)
def _exact_gamma(p: float, size: tuple[int, ...], block: tuple[int, ...]) -> float:
    """Newton on ``log(mean of exp(-c·u)) = log(1 - p)`` with ``u = -log(1 - γ)``.

    The left side is convex and falling in u: from u = 0 the iteration climbs to the root without
    ever passing it.
    """
    shares = _coverage(size, block)
    target, u = math.log1p(-p), 0.0
    for _ in range(200):
        kept = sum(w * math.exp(-c * u) for c, w in shares)
        slope = sum(w * c * math.exp(-c * u) for c, w in shares) / kept
        lost = sum(w * math.expm1(-c * u) for c, w in shares)
        value = math.log1p(lost) if kept > 0.5 else math.log(kept)  # each exact where it is used
        step = (value - target) / slope
        u += step
        if step <= 1e-13 * u:
            break
    return -math.expm1(-u)


@functools.lru_cache(maxsize=1024)
def _coverage(size: tuple[int, ...], block: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """How many seeds cover a position: each count, and the share of the positions that have it."""
    products = Counter({1: 1})
    for s, b in zip(size, block, strict=True):
        axis = Counter(min(i, s - b) - max(0, i - b + 1) + 1 for i in range(s))
        combined: Counter[int] = Counter()
        for c, n in products.items():
            for d, m in axis.items():
                combined[c * d] += n * m
        products = combined
    return tuple((c, n / math.prod(size)) for c, n in sorted(products.items()))


def expected_share(
    p: float,
    size: Sequence[int],
    block_size: int | Sequence[int],
    calibration: Calibration = "exact",
) -> float:
    """The share of a map that blocks drop on average: p itself, or what the paper's γ gives."""
    if calibration == "exact" or p == 0.0:
        return p
    block = clipped_block(size, check_block_size(block_size, len(size)))
    gamma = min(block_gamma(p, size, block, calibration), 1.0)
    return 1.0 - sum(share * (1.0 - gamma) ** c for c, share in _coverage(tuple(size), block))


def block_mask(
    x: Tensor,
    gamma: float,
    block: Sequence[int],
    share_channels: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A boolean mask, true where dropped, of the shape of `x` (one channel where shared)."""
    channels = 1 if share_channels else x.shape[1]
    seeds = [s - b + 1 for s, b in zip(x.shape[2:], block, strict=True)]
    mask = bernoulli((x.shape[0], channels, *seeds), gamma, x.device, generator)
    for axis, edge in enumerate(block, start=2):
        mask = _grow(mask, axis, edge)
    return mask


def _grow(mask: Tensor, axis: int, edge: int) -> Tensor:
    """Widen every true position to a run of `edge` that begins there, by doubling."""
    edges = [0, 0] * (mask.ndim - 1 - axis) + [0, edge - 1]
    mask, width = pad(mask, edges), 1
    while width < edge:
        shift = min(width, edge - width)
        grown = mask.clone()
        grown.narrow(axis, shift, mask.shape[axis] - shift).logical_or_(
            mask.narrow(axis, 0, mask.shape[axis] - shift)
        )
        mask, width = grown, width + shift
    return mask


def drop_blocks(
    x: Tensor,
    p: float,
    block_size: int | Sequence[int],
    *,
    inplace: bool = False,
    eps: float = 1e-6,
    calibration: Calibration = "exact",
    normalize: Normalize = "batch",
    share_channels: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | int]:
    """DropBlock on a tensor (N, C, ...) of any number of spatial axes, and the number dropped."""
    edges = check_block_size(block_size, x.ndim - 2)
    check_normalize(normalize)
    check_floating(x)
    if p == 0.0 or x.numel() == 0:
        return x, 0
    block = clipped_block(x.shape[2:], edges)
    gamma = block_gamma(p, x.shape[2:], block, calibration)
    scale: Tensor | None
    mask = block_mask(x, gamma, block, share_channels, generator)
    per_sample = mask.flatten(1).sum(1) * (x.shape[1] // mask.shape[1])
    dropped = per_sample.sum()
    if normalize == "batch":
        scale = count_ratio(x.numel(), x.numel() - dropped, eps)
    elif normalize == "sample":
        numel = x[0].numel()
        scale = count_ratio(numel, numel - per_sample, eps).view(-1, *[1] * (x.ndim - 1))
    else:
        scale = None if normalize is None else keep_scale(p)
    return drop(x, mask, scale, inplace), dropped


def _public(
    spatial: int,
    input: Tensor,
    p: float,
    block_size: int | Sequence[int],
    training: bool,
    **options: Any,
) -> Tensor:
    p = check_probability(as_number("p", p))
    check_spatial(input, spatial)
    check_block_size(block_size, spatial)
    check_calibration(options["calibration"])
    check_normalize(options["normalize"])
    return drop_blocks(input, p, block_size, **options)[0] if training else input


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
    """DropBlock on feature maps: zeroes blocks, and scales the rest.

    Takes the place of ``torchvision.ops.drop_block2d``. The expected dropped share is p on every
    map and block size; any block fits (larger than the map is clipped); Inf and NaN under a block
    are gone; with p = 0 or in evaluation the very same tensor comes back and no random number is
    drawn. In eager mode.

    Example:
        >>> x = torch.ones(8, 16, 14, 14)
        >>> y = drop_block2d(x, 0.2, 5)
        >>> sorted(set((y / y.max()).flatten().tolist()))
        [0.0, 1.0]
        >>> drop_block2d(x, 0.2, 5, training=False) is x
        True

    Args:
        input: floating-point tensor (N, C, H, W), any memory format, kept.
        p: share of the elements to drop, in [0, 1].
        block_size: edge of the block in elements, or (height, width).
        inplace: write the result into `input`.
        eps: smallest number of kept elements that the count ratio divides by.
        training: False returns `input`.
        calibration: how γ is found, see `block_gamma`.
        normalize: what kept values are multiplied by: ``"batch"`` all / kept elements of the batch
            (the paper), ``"sample"`` the same for each sample, ``"expected"`` 1 / (1 - p), or None.
        share_channels: one mask for all channels of a sample.
        generator: source of random numbers; torch's global one by default.

    Raises:
        TypeError: for p that is not a number.
        ValueError: for p outside [0, 1], a block below 1, or a tensor of another rank.

    Reference:
        Ghiasi, Lin and Le, 2018, "DropBlock: A regularization method for convolutional networks"
        (https://arxiv.org/abs/1810.12890).
    """
    return _public(
        2, input, p, block_size, training, inplace=inplace, eps=eps, calibration=calibration,
        normalize=normalize, share_channels=share_channels, generator=generator,
    )  # fmt: skip


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
    """DropBlock on sequences (N, C, L); for the arguments see `drop_block2d`.

    Example:
        >>> drop_block1d(torch.ones(2, 8, 100), 0.1, 3).shape
        torch.Size([2, 8, 100])
    """
    return _public(
        1, input, p, block_size, training, inplace=inplace, eps=eps, calibration=calibration,
        normalize=normalize, share_channels=share_channels, generator=generator,
    )  # fmt: skip


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
    """DropBlock on volumes and video (N, C, D, H, W); for the arguments see `drop_block2d`.

    Example:
        >>> drop_block3d(torch.ones(2, 8, 4, 8, 8), 0.1, 3).shape
        torch.Size([2, 8, 4, 8, 8])
    """
    return _public(
        3, input, p, block_size, training, inplace=inplace, eps=eps, calibration=calibration,
        normalize=normalize, share_channels=share_channels, generator=generator,
    )  # fmt: skip
