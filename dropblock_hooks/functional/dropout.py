"""Dropout of elements, channels, samples and residual branches; Gaussian noise.

dropped = rand(units) < p                   a unit is an element, a channel or a sample
y = where(dropped, 0, x / (1 - p))
"""

import math
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ..checks import NON_NEGATIVE, as_number, check_floating, check_option, check_tensor
from .kernels import launch
from .masks import Mask, bernoulli, check_call, in_format_of, keep_scale, normal_like, scaled
from .sparse import Blocks, UnitMask, drop_drawn
from .sparse import draw_units as draw_sparse_units
from .sparse import takes as takes_sparse_form

Mode: TypeAlias = Literal["row", "batch"]
_LARGE = 64  # elements of a unit; a mask of such units is small in relation to the tensor


def drop_units(
    x: Tensor,
    p: float | Tensor,
    axes: int | None = None,
    *,
    rescale: bool = True,
    inplace: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | int]:
    """Drop units: one decision for each place on the first `axes` axes; None means all axes.

    Returns the new tensor, and the number of dropped elements. Compiled code passes the rate as a
    tensor, so that one graph serves all rates. `inplace` and `generator` are not used then.
    """
    shape = _shape_of_units(x, axes)
    if isinstance(p, Tensor):
        mask = bernoulli(shape, p, x.device)
        scale = keep_scale(p) if rescale else None
        y = scaled(x, scale).masked_fill(mask, 0.0)
        return y, Mask(x.numel()).count(mask)

    if p == 0.0 or x.numel() == 0:
        return x, 0

    scale = keep_scale(p) if rescale else None
    number: Tensor | int
    if launch.takes(x):
        try:
            y, number = _drop_with_kernels(x, p, axes, scale, generator)
        except launch.KernelError:  # a warning has told the reason
            y, number = _drop_with_mask(x, p, shape, scale, generator)
    else:
        y, number = _drop_with_mask(x, p, shape, scale, generator)
    return x.copy_(y) if inplace else y, number


def _drop_with_kernels(
    x: Tensor,
    p: float,
    axes: int | None,
    scale: float | None,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor | int]:
    """Drop units on a GPU; see `drop_units`."""
    from .kernels.units import draw_elements, draw_units

    applier: Any
    if axes is None:
        applier, drawn = draw_elements(x, p, generator)
    else:
        applier, drawn = draw_units(x, axes, p, generator)

    return drop_drawn(x, scale, applier, drawn), applier.count(drawn)


