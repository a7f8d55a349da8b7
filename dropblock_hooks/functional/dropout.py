"""Dropout and its kin: elements, channels, samples, and multiplicative or additive noise.

The pairs ``drop_*`` return the tensor and how many elements were dropped; the functions with the
field's names return the tensor alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..schedules import as_number

_COARSE = 2.0**-10  # below this rate the 24 bits of a float32 draw are off by more than 6e-5 of it


def check_probability(p: float) -> float:
    """p, or a ValueError unless it lies in [0, 1]."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must be in [0, 1], got {p}")
    return p


def check_spatial(input: Tensor, spatial: int) -> None:
    """Raise ValueError unless `input` is (N, C) and this many spatial axes."""
    if input.ndim != spatial + 2:
        axes = ("N, C, L", "N, C, H, W", "N, C, D, H, W")[spatial - 1]
        raise ValueError(
            f"input must be a {spatial + 2}-D tensor ({axes}), got shape {tuple(input.shape)}"
        )


def check_mode(mode: str) -> None:
    """Raise ValueError unless samples are dropped by ``"row"`` or by ``"batch"``."""
    if mode not in ("row", "batch"):
        raise ValueError(f"mode must be 'row' or 'batch', got {mode!r}")


def check_floating(input: Tensor) -> None:
    """Raise TypeError unless `input` holds floating-point numbers."""
    if not input.is_floating_point():
        raise TypeError(f"input must be a floating-point tensor, got {input.dtype}")


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # which has no float64


