"""DropBlock drops blocks of a feature map, and Disout distorts them.

    seeds = rand(places) < γ                    the places where a whole block fits
    dropped = OR of the seeds in each block
    y = where(dropped, 0, x * all / kept)       DropBlock
    y = x + dropped * alpha * std(x) * z        Disout, with standard normal z

A seed drops the whole block that begins there. Each place, a position where a whole block fits, is
a seed with the chance γ. With the border "across", a block also begins outside of the map. γ is
solved once for each rate and map size.
"""

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._torch import constant_when_traced
from ..checks import NON_NEGATIVE, PROBABILITY, as_count, as_number, check_block_size, check_option
from .kernels import launch
from .masks import Mask, bernoulli, check_call, count_ratio, keep_scale, normal_like
from .sparse import Blocks, drop_drawn, grow, takes

Calibration: TypeAlias = Literal["exact", "paper"]
Border: TypeAlias = Literal["inside", "across"]
Method: TypeAlias = Literal["exact", "paper", "across"]
"""How blocks are drawn: inside the map with a calibration, or across its border."""
_CALIBRATIONS = get_args(Calibration)
_BORDERS = get_args(Border)
Normalize: TypeAlias = Literal["batch", "sample", "expected", None]
BlockSize: TypeAlias = int | Sequence[int]


def block_gamma(
    p: float,
    size: int | Sequence[int],
    block_size: BlockSize,
    calibration: Calibration = "exact",
    border: Border = "inside",
) -> float:
    """Return the seed rate γ at which blocks drop the share `p` of a map.

    ``"exact"`` solves ``mean over positions of (1 - γ)^c = 1 - p``, where c is the number of seeds
    that cover the position. With ``border="across"`` each position is covered by as many seeds as a
    block has elements, so ``γ = 1 - (1 - p)^(1 / block²)``. ``"paper"`` is the equation of Ghiasi
    et al., 2018, ``γ = p / block² · size² / (size - block + 1)²``. It ignores overlaps, so it drops
    less than p.

    Example:
        >>> block_gamma(0.1, (14, 14), 7)
        0.00676...

    Args:
        p: share of the elements to drop, in [0, 1].
        size: edges of the map, in elements; an int is a map with a single axis.
        block_size: edge of the block, in elements, or one per axis; clipped to the map.
        calibration: ``"exact"`` or ``"paper"``.
        border: ``"inside"`` or ``"across"``; see `drop_block2d`.

    Raises:
        TypeError: if `p` is no number.
        ValueError: if an argument is outside its range, or ``calibration="paper"`` comes
            with ``border="across"``.
    """
    edges = size if isinstance(size, Sequence) else (size,)
    sizes = tuple(as_count("size", edge) for edge in edges)
    p = as_number("p", p, allowed=PROBABILITY)
    block_edges = check_block_size(block_size, len(sizes))
    block = tuple(map(min, sizes, block_edges))
    method = method_of(calibration, border)
    return gamma_of(p, sizes, block, method)


def method_of(calibration: str, border: str) -> Method:
    """Check two options, and return how blocks are drawn.

    Raises:
        ValueError: if an option has a value that is not allowed, or both can't be combined.
    """
    check_option("calibration", calibration, _CALIBRATIONS)
    check_option("border", border, _BORDERS)
    if border == "inside":
        return "paper" if calibration == "paper" else "exact"
    if calibration == "paper":
        raise ValueError(
            "calibration='paper' is for blocks inside the map: leave it out with border='across'"
        )
    return "across"


def places_of(size: Sequence[int], block: Sequence[int], method: Method) -> list[int]:
    """Return the number of positions on each axis where a block may begin."""
    if method == "across":
        return [length + edge - 1 for length, edge in zip(size, block, strict=True)]
    return [length - edge + 1 for length, edge in zip(size, block, strict=True)]


@constant_when_traced
def gamma_of(p: float, size: tuple[int, ...], block: tuple[int, ...], method: Method) -> float:
    """Return `block_gamma` of checked arguments and a block that fits.

    torch.compile keeps the result as a constant.
    """
    area = math.prod(block)
    if method == "paper":
        seeds = math.prod(places_of(size, block, method))
        return p * math.prod(size) / (area * seeds)

    if p in (0.0, 1.0):
        return p
    if method == "across":
        return -math.expm1(math.log1p(-p) / area)
    return _exact_gamma(p, size, block)


