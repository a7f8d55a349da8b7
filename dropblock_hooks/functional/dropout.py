"""Dropout of elements, channels, samples and residual branches.

The ``drop_*`` functions that are not public return the tensor and the number of dropped elements.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ..checks import check_option
from ..docstrings import described_in
from .masks import Mask, bernoulli, check_call, in_format_of, keep_scale
from .sparse import Blocks, Units, drop_drawn, once, takes

Mode: TypeAlias = Literal["row", "batch"]
_LARGE = 64  # elements of a unit, from which a number for each unit is less than a bit per element


def dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Zeroes each element with chance p and scales the rest by 1 / (1 - p).

    As ``torch.nn.functional.dropout``, but dropped Inf and NaN disappear. With p = 0 or in
    evaluation, `input` itself is returned and no random number is drawn.

    Example:
        >>> dropout(torch.ones(4), 0.0)
        tensor([1., 1., 1., 1.])

    Args:
        input: floating-point tensor of any shape.
        p: chance of an element to be dropped, in [0, 1].
        training: False returns `input`.
        inplace: write the result into `input`.
        generator: source of random numbers; torch's global one by default.

    Raises:
        ValueError: for p outside [0, 1].

    Reference:
        Srivastava et al., 2014, "Dropout" (https://jmlr.org/papers/v15/srivastava14a.html).
    """
    p = check_call(input, p, training)
    return drop_shape(input, p, input.shape, inplace=inplace, generator=generator)[0]