def _drop_with_mask(
    x: Tensor,
    p: float,
    shape: tuple[int, ...],
    scale: float | None,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor | int]:
    """Drop units by a mask of this shape, or in the sparse form on a CPU; see `drop_units`."""
    applier: Blocks | Mask
    are_large = x.numel() // math.prod(shape) >= _LARGE
    if not takes_sparse_form(x, "units" if are_large else "blocks"):
        applier = Mask(x.numel())
        drawn = bernoulli(shape, p, x.device, generator)
    elif are_large:
        applier = UnitMask(x.numel())
        drawn = draw_sparse_units(shape, p, generator)
    else:
        # of a unit: 1 on the axes of units, and the whole length on the others
        edges = [length // number for length, number in zip(x.shape, shape, strict=True)]
        applier = Blocks(x, edges)
        drawn = applier.draw(p, generator)

    return drop_drawn(x, scale, applier, drawn), applier.count(drawn)


def _shape_of_units(x: Tensor, axes: int | None) -> tuple[int, ...]:
    """Return the shape of a mask with one decision for each place on the first `axes` axes."""
    if axes is None:
        return tuple(x.shape)
    return (*x.shape[:axes], *[1] * (x.ndim - axes))


def drop_residual(
    block: Tensor,
    shortcut: Tensor,
    p: float | Tensor,
    mode: Mode,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | int]:
    """Drop the branch ``block - shortcut`` of samples, or of the whole batch.

    Returns the new output of the block, and the number of dropped elements.

    Raises:
        ValueError: if the input and the output of the block have different shapes.
    """
    if block.shape != shortcut.shape:
        raise ValueError(
            f"needs a residual block that keeps its shape, got input {tuple(shortcut.shape)} and "
            f"output {tuple(block.shape)}; where the shape changes, use DropPath on the branch"
        )
    if isinstance(p, Tensor):
        return _drop_residual_traced(block, shortcut, p, mode)
    if p == 0.0 or block.numel() == 0:
        return block, 0

    # in at least float32, so that only the result is rounded
    wide = torch.promote_types(block.dtype, torch.float32)
    difference = block.to(wide) - shortcut.to(wide)
    branch, dropped = drop_units(difference, p, int(mode == "row"), generator=generator)
    y = branch.add_(shortcut).to(block.dtype)
    return in_format_of(block, y), dropped


def _drop_residual_traced(
    block: Tensor, shortcut: Tensor, p: Tensor, mode: Mode
) -> tuple[Tensor, Tensor | int]:
    """Drop residual branches in compiled code, which runs this at a rate of 0, too.

    There, ``shortcut + (block - shortcut)`` would be rounded, so `block` itself is scaled.
    """
    shape = _shape_of_units(block, int(mode == "row"))
    mask = bernoulli(shape, p, block.device)
    dropped = Mask(block.numel()).count(mask)

    wide = torch.promote_types(block.dtype, torch.float32)
    wide_shortcut = shortcut.to(wide)
    scale = keep_scale(p).to(wide)
    kept = block.to(wide) * scale + wide_shortcut * (1.0 - scale)
    y = torch.where(mask, wide_shortcut, kept).to(block.dtype)
    return in_format_of(block, y), dropped


def add_noise(x: Tensor, std: float | Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Add normal noise; the new tensor has the type of `x`."""
    if not isinstance(std, Tensor) and std == 0.0:  # reading a tensor may wait
        return x
    noise = normal_like(x, std, generator)
    return (x + noise).to(x.dtype)


def multiply_noise(
    x: Tensor, p: float | Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Multiply by normal noise of mean 1 and variance p / (1 - p)."""
    if not isinstance(p, Tensor) and p == 0.0:  # as in `add_noise`
        return x
    std = (p / (1 - p)) ** 0.5
    noise = normal_like(x, std, generator, mean=1.0)
    return (x * noise).to(x.dtype)


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
        >>> y = dropout(torch.ones(4), 0.5)

    Args:
        input: floating-point tensor of any shape.
        p: chance of an element, channel or sample to be dropped, in [0, 1].
        training: False returns `input`.
        inplace: write the result into `input`.
        generator: source of random numbers, on the CPU or on the device of `input`; torch's global
            one by default.

    Raises:
        TypeError: if `input` is no tensor (in training, no floating-point tensor), or a rate is no
            number.
        ValueError: if an argument is outside its range.

    Reference:
        Srivastava et al., 2014, "Dropout" (https://jmlr.org/papers/v15/srivastava14a.html).
    """
    p = check_call(input, p, training)  # 0 in evaluation, as in the functions below
    return drop_units(input, p, inplace=inplace, generator=generator)[0]


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
        >>> y = dropout1d(torch.ones(2, 3, 8), 0.5)

    Args:
        input: floating-point tensor of the shape (N, C, L).
        p: chance of a channel to be dropped, in [0, 1].
        training: False returns `input`.
        inplace: write the result into `input`.
        generator: source of random numbers, on the CPU or on the device of `input`; torch's global
            one by default.

    Raises:
        TypeError: if `input` is no tensor (in training, no floating-point tensor), or a rate is no
            number.
        ValueError: if an argument is outside its range, or `input` has another number of axes.

    Reference:
        Srivastava et al., 2014, "Dropout" (https://jmlr.org/papers/v15/srivastava14a.html).
    """
    p = check_call(input, p, training, 1)
    return drop_units(input, p, 2, inplace=inplace, generator=generator)[0]


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

    Args:
        input: floating-point tensor of the shape (N, C, H, W).
        p: chance of a channel to be dropped, in [0, 1].
        training: False returns `input`.
        inplace: write the result into `input`.
        generator: source of random numbers, on the CPU or on the device of `input`; torch's global
            one by default.

    Raises:
        TypeError: if `input` is no tensor (in training, no floating-point tensor), or a rate is no
            number.
        ValueError: if an argument is outside its range, or `input` has another number of axes.

    Reference:
        Tompson et al., 2015 (https://arxiv.org/abs/1411.4280).
    """
    p = check_call(input, p, training, 2)
    return drop_units(input, p, 2, inplace=inplace, generator=generator)[0]


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
        >>> y = dropout3d(torch.ones(2, 3, 4, 8, 8), 0.5)

    Args:
        input: floating-point tensor of the shape (N, C, D, H, W).
        p: chance of a channel to be dropped, in [0, 1].
        training: False returns `input`.
        inplace: write the result into `input`.
        generator: source of random numbers, on the CPU or on the device of `input`; torch's global
            one by default.

    Raises:
        TypeError: if `input` is no tensor (in training, no floating-point tensor), or a rate is no
            number.
        ValueError: if an argument is outside its range, or `input` has another number of axes.

    Reference:
        Tompson et al., 2015 (https://arxiv.org/abs/1411.4280).
    """
    p = check_call(input, p, training, 3)
    return drop_units(input, p, 2, inplace=inplace, generator=generator)[0]


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

    Args:
        input: floating-point tensor (N, ...).
        p: chance of a sample to be dropped, in [0, 1].
        training: False returns `input`.
        scale_by_keep: True multiplies the kept samples by 1 / (1 - p).
        generator: source of random numbers, on the CPU or on the device of `input`; torch's global
            one by default.

    Raises:
        TypeError: if `input` is no tensor (in training, no floating-point tensor), or a rate is no
            number.
        ValueError: if an argument is outside its range.

    Reference:
        Larsson et al., 2017, "FractalNet" (https://arxiv.org/abs/1605.07648).
    """
    p = check_call(input, p, training)
    return drop_units(input, p, 1, rescale=scale_by_keep, generator=generator)[0]


def stochastic_depth(
    input: Tensor,
    p: float,
    mode: Mode = "row",
    training: bool = True,
    *,
    shortcut: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """As `drop_path`, or with `shortcut` for the output of the whole block.

    Example:
        >>> x = torch.zeros(4, 3)
        >>> y = stochastic_depth(x + 1, 0.5, shortcut=x)

    Args:
        input: the branch, as in torchvision; with `shortcut`, the output of the whole block.
        p: chance of a sample to be dropped, in [0, 1].
        mode: ``"row"`` decides for each sample, ``"batch"`` for all at once.
        training: False returns `input`.
        shortcut: the input of the block, of the same shape. The result is then
            ``shortcut + drop(input - shortcut)``, so dropped samples pass the block unchanged.
        generator: source of random numbers, on the CPU or on the device of `input`; torch's global
            one by default.

    Raises:
        TypeError: if `input` is no tensor (in training, no floating-point tensor), or a rate is no
            number.
        ValueError: if an argument is outside its range, or `shortcut` has another shape.

    Reference:
        Huang et al., 2016 (https://arxiv.org/abs/1603.09382).
    """
    p = check_call(input, p, training)
    check_option("mode", mode, get_args(Mode))
    if shortcut is None:
        return drop_units(input, p, int(mode == "row"), generator=generator)[0]
    return drop_residual(input, shortcut, p, mode, generator)[0]


def gaussian_noise(
    input: Tensor, std: float, training: bool = True, *, generator: torch.Generator | None = None
) -> Tensor:
    """Adds zero-mean normal noise of standard deviation `std`; otherwise as `dropout`.

    Example:
        >>> y = gaussian_noise(torch.zeros(1000), 0.1)

    Args:
        input: floating-point tensor of any shape.
        std: standard deviation in the units of the tensor, a number >= 0.
        training: False returns `input`.
        generator: source of random numbers, on the CPU or on the device of `input`; torch's global
            one by default.

    Raises:
        TypeError: if `input` is no tensor (in training, no floating-point tensor), or a rate is no
            number.
        ValueError: if an argument is outside its range.

    Reference:
        Bishop, 1995, "Training with Noise is Equivalent to Tikhonov Regularization".
    """
    std = as_number("std", std, allowed=NON_NEGATIVE)
    check_tensor(input)
    if not training:
        return input
    check_floating(input)
    return add_noise(input, std, generator)


def gaussian_dropout(
    input: Tensor, p: float, training: bool = True, *, generator: torch.Generator | None = None
) -> Tensor:
    """As `dropout`, but multiplies by normal noise of mean 1 and variance p / (1 - p), p below 1.

    Example:
        >>> y = gaussian_dropout(torch.ones(1000), 0.2)

    Args:
        input: floating-point tensor of any shape.
        p: sets the variance of the noise to p / (1 - p), a number in [0, 1).
        training: False returns `input`.
        generator: source of random numbers, on the CPU or on the device of `input`; torch's global
            one by default.

    Raises:
        TypeError: if `input` is no tensor (in training, no floating-point tensor), or a rate is no
            number.
        ValueError: if an argument is outside its range.

    Reference:
        Srivastava et al., 2014, section 10 (https://jmlr.org/papers/v15/srivastava14a.html).
    """
    rate = check_call(input, p, training)  # 0 in evaluation, where a p of 1 is refused, too
    if p == 1:
        raise ValueError("p must be in [0, 1), got 1")
    return multiply_noise(input, rate, generator)