@functools.lru_cache(maxsize=4096)
def _exact_gamma(p: float, size: tuple[int, ...], block: tuple[int, ...]) -> float:
    """Solve ``log(mean of exp(-c·u)) = log(1 - p)`` for u = -log(1 - γ) by Newton's method.

    It converges because the left side is convex in u.
    """
    coverage = _coverage(size, block)
    target = math.log1p(-p)
    u = 0.0

    for _ in range(200):
        kept = sum(share * math.exp(-c * u) for c, share in coverage)
        slope = sum(share * c * math.exp(-c * u) for c, share in coverage) / kept

        # the logarithm of the kept share, by the form that is exact for its size
        if kept > 0.5:
            minus_dropped = sum(share * math.expm1(-c * u) for c, share in coverage)
            value = math.log1p(minus_dropped)
        else:
            value = math.log(kept)

        step = (value - target) / slope
        u += step
        if step <= 1e-13 * u:
            break
    return -math.expm1(-u)


@functools.lru_cache(maxsize=1024)
def _coverage(size: tuple[int, ...], block: tuple[int, ...]) -> list[tuple[int, float]]:
    """Return each number of seeds that can cover a position, and the share of such positions."""
    axes = []
    for length, edge in zip(size, block, strict=True):
        last_place = length - edge
        # a seed at the position s covers the positions s to s + edge - 1
        counts = Counter(
            min(position, last_place) - max(0, position - edge + 1) + 1
            for position in range(length)
        )
        axes.append(counts.items())

    # the seeds that cover a position form a box, so the counts of the axes are multiplied
    positions: Counter[int] = Counter()
    for terms in itertools.product(*axes):
        seeds = math.prod(count for count, _ in terms)
        positions[seeds] += math.prod(number for _, number in terms)

    total = math.prod(size)
    return [(seeds, number / total) for seeds, number in sorted(positions.items())]


_NODES = 1024  # the nodes of a table of seed rates, which is linear between them


