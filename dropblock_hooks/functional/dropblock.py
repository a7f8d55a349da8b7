"""DropBlock: drops square blocks of a feature map (Ghiasi, Lin and Le, 2018, arXiv:1810.12890).

A seed drops the whole block that begins there, and seeds fall only where the whole block fits, each
position with the chance γ (see ``gamma``).
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import as_number, check_floating, check_option, check_probability, check_spatial
from .gamma import (
    CALIBRATIONS,
    Calibration,
    check_block_size,
    clipped_block,
    gamma_of,
    solve_gamma,
)
from .kernels.cpu import Blocks, drop_drawn, takes
from .kernels.traced import block_mask_in_graph, block_mask_of_any_size, grow
from .masks import Rate, bernoulli, count_ratio, drop, is_zero, keep_scale, wide_dtype

Normalize: TypeAlias = Literal["batch", "sample", "expected", None]
NORMALIZES = get_args(Normalize)


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
        mask = grow(pad(mask, [0, 0] * (mask.ndim - 1 - axis) + [0, edge - 1]), axis, edge)
    return mask


def drop_blocks(
    x: Tensor,
    p: Rate,
    edges: Sequence[int],
    *,
    inplace: bool = False,
    eps: float = 1e-6,
    calibration: Calibration = "exact",
    normalize: Normalize = "batch",
    share_channels: bool = False,
    generator: torch.Generator | None = None,
    counted: bool = True,
) -> tuple[Tensor, Tensor | int]:
    """DropBlock on a tensor (N, C, ...) of any number of spatial axes, and the number dropped.

    `edges` are those of the block, one per spatial axis; what is given was checked. Where the
    number is not wanted, nor needed to normalize, it is not `counted`, and 0.
    """
    if is_zero(p) or x.numel() == 0:
        return x, 0
    found = draw_blocks(x, p, edges, calibration, share_channels, generator)
    if not isinstance(found, Tensor):
        blocks, drawn = found
        counted = counted or normalize in ("batch", "sample")
        dropped = blocks.count(drawn, normalize == "sample") if counted else None
        y = drop_drawn(x, _scale(x, p, dropped, normalize, eps), blocks, drawn)
        return x.copy_(y) if inplace else y, 0 if dropped is None else dropped.sum()
    mask = found
    dropped = mask.flatten(1).sum(1) * (x.shape[1] // mask.shape[1])
    scale = _scale(x, p, dropped if normalize == "sample" else dropped.sum(), normalize, eps)
    return drop(x, mask, scale, inplace), dropped.sum()


def draw_blocks(
    x: Tensor,
    p: Rate,
    edges: Sequence[int],
    calibration: Calibration = "exact",
    share_channels: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor | tuple[Blocks, Tensor]:
    """Blocks that cover a share p: a mask as of `block_mask`, or places and which are drawn."""
    if isinstance(p, Tensor) or (generator is None and torch.compiler.is_compiling()):
        return _mask_in_graph(x, p, edges, calibration, share_channels)
    size = tuple(map(int, x.shape[2:]))  # of symbols, as in make_fx, too
    block = clipped_block(size, edges)
    chance = gamma_of(p, size, block, calibration)
    if takes(x):
        blocks = Blocks(x, (1, x.shape[1] if share_channels else 1, *block))
        return blocks, blocks.draw(chance, generator)
    return block_mask(x, chance, block, share_channels, generator)


def _mask_in_graph(
    x: Tensor, p: Rate, edges: Sequence[int], calibration: Calibration, share_channels: bool
) -> Tensor:
    if not isinstance(p, Tensor):
        p = torch.full((), p, dtype=wide_dtype(x.device), device=x.device)
    gamma = solve_gamma(p.to(x.device), x.shape[2:], edges, calibration)
    if torch.compiler.is_exporting():  # where a bound on a size would be an error
        return block_mask_of_any_size(x, gamma, edges, share_channels)
    return block_mask_in_graph(x, gamma, edges, share_channels)


def _scale(
    x: Tensor, p: Rate, dropped: Tensor | None, normalize: Normalize, eps: float
) -> Tensor | None:
    """What kept values are multiplied by; `dropped` is for each sample where that is wanted."""
    if normalize is None:
        return None
    if normalize == "expected" or dropped is None:
        return keep_scale(p)
    if normalize == "batch":
        return count_ratio(x.numel(), x.numel() - dropped, eps)
    numel = x.numel() // x.shape[0]
    return count_ratio(numel, numel - dropped, eps).view(-1, *[1] * (x.ndim - 1))


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
    edges = check_block_size(block_size, spatial)
    check_option("calibration", options["calibration"], CALIBRATIONS)
    check_option("normalize", options["normalize"], NORMALIZES)
    if not training:
        return input
    check_floating(input)
    return drop_blocks(input, p, edges, counted=False, **options)[0]


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
    are gone. In eager mode, with p = 0 or in evaluation, the very same tensor comes back and no
    random number is drawn.

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