def bernoulli(
    shape: Sequence[int], p: float, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """A boolean tensor, true with chance p; drawn in float32, finer where p is small."""
    dtype = torch.float32 if p >= _COARSE else _wide(device)
    return torch.rand(tuple(shape), device=device, dtype=dtype, generator=generator) < p


def keep_scale(p: float) -> Tensor:
    """1 / (1 - p) in float32: what kept values are multiplied by on average; 0 at p = 1."""
    return torch.tensor(1 / (1 - p) if p < 1 else 0.0, dtype=torch.float32)


def count_ratio(total: int, kept: Tensor, eps: float) -> Tensor:
    """The ratio total / kept in float32, counted exactly; kept is taken as at least `eps`."""
    return (total / kept.to(_wide(kept.device)).clamp_min(eps)).to(torch.float32)


def drop(x: Tensor, mask: Tensor, scale: Tensor | None, inplace: bool = False) -> Tensor:
    """0 where `mask`, and ``x * scale`` elsewhere: the product in float32, rounded once."""
    y = x
    if scale is not None:
        y = (x.float() if x.dtype.itemsize < 4 else x) * scale
    y = y.clone() if y is x else y  # keeps the memory format, which masked_fill need not
    y = y.masked_fill_(mask, 0).to(x.dtype)
    return x.copy_(y) if inplace else y


def drop_shape(
    x: Tensor,
    p: float,
    shape: Sequence[int],
    *,
    rescale: bool = True,
    inplace: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | int]:
    """Dropout with one decision per element of `shape`, which broadcasts to that of `x`."""
    check_floating(x)
    if p == 0.0 or x.numel() == 0:
        return x, 0
    mask = bernoulli(shape, p, x.device, generator)
    dropped = mask.sum() * (x.numel() // mask.numel())
    return drop(x, mask, keep_scale(p) if rescale else None, inplace), dropped


def drop_channels(x: Tensor, p: float, **options: object) -> tuple[Tensor, Tensor | int]:
    """Dropout of whole channels of a tensor (N, C, ...)."""
    return drop_shape(x, p, (*x.shape[:2], *[1] * (x.ndim - 2)), **options)  # type: ignore[arg-type]


def drop_samples(
    x: Tensor, p: float, mode: str = "row", **options: object
) -> tuple[Tensor, Tensor | int]:
    """Dropout of whole samples (``"row"``) or of the whole batch at once (``"batch"``)."""
    check_mode(mode)
    if x.ndim == 0:
        raise ValueError("needs a tensor with an axis of samples, got a 0-D tensor")
    first = x.shape[0] if mode == "row" else 1
    return drop_shape(x, p, (first, *[1] * (x.ndim - 1)), **options)  # type: ignore[arg-type]


def drop_residual(
    block: Tensor, shortcut: Tensor, p: float, mode: str = "row", **options: object
) -> tuple[Tensor, Tensor | int]:
    """``shortcut + drop(block - shortcut)``: a dropped sample is its shortcut, to the bit."""
    if block.shape != shortcut.shape:
        raise ValueError(
            f"needs a residual block that keeps its shape, got input {tuple(shortcut.shape)} and "
            f"output {tuple(block.shape)}; where the shape changes, use DropPath on the branch"
        )
    check_floating(block)
    if p == 0.0 or block.numel() == 0:
        return block, 0
    wide = torch.promote_types(block.dtype, torch.float32)
    branch, dropped = drop_samples(block.to(wide) - shortcut.to(wide), p, mode, **options)
    return branch.add_(shortcut).to(block.dtype), dropped  # in place: the block's memory format


def dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Zeroes each element with chance p and scales the rest by 1 / (1 - p).

    As ``torch.nn.functional.dropout``, but Inf and NaN that are dropped are gone, and with p = 0 or
    in evaluation the very same tensor comes back and no random number is drawn.

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
    p = check_probability(as_number("p", p))
    if not training:
        return input
    return drop_shape(input, p, input.shape, inplace=inplace, generator=generator)[0]


def _dropout_channels(
    spatial: int, input: Tensor, p: float, training: bool, **options: object
) -> Tensor:
    p = check_probability(as_number("p", p))
    check_spatial(input, spatial)
    return drop_channels(input, p, **options)[0] if training else input


def dropout1d(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Dropout of whole channels of sequences (N, C, L); see `dropout2d`.

    Example:
        >>> dropout1d(torch.ones(2, 3, 8), 0.5).shape
        torch.Size([2, 3, 8])
    """
    return _dropout_channels(1, input, p, training, inplace=inplace, generator=generator)


def dropout2d(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Zeroes whole channels of feature maps (N, C, H, W), each with chance p.

    Example:
        >>> y = dropout2d(torch.ones(2, 3, 8, 8), 0.5)
        >>> set(y.flatten(2).sum(2).flatten().tolist()) <= {0.0, 128.0}
        True

    Args:
        input: floating-point tensor (N, C, H, W).
        p: chance of a channel of a sample to be dropped, in [0, 1].
        training: False returns `input`.
        inplace: write the result into `input`.
        generator: source of random numbers; torch's global one by default.

    Raises:
        ValueError: for p outside [0, 1] or a tensor of another rank.

    Reference:
        Tompson et al., 2015, "Efficient Object Localization Using Convolutional Networks"
        (https://arxiv.org/abs/1411.4280).
    """
    return _dropout_channels(2, input, p, training, inplace=inplace, generator=generator)


def dropout3d(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Dropout of whole channels of volumes (N, C, D, H, W); see `dropout2d`.

    Example:
        >>> dropout3d(torch.ones(2, 3, 4, 8, 8), 0.5).shape
        torch.Size([2, 3, 4, 8, 8])
    """
    return _dropout_channels(3, input, p, training, inplace=inplace, generator=generator)


def drop_path(
    input: Tensor,
    p: float = 0.0,
    training: bool = True,
    scale_by_keep: bool = True,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Zeroes whole samples of a residual *branch*, each with chance p.

    Example:
        >>> y = drop_path(torch.ones(4, 3, 8, 8), 0.5)
        >>> set(y.flatten(1).mean(1).tolist()) <= {0.0, 2.0}
        True

    Args:
        input: floating-point tensor (N, ...): the output of the branch, before the addition.
        p: chance of a sample to be dropped, in [0, 1].
        training: False returns `input`.
        scale_by_keep: multiply the kept samples by 1 / (1 - p).
        generator: source of random numbers; torch's global one by default.

    Reference:
        Larsson et al., 2017, "FractalNet" (https://arxiv.org/abs/1605.07648).
    """
    p = check_probability(as_number("p", p))
    if not training:
        return input
    return drop_samples(input, p, rescale=scale_by_keep, generator=generator)[0]


def stochastic_depth(
    input: Tensor,
    p: float,
    mode: Literal["row", "batch"] = "row",
    training: bool = True,
    *,
    shortcut: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Drops residual branches, each with chance p.

    Without `shortcut`, `input` is the branch, as in ``torchvision.ops.stochastic_depth``. With it,
    `input` is the output of the whole block, and the result is ``shortcut + drop(input -
    shortcut)``: a dropped sample passes the block unchanged.

    Example:
        >>> x = torch.zeros(4, 3)
        >>> y = stochastic_depth(x + 1, 0.5, shortcut=x)
        >>> set(y.flatten().tolist()) <= {0.0, 2.0}
        True

    Args:
        input: floating-point tensor (N, ...).
        p: chance of a sample to be dropped, in [0, 1].
        mode: ``"row"`` decides for each sample, ``"batch"`` for all at once.
        training: False returns `input`.
        shortcut: the input of the block, of the same shape.
        generator: source of random numbers; torch's global one by default.

    Raises:
        ValueError: for p outside [0, 1], an unknown mode, or a shortcut of another shape.

    Reference:
        Huang et al., 2016, "Deep Networks with Stochastic Depth"
        (https://arxiv.org/abs/1603.09382).
    """
    p = check_probability(as_number("p", p))
    if not training:
        return input
    if shortcut is None:
        return drop_samples(input, p, mode, generator=generator)[0]
    return drop_residual(input, shortcut, p, mode, generator=generator)[0]


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