@described_in(dropout)
def dropout1d(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """As `dropout`, for whole channels of sequences (N, C, L), each with chance p.

    Example:
        >>> dropout1d(torch.ones(2, 3, 8), 0.5).shape
        torch.Size([2, 3, 8])

    Args:
        input: floating-point tensor (N, C, L).
        p: chance of a channel to be dropped, in [0, 1].
    """
    p = check_call(input, p, training, 1)
    return drop_channels(input, p, inplace=inplace, generator=generator)[0]


@described_in(dropout)
def dropout2d(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """As `dropout`, for whole channels of feature maps (N, C, H, W), each with chance p.

    Example:
        >>> y = dropout2d(torch.ones(2, 3, 8, 8), 0.5)
        >>> set(y.flatten(2).sum(2).flatten().tolist()) <= {0.0, 128.0}
        True

    Args:
        input: floating-point tensor (N, C, H, W).
        p: chance of a channel to be dropped, in [0, 1].

    Reference:
        Tompson et al., 2015, "Efficient Object Localization Using Convolutional Networks"
        (https://arxiv.org/abs/1411.4280).
    """
    p = check_call(input, p, training, 2)
    return drop_channels(input, p, inplace=inplace, generator=generator)[0]


@described_in(dropout2d)
def dropout3d(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """As `dropout2d`, for volumes (N, C, D, H, W).

    Example:
        >>> dropout3d(torch.ones(2, 3, 4, 8, 8), 0.5).shape
        torch.Size([2, 3, 4, 8, 8])

    Args:
        input: floating-point tensor (N, C, D, H, W).
    """
    p = check_call(input, p, training, 3)
    return drop_channels(input, p, inplace=inplace, generator=generator)[0]


@described_in(dropout)
def drop_path(
    input: Tensor,
    p: float = 0.0,
    training: bool = True,
    scale_by_keep: bool = True,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """As `dropout`, for whole samples of a residual *branch*, each with chance p.

    Example:
        >>> y = drop_path(torch.ones(4, 3, 8, 8), 0.5)
        >>> set(y.flatten(1).mean(1).tolist()) <= {0.0, 2.0}
        True

    Args:
        input: the output (N, ...) of the branch, before the addition.
        p: chance of a sample to be dropped, in [0, 1].
        scale_by_keep: True multiplies the kept samples by 1 / (1 - p).

    Reference:
        Larsson et al., 2017, "FractalNet" (https://arxiv.org/abs/1605.07648).
    """
    p = check_call(input, p, training)
    return drop_samples(input, p, rescale=scale_by_keep, generator=generator)[0]


@described_in(drop_path)
def stochastic_depth(
    input: Tensor,
    p: float,
    mode: Mode = "row",
    training: bool = True,
    *,
    shortcut: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """As `drop_path`, also given the whole block.

    Example:
        >>> x = torch.zeros(4, 3)
        >>> y = stochastic_depth(x + 1, 0.5, shortcut=x)
        >>> set(y.flatten().tolist()) <= {0.0, 2.0}
        True

    Args:
        input: the branch, as in ``torchvision.ops.stochastic_depth``; with `shortcut`, the output
            of the whole block.
        mode: ``"row"`` decides for each sample, ``"batch"`` for all at once.
        shortcut: the input of the block, of the same shape. The result is
            ``shortcut + drop(input - shortcut)``: a dropped sample passes the block unchanged.

    Raises:
        ValueError: for a shortcut of another shape.

    Reference:
        Huang et al., 2016, "Deep Networks with Stochastic Depth"
        (https://arxiv.org/abs/1603.09382).
    """
    p = check_call(input, p, training)
    check_option("mode", mode, get_args(Mode))
    if shortcut is None:
        return drop_samples(input, p, mode, generator=generator)[0]
    return drop_residual(input, shortcut, p, mode, generator=generator)[0]


def drop_shape(
    x: Tensor,
    p: float,
    shape: Sequence[int],
    *,
    rescale: bool = True,
    inplace: bool = False,
    summand: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | int]:
    """Dropout with one decision per element of `shape`, which broadcasts to the shape of `x`.

    Dropped elements of a `summand` become -0.0, since ``s + -0.0`` is ``s`` also for -0.0.
    """
    if p == 0.0 or x.numel() == 0:
        return x, 0
    scale = keep_scale(p) if rescale else None
    places: Blocks | Mask
    fill, whole = -0.0 if summand else 0.0, x.numel() // math.prod(shape) >= _LARGE
    if whole and takes(x, "units"):
        units = places = Units(x.numel(), fill)
        drawn = once(lambda: units.draw(shape, p, generator))
    elif not whole and not summand and takes(x, "blocks"):
        blocks = Blocks(x, [side // part for side, part in zip(x.shape, shape, strict=True)])
        places, drawn = once(lambda: (blocks, blocks.draw(p, generator)))
    else:
        places, drawn = Mask(x.numel(), fill), bernoulli(shape, p, x.device, generator)
    y = drop_drawn(x, scale, places, drawn)
    return x.copy_(y) if inplace else y, places.count(drawn)


def drop_channels(x: Tensor, p: float, **options: Any) -> tuple[Tensor, Tensor | int]:
    """Dropout of whole channels of a tensor (N, C, ...)."""
    return drop_shape(x, p, (*x.shape[:2], *[1] * (x.ndim - 2)), **options)


def drop_samples(
    x: Tensor, p: float, mode: Mode = "row", **options: Any
) -> tuple[Tensor, Tensor | int]:
    """Dropout of whole samples (``"row"``) or of the whole batch at once (``"batch"``)."""
    if x.ndim == 0:
        raise ValueError("needs a tensor with an axis of samples, got a 0-D tensor")
    first = x.shape[0] if mode == "row" else 1
    return drop_shape(x, p, (first, *[1] * (x.ndim - 1)), **options)


def drop_residual(
    block: Tensor,
    shortcut: Tensor,
    p: float,
    mode: Mode = "row",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | int]:
    """``shortcut + drop(block - shortcut)``. A dropped sample equals its shortcut to the bit."""
    if block.shape != shortcut.shape:
        raise ValueError(
            f"needs a residual block that keeps its shape, got input {tuple(shortcut.shape)} and "
            f"output {tuple(block.shape)}; where the shape changes, use DropPath on the branch"
        )
    if p == 0.0 or block.numel() == 0:
        return block, 0
    wide = torch.promote_types(block.dtype, torch.float32)
    difference = block.to(wide) - shortcut.to(wide)
    branch, dropped = drop_samples(difference, p, mode, summand=True, generator=generator)
    return in_format_of(block, branch.add_(shortcut).to(block.dtype)), dropped
