"""Random masks and noise, and their application to a tensor; shared by all dropouts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import PROBABILITY, as_number, check_floating, check_tensor

_AXES = {1: "N, C, L", 2: "N, C, H, W", 3: "N, C, D, H, W"}  # by the number of spatial axes
_COARSE = 2.0**-10
"""For a smaller rate, drawing in float32 (24 bits) makes a relative error above 6e-5."""


def check_call(input: Any, p: float, training: bool, spatial: int | None = None) -> float:
    """Check the arguments, and return the rate to apply: 0 in evaluation.

    Raises:
        TypeError: if `input` is no tensor (in training, no floating-point tensor), or `p` is no
            number.
        ValueError: if `p` is outside [0, 1], or `input` has not `spatial` + 2 axes.
    """
    if isinstance(input, torch.fx.Proxy):
        raise TypeError(
            "torch.fx can't trace this function, which computes with the shape of its input: make "
            "the module that calls it a leaf (Tracer.is_leaf_module), or use torch.export"
        )

    p = as_number("p", p, allowed=PROBABILITY)
    check_tensor(input)

    if spatial is not None and input.ndim != spatial + 2:
        axes = _AXES[spatial]
        shape = tuple(input.shape)
        raise ValueError(f"input must be a {spatial + 2}-D tensor ({axes}), got shape {shape}")

    if not training:
        return 0.0
    check_floating(input)
    return p


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device that has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def generator_on(device: torch.device, generator: torch.Generator | None) -> torch.Generator | None:
    """Return a generator for a device; a CPU generator draws the seed of a new one there."""
    if generator is None or generator.device.type == device.type:
        return generator
    if generator.device.type != "cpu" or device.type == "meta":
        # torch refuses a generator of another accelerator, and the meta device draws no numbers
        return generator
    seed = int(torch.randint(2**62, (), device="cpu", generator=generator))
    return torch.Generator(device).manual_seed(seed)


def bernoulli(
    shape: Sequence[int],
    p: float | Tensor,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a boolean tensor that is True with chance p, in float32, or in float64 for a small p.

    A chance in a tensor is not read. Then the numbers are drawn in float32, so the chance is wrong
    by up to 6e-8, and a generator is not used.
    """
    sizes = tuple(shape)
    if isinstance(p, Tensor):
        return torch.rand(sizes, device=device, dtype=torch.float32) < p

    dtype = torch.float32 if p >= _COARSE else wide_dtype(device)
    if generator is None:  # with the argument, torch picks an overload without symbolic sizes
        uniform = torch.rand(sizes, device=device, dtype=dtype)
    else:
        generator = generator_on(device, generator)
        uniform = torch.rand(sizes, device=device, dtype=dtype, generator=generator)
    return uniform < p


def normal_like(
    x: Tensor, std: float | Tensor, generator: torch.Generator | None, mean: float = 0.0
) -> Tensor:
    """Draw normal noise in at least float32, in the memory format of `x`.

    A seed gives each place the same number in every memory format.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    generator = generator_on(x.device, generator)
    if not isinstance(std, Tensor):
        empty = torch.empty(x.shape, dtype=dtype, device=x.device)
        noise = empty.normal_(mean, std, generator=generator)
        return in_format_of(x, noise)

    # for compiled code, which fuses these operators, and for Disout, whose std is always a tensor
    if generator is None:
        noise = torch.randn(x.shape, dtype=dtype, device=x.device) * std.to(dtype)
    else:
        empty = torch.empty(x.shape, dtype=dtype, device=x.device)
        noise = empty.normal_(generator=generator) * std
    if mean:
        noise = noise + mean
    return in_format_of(x, noise)


def uniform_like(
    x: Tensor, bound: float | Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Draw uniform noise in ±bound in at least float32, in the memory format of `x`.

    A seed gives each place the same number in every memory format. With a bound in a tensor, a
    generator is not used.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    generator = generator_on(x.device, generator)
    if not isinstance(bound, Tensor):
        empty = torch.empty(x.shape, dtype=dtype, device=x.device)
        return in_format_of(x, empty.uniform_(-bound, bound, generator=generator))

    # in compiled code, which fuses these operators
    noise = (torch.rand(x.shape, dtype=dtype, device=x.device) * 2 - 1) * bound.to(dtype)
    return in_format_of(x, noise)


def in_format_of(x: Tensor, y: Tensor) -> Tensor:
    """Return `y` in the memory format of ``torch.empty_like(x)``: itself, or a copy."""
    like = torch.empty_like(x, dtype=y.dtype)
    if like.stride() == y.stride():
        return y
    return like.copy_(y)


def keep_scale(p: Any) -> Any:
    """Return the factor 1 / (1 - p) of the kept elements, as a number or a tensor like `p`."""
    if isinstance(p, Tensor):
        # finite at p = 1, because the backward multiplies a gradient of 0 by it, and 0 * inf is NaN
        return 1 / (1 - p).clamp_min(1e-30)
    return 1 / (1 - p) if p < 1 else 0.0


def count_ratio(total: int, kept: Tensor | int, eps: float) -> Tensor | float:
    """Return total / max(kept, eps); 0 for kept = 0."""
    least = max(eps, 1e-30)  # not 0, which would be a division by zero
    if isinstance(kept, int):
        return total / max(kept, least) if kept else 0.0

    divisor = kept.to(wide_dtype(kept.device)).clamp_min(least)
    ratio = torch.full_like(divisor, total) / divisor
    return torch.where(kept > 0, ratio, 0.0)


def scaled(x: Tensor, scale: float | Tensor | None) -> Tensor:
    """Return a new tensor ``x * scale``, computed in at least float32 and rounded once."""
    if scale is None:
        return x.clone()
    if isinstance(scale, float):  # torch multiplies by a number in at least float32
        return x * scale

    wide = torch.promote_types(x.dtype, torch.float32)
    product = x.to(wide) * scale.to(wide)
    return product.to(x.dtype)


class Mask:
    """Applies a boolean mask that broadcasts to a tensor of `numel` elements.

    It has the methods of `sparse.Blocks`. Here, `drawn` is the mask itself.
    """

    # whether `drop` computes the factor (all / kept elements) itself if no scale is given;
    # `drop_blocks` asks this
    has_counts = False

    def __init__(self, numel: int) -> None:
        self.numel = numel

    def count(self, drawn: Tensor) -> Tensor:
        """Return the number of dropped elements."""
        elements_of_value = self.numel // max(drawn.numel(), 1)  # that a value of the mask covers
        return drawn.sum() * elements_of_value

    def mask(self, drawn: Tensor) -> Tensor:
        """Return `drawn`, which is the mask itself."""
        return drawn

    def drop(self, x: Tensor, scale: float | Tensor | None, drawn: Tensor) -> Tensor:
        """Return ``x * scale`` with 0 where the mask is True, in the memory format of `x`."""
        return scaled(x, scale).masked_fill_(drawn, 0.0)

    def keep(self, noise: Tensor, drawn: Tensor) -> Tensor:
        """Write 0 into a tensor where the mask is False; return the tensor."""
        return noise.masked_fill_(~drawn, 0.0)