@functools.lru_cache(maxsize=256)
def gamma_table(
    size: tuple[int, ...],
    block: tuple[int, ...],
    method: Method,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Return the ratio of ``log(1 - γ)`` and ``log(1 - p)``, at p = 0, 1/1024, ... 1.

    The ratio changes slowly for p below 0.9. It goes from 1 / mean(c) at p = 0 to 1 / min(c) at
    p = 1, where c is the number of places whose block covers a position. So `gamma_on` finds γ by a
    look-up, without waiting for the device.
    """
    if method == "across":
        return torch.full((_NODES + 1,), 1 / math.prod(block), dtype=dtype, device=device)

    coverage = torch.tensor(_coverage(size, block), dtype=torch.float64)
    counts, shares = coverage.unbind(1)
    inner_nodes = torch.arange(1, _NODES, dtype=torch.float64)
    p = inner_nodes[:, None] / _NODES
    target = torch.log1p(-p)

    u = torch.zeros_like(p)
    for _ in range(100):  # Newton's method, as in `_exact_gamma`
        weights = shares * torch.exp(-counts * u)
        kept = weights.sum(1, keepdim=True)
        slope = (weights * counts).sum(1, keepdim=True) / kept
        u += (kept.log() - target) / slope

    first = 1 / (counts * shares).sum().reshape(1)
    inner = (u / -target).view(-1)
    last = 1 / counts.min().reshape(1)
    table = torch.cat((first, inner, last))
    return table.to(device, dtype)


def gamma_on(p: Tensor, size: tuple[int, ...], block: tuple[int, ...], method: Method) -> Tensor:
    """Return `gamma_of` for a rate that lies on a device, in torch operations."""
    if method == "paper":
        return p * gamma_of(1.0, size, block, method)

    table = gamma_table(size, block, method, p.device, p.dtype)
    place = p * _NODES
    below = place.floor().clamp(0, _NODES - 1)
    node = below.long()
    low = table[node]
    high = table[node + 1]
    ratio = torch.lerp(low, high, place - below)
    return -torch.expm1(torch.log1p(-p) * ratio)


def expected_share(
    p: float, size: tuple[int, ...] | None, edges: Sequence[int], method: Method
) -> float | None:
    """Return the expected dropped share of a map: p, or less for the paper's γ; None if unknown."""
    if method != "paper" or p == 0.0:
        return p
    if size is None:
        return None

    block = tuple(map(min, size, edges))
    gamma = min(gamma_of(p, size, block, method), 1.0)
    kept = sum(share * (1.0 - gamma) ** c for c, share in _coverage(size, block))
    return 1.0 - kept


def drop_blocks(
    x: Tensor,
    p: float,
    edges: Sequence[int],
    method: Method,
    normalize: Normalize,
    share_channels: bool,
    inplace: bool = False,
    eps: float = 1e-6,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | int]:
    """Drop blocks; return the new tensor, and the number of dropped elements."""
    if p == 0.0 or x.numel() == 0:
        return x, 0

    per_sample = normalize == "sample"
    applier, drawn = draw_blocks(x, p, edges, method, share_channels, generator, per_sample)
    dropped = applier.count(drawn)

    scale: Any
    if normalize == "expected":
        scale = keep_scale(p)
    elif normalize is None:
        scale = 1.0
    elif applier.has_counts and eps <= 1:  # with at least one kept element, eps has no effect
        scale = None  # `applier` computes the factor from its counts
    elif normalize == "batch":
        scale = count_ratio(x.numel(), x.numel() - dropped, eps)
    else:
        drawn = applier.mask(drawn)
        applier = Mask(x.numel())
        channels_of_block = x.shape[1] // drawn.shape[1]  # more than 1 if they share a mask
        dropped_of_sample = drawn.flatten(1).sum(1) * channels_of_block
        total = x[0].numel()
        scale = count_ratio(total, total - dropped_of_sample, eps)
        scale = scale.view(-1, *[1] * (x.ndim - 1))

    y = drop_drawn(x, scale, applier, drawn)
    return x.copy_(y) if inplace else y, dropped


def distort_blocks(
    x: Tensor,
    p: float,
    edges: Sequence[int],
    alpha: float,
    share_channels: bool = False,
    generator: torch.Generator | None = None,
    method: Method = "exact",
) -> tuple[Tensor, Tensor | int]:
    """Distort blocks; return the new tensor, and the number of distorted elements."""
    if p == 0.0 or alpha == 0.0 or x.numel() == 0:
        return x, 0

    applier, drawn = draw_blocks(x, p, edges, method, share_channels, generator)
    noise = normal_like(x, alpha * _spread(x), generator)
    noise_in_blocks = applier.keep(noise, drawn)
    distorted = (x + noise_in_blocks).to(x.dtype)
    return distorted, applier.count(drawn)


def distort(x: Tensor, mask: Tensor, alpha: Tensor) -> Tensor:
    """Return ``x + mask * alpha * std(x) * z`` with standard normal z, in compiled code."""
    noise = normal_like(x, alpha * _spread(x), None)
    noise_in_blocks = noise.masked_fill_(~mask, 0.0)
    return (x + noise_in_blocks).to(x.dtype)


def _spread(x: Tensor) -> Tensor:
    """Return the standard deviation of all elements."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.detach().to(wide).std(correction=0)


def draw_blocks(
    x: Tensor,
    p: float,
    edges: Sequence[int],
    method: Method,
    share_channels: bool,
    generator: torch.Generator | None,
    per_sample: bool = False,
) -> tuple[Any, Tensor]:
    """Draw the blocks of a tensor (N, C, ...); return the object that applies them, and the draw.

    The object is a `Blocks` on a CPU, a `kernels.blocks.Words` on a GPU, or a `Mask`.
    """
    size = tuple(map(operator.index, x.shape[2:]))  # a compiled program has one map size
    block = tuple(map(min, size, edges))
    gamma = gamma_of(p, size, block, method)
    across = method == "across"

    if takes(x):
        channels_of_block = x.shape[1] if share_channels else 1
        blocks = Blocks(x, (1, channels_of_block, *block), across)
        return blocks, blocks.draw(gamma, generator)

    if launch.takes(x):
        from .kernels.blocks import draw

        drawn = draw(x, gamma, block, share_channels, generator, per_sample, across)
        if drawn is not None:
            return drawn

    # no branch on a value from here on: torch.export traces it for any batch size
    channels = 1 if share_channels else x.shape[1]
    shape = (x.shape[0], channels, *places_of(size, block, method))
    seeds = bernoulli(shape, gamma, x.device, generator)
    return Mask(x.numel()), blocks_of(seeds, block, method)


def blocks_of(seeds: Tensor, block: Sequence[int], method: Method) -> Tensor:
    """Return the mask of the blocks that begin at these seeds; see `places_of`."""
    if method != "across":  # no block begins outside, so there are no seeds around the places
        borders: list[int] = []
        for edge in reversed(block):  # `pad` takes the last axis first
            borders += (edge - 1, edge - 1)
        seeds = pad(seeds, borders)
    return grow(seeds, block, first=2)


def _drop_block(
    spatial: int,
    input: Tensor,
    p: float,
    block_size: BlockSize,
    *,
    inplace: bool,
    eps: float,
    training: bool,
    calibration: Calibration,
    normalize: Normalize,
    share_channels: bool,
    border: Border,
    generator: torch.Generator | None,
) -> Tensor:
    """Check the arguments of `drop_block2d`, for this number of spatial axes, and drop blocks."""
    p = check_call(input, p, training, spatial)
    edges = check_block_size(block_size, spatial)
    method = method_of(calibration, border)
    check_option("normalize", normalize, get_args(Normalize))
    dropped, _ = drop_blocks(
        input, p, edges, method, normalize, share_channels, inplace, eps, generator
    )
    return dropped


def drop_block2d(
    input: Tensor,
    p: float,
    block_size: BlockSize,
    inplace: bool = False,
    eps: float = 1e-6,
    training: bool = True,
    *,
    calibration: Calibration = "exact",
    normalize: Normalize = "batch",
    share_channels: bool = False,
    border: Border = "inside",
    generator: torch.Generator | None = None,
) -> Tensor:
    """DropBlock on feature maps (N, C, H, W): zeroes blocks, and scales the rest.

    A replacement for ``torchvision.ops.drop_block2d``. The expected dropped share is p on every map
    and block size. Inf and NaN under a block disappear. With p = 0 or in evaluation, `input` itself
    is returned and no random number is drawn.

    Example:
        >>> y = drop_block2d(torch.ones(8, 16, 14, 14), 0.2, 5)

    Args:
        input: floating-point tensor of the shape above. Its memory format is kept.
        p: share of the elements to drop, in [0, 1].
        block_size: edge of the block, at least 1, or one for each spatial axis; clipped to the map.
        inplace: write the result into `input`.
        eps: smallest number of kept elements that the count ratio divides by.
        training: False returns `input`.
        calibration: ``"exact"`` realizes p, ``"paper"`` drops less; see `block_gamma`.
        normalize: factor of the kept elements. ``"batch"``: all / kept elements of the batch.
            ``"sample"``: all / kept elements of each sample. ``"expected"``: 1 / (1 - p). None: no
            factor.
        share_channels: True draws one set of blocks for all channels of a sample.
        border: ``"inside"`` puts whole blocks inside the map, as in the paper, so elements at the
            border are dropped less often than those in the center. With ``"across"`` blocks may
            reach across the border, and each element is dropped with chance p.
        generator: source of random numbers, on the CPU or on the device of `input`; torch's global
            one by default.

    Raises:
        TypeError: if `input` is no tensor (in training, no floating-point tensor), or a rate is no
            number.
        ValueError: if an argument is outside its range, `input` has another number of axes, or
            ``calibration="paper"`` comes with ``border="across"``.

    Reference:
        Ghiasi, Lin and Le, 2018 (https://arxiv.org/abs/1810.12890).
    """
    return _drop_block(
        2,
        input,
        p,
        block_size,
        inplace=inplace,
        eps=eps,
        training=training,
        calibration=calibration,
        normalize=normalize,
        share_channels=share_channels,
        border=border,
        generator=generator,
    )


def drop_block1d(
    input: Tensor,
    p: float,
    block_size: BlockSize,
    inplace: bool = False,
    eps: float = 1e-6,
    training: bool = True,
    *,
    calibration: Calibration = "exact",
    normalize: Normalize = "batch",
    share_channels: bool = False,
    border: Border = "inside",
    generator: torch.Generator | None = None,
) -> Tensor:
    """As `drop_block2d`, for sequences (N, C, L).

    Example:
        >>> y = drop_block1d(torch.ones(2, 8, 100), 0.1, 3)

    Args:
        input: floating-point tensor of the shape above. Its memory format is kept.
        p: share of the elements to drop, in [0, 1].
        block_size: edge of the block, at least 1, or one for each spatial axis; clipped to the map.
        inplace: write the result into `input`.
        eps: smallest number of kept elements that the count ratio divides by.
        training: False returns `input`.
        calibration: ``"exact"`` realizes p, ``"paper"`` drops less; see `block_gamma`.
        normalize: factor of the kept elements. ``"batch"``: all / kept elements of the batch.
            ``"sample"``: all / kept elements of each sample. ``"expected"``: 1 / (1 - p). None: no
            factor.
        share_channels: True draws one set of blocks for all channels of a sample.
        border: ``"inside"`` puts whole blocks inside the map, as in the paper, so elements at the
            border are dropped less often than those in the center. With ``"across"`` blocks may
            reach across the border, and each element is dropped with chance p.
        generator: source of random numbers, on the CPU or on the device of `input`; torch's global
            one by default.

    Raises:
        TypeError: if `input` is no tensor (in training, no floating-point tensor), or a rate is no
            number.
        ValueError: if an argument is outside its range, `input` has another number of axes, or
            ``calibration="paper"`` comes with ``border="across"``.

    Reference:
        Ghiasi, Lin and Le, 2018 (https://arxiv.org/abs/1810.12890).
    """
    return _drop_block(
        1,
        input,
        p,
        block_size,
        inplace=inplace,
        eps=eps,
        training=training,
        calibration=calibration,
        normalize=normalize,
        share_channels=share_channels,
        border=border,
        generator=generator,
    )


def drop_block3d(
    input: Tensor,
    p: float,
    block_size: BlockSize,
    inplace: bool = False,
    eps: float = 1e-6,
    training: bool = True,
    *,
    calibration: Calibration = "exact",
    normalize: Normalize = "batch",
    share_channels: bool = False,
    border: Border = "inside",
    generator: torch.Generator | None = None,
) -> Tensor:
    """As `drop_block2d`, for volumes and video (N, C, D, H, W).

    Example:
        >>> y = drop_block3d(torch.ones(2, 8, 4, 8, 8), 0.1, 3)

    Args:
        input: floating-point tensor of the shape above. Its memory format is kept.
        p: share of the elements to drop, in [0, 1].
        block_size: edge of the block, at least 1, or one for each spatial axis; clipped to the map.
        inplace: write the result into `input`.
        eps: smallest number of kept elements that the count ratio divides by.
        training: False returns `input`.
        calibration: ``"exact"`` realizes p, ``"paper"`` drops less; see `block_gamma`.
        normalize: factor of the kept elements. ``"batch"``: all / kept elements of the batch.
            ``"sample"``: all / kept elements of each sample. ``"expected"``: 1 / (1 - p). None: no
            factor.
        share_channels: True draws one set of blocks for all channels of a sample.
        border: ``"inside"`` puts whole blocks inside the map, as in the paper, so elements at the
            border are dropped less often than those in the center. With ``"across"`` blocks may
            reach across the border, and each element is dropped with chance p.
        generator: source of random numbers, on the CPU or on the device of `input`; torch's global
            one by default.

    Raises:
        TypeError: if `input` is no tensor (in training, no floating-point tensor), or a rate is no
            number.
        ValueError: if an argument is outside its range, `input` has another number of axes, or
            ``calibration="paper"`` comes with ``border="across"``.

    Reference:
        Ghiasi, Lin and Le, 2018 (https://arxiv.org/abs/1810.12890).
    """
    return _drop_block(
        3,
        input,
        p,
        block_size,
        inplace=inplace,
        eps=eps,
        training=training,
        calibration=calibration,
        normalize=normalize,
        share_channels=share_channels,
        border=border,
        generator=generator,
    )


def disout(
    input: Tensor,
    p: float,
    block_size: BlockSize,
    alpha: float = 1.0,
    training: bool = True,
    *,
    share_channels: bool = False,
    border: Border = "inside",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Adds noise to blocks of feature maps (N, C, H, W).

    Returns ``input + m * alpha * std(input) * z``. The mask m is 1 in blocks, which are drawn as by
    `drop_block2d`, and 0 elsewhere. The noise z is standard normal. The gradient passes unchanged.
    Inf or NaN make every distorted element NaN. The noise of the authors also depends on the
    weights of the next layer.

    Example:
        >>> y = disout(torch.ones(2, 8, 14, 14), 0.2, 5)

    Args:
        input: floating-point tensor of the shape above. Its memory format is kept.
        p: share of the elements to distort, in [0, 1].
        block_size: edge of the block, at least 1, or one for each spatial axis; clipped to the map.
        alpha: strength of the noise in standard deviations of the tensor, a number >= 0.
        training: False returns `input`.
        share_channels: True draws one set of blocks for all channels of a sample.
        border: ``"inside"`` puts whole blocks inside the map, as in the paper, so elements at the
            border are dropped less often than those in the center. With ``"across"`` blocks may
            reach across the border, and each element is dropped with chance p.
        generator: source of random numbers, on the CPU or on the device of `input`; torch's global
            one by default.

    Raises:
        TypeError: if `input` is no tensor (in training, no floating-point tensor), or a rate is no
            number.
        ValueError: if an argument is outside its range, or `input` has another number of axes.

    Reference:
        Tang et al., 2020 (https://arxiv.org/abs/2002.11022); https://github.com/huawei-noah/Disout.
    """
    p = check_call(input, p, training, 2)
    alpha = as_number("alpha", alpha, allowed=NON_NEGATIVE)
    edges = check_block_size(block_size, 2)
    method = method_of("exact", border)
    distorted, _ = distort_blocks(input, p, edges, alpha, share_channels, generator, method)
    return distorted
