"""Dropout of elements, channels, samples and residual branches.

`drop_units` and `drop_residual` return the tensor and the number of dropped elements.
"""

import math
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ..checks import check_option
from ..registry import described_in
from .masks import Mask, bernoulli, check_call, in_format_of, keep_scale
from .sparse import Blocks, Units, draw_units, drop_drawn, once, takes

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
    """Zeroes each element of a tensor with chance p and scales the rest by 1 / (1 - p).

    As ``torch.nn.functional.dropout``, but dropped Inf and NaN disappear. With p = 0 or in
    evaluation, `input` itself is returned and no random number is drawn.

    Example:
        >>> dropout(torch.ones(4), 0.0)
        tensor([1., 1., 1., 1.])

    Args:
        input: floating-point tensor, of the shape that the function is for.
        p: chance of an element, channel or sample to be dropped, in [0, 1].
        training: False returns `input`.
        inplace: write the result into `input`.
        generator: source of random numbers; torch's global one by default.

    Reference:
        Srivastava et al., 2014, "Dropout" (https://jmlr.org/papers/v15/srivastava14a.html).
    """
    p = check_call(input, p, training)
    return drop_units(input, p, inplace=inplace, generator=generator)[0]


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
    """
    p = check_call(input, p, training, 1)
    return drop_units(input, p, 2, inplace=inplace, generator=generator)[0]


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
        >>> dropout2d(torch.ones(2, 3, 8, 8), 0.5).shape
        torch.Size([2, 3, 8, 8])

    Reference:
        Tompson et al., 2015 (https://arxiv.org/abs/1411.4280).
    """
    p = check_call(input, p, training, 2)
    return drop_units(input, p, 2, inplace=inplace, generator=generator)[0]


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
    """
    p = check_call(input, p, training, 3)
    return drop_units(input, p, 2, inplace=inplace, generator=generator)[0]


@described_in(dropout)
def drop_path(
    input: Tensor,
    p: float = 0.0,
    training: bool = True,
    scale_by_keep: bool = True,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """As `dropout`, for whole samples of a residual *branch* (N, ...), before the addition.

    Example:
        >>> y = drop_path(torch.ones(4, 3, 8, 8), 0.5)
        >>> set(y.flatten(1).mean(1).tolist()) <= {0.0, 2.0}
        True

    Args:
        scale_by_keep: True multiplies the kept samples by 1 / (1 - p).

    Reference:
        Larsson et al., 2017, "FractalNet" (https://arxiv.org/abs/1605.07648).
    """
    p = check_call(input, p, training)
    return drop_units(input, p, 1, rescale=scale_by_keep, generator=generator)[0]


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

    Reference:
        Huang et al., 2016 (https://arxiv.org/abs/1603.09382).
    """
    p = check_call(input, p, training)
    check_option("mode", mode, get_args(Mode))
    if mode == "row" and input.ndim == 0:
        raise ValueError("needs a tensor with an axis of samples, got one without axes")
    if shortcut is None:
        return drop_units(input, p, 1 if mode == "row" else 0, generator=generator)[0]
    return drop_residual(input, shortcut, p, mode, generator)[0]


def drop_units(
    x: Tensor,
    p: float,
    axes: int | None = None,
    *,
    rescale: bool = True,
    inplace: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | int]:
    """Dropout with one decision for each place on the first `axes` axes; None stands for all."""
    if p == 0.0 or x.numel() == 0:
        return x, 0
    shape = x.shape if axes is None else (*x.shape[:axes], *[1] * (x.ndim - axes))
    places: Blocks | Mask
    whole = x.numel() // math.prod(shape) >= _LARGE
    if not takes(x, "units" if whole else "blocks"):
        places, drawn = Mask(x.numel()), bernoulli(shape, p, x.device, generator)
    elif whole:
        places, drawn = Units(x.numel()), once(lambda: draw_units(shape, p, generator))
    else:
        blocks = Blocks(x, [side // part for side, part in zip(x.shape, shape, strict=True)])
        places, drawn = once(lambda: (blocks, blocks.draw(p, generator)))
    y = drop_drawn(x, keep_scale(p) if rescale else None, places, drawn)
    return x.copy_(y) if inplace else y, places.count(drawn)


def drop_residual(
    block: Tensor, shortcut: Tensor, p: float, mode: Mode, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor | int]:
    """``shortcut + drop(block - shortcut)``. A dropped sample equals its shortcut."""
    if block.shape != shortcut.shape:
        raise ValueError(
            f"needs a residual block that keeps its shape, got input {tuple(shortcut.shape)} and "
            f"output {tuple(block.shape)}; where the shape changes, use DropPath on the branch"
        )
    if p == 0.0 or block.numel() == 0:
        return block, 0
    wide = torch.promote_types(block.dtype, torch.float32)
    difference = block.to(wide) - shortcut.to(wide)
    axes = 1 if mode == "row" else 0
    branch, dropped = drop_units(difference, p, axes, generator=generator)
    return in_format_of(block, branch.add_(shortcut).to(block.dtype)), dropped
