"""Masks: what is drawn, counted and dropped; shared by all dropouts.

The ``drop_*`` functions return the tensor and how many elements were dropped. A rate is a number;
or a 0-dim tensor, for compiled code, and then nothing depends on its value but values.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Rate: TypeAlias = float | Tensor
_GRAINS = 2**24  # of a float32 draw; an integer: torch.compile takes a global float for an input
_COARSE = 2.0**-10  # below this rate the 24 bits of a float32 draw are off by more than 6e-5 of it


def wide_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # which has no float64


def is_zero(rate: Rate) -> bool:
    """Whether a rate is known to be 0; of a tensor that is not known."""
    return not isinstance(rate, Tensor) and rate == 0.0


def bernoulli(
    shape: Sequence[int], p: Rate, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """A boolean tensor, true with chance p; drawn in float32, finer where p is small."""
    if isinstance(p, Tensor):
        return _dithered(tuple(shape), p, device)
    dtype = torch.float32 if p >= _COARSE else wide_dtype(device)
    if generator is None:  # with the argument, torch picks an overload without symbolic sizes
        return torch.rand(tuple(shape), device=device, dtype=dtype) < p
    return torch.rand(tuple(shape), device=device, dtype=dtype, generator=generator) < p


def _dithered(shape: tuple[int, ...], p: Tensor, device: torch.device) -> Tensor:
    """Drawn in float32 whatever p is, against a threshold for each sample and channel."""
    coin = torch.rand((*shape[:2], *[1] * len(shape[2:])), device=device, dtype=torch.float32)
    threshold = dithered_threshold(p.to(wide_dtype(device)), coin)
    return torch.rand(shape, device=device, dtype=torch.float32) < threshold


def dithered_threshold(p: Tensor, coin: Tensor) -> Tensor:
    """P in whole grains of a float32 draw, rounded up or down by a uniform coin: p on average.

    So a small p is met as exactly as by a finer draw.
    """
    return ((p * _GRAINS + coin).floor() / _GRAINS).to(torch.float32)


def keep_scale(p: Rate) -> Tensor:
    """1 / (1 - p) in float32: what kept values are multiplied by on average; 0 at p = 1."""
    if isinstance(p, Tensor):
        return torch.where(p < 1, 1 / (1 - p), 0.0).to(torch.float32)
    return torch.tensor(1 / (1 - p) if p < 1 else 0.0, dtype=torch.float32, device="cpu")


def count_ratio(total: int, kept: Tensor, eps: float) -> Tensor:
    """The ratio total / kept in float32, counted exactly; 0 where nothing is kept."""
    ratio = total / kept.to(wide_dtype(kept.device)).clamp_min(max(eps, 1e-30))
    return torch.where(kept > 0, ratio, 0.0).to(torch.float32)


def scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """A new tensor ``x * scale``: the product in float32 or more, rounded once."""
    if scale is None:
        return x.clone()  # keeps the memory format
    on_cpu = x.device.type == scale.device.type == "cpu"
    if on_cpu and scale.ndim == 0 and not torch.compiler.is_compiling():
        return x * scale  # where a number on the CPU is not cast to the type of x first
    return ((x.float() if x.dtype.itemsize < 4 else x) * scale).to(x.dtype)


def drop(
    x: Tensor, mask: Tensor, scale: Tensor | None, inplace: bool = False, fill: float = 0
) -> Tensor:
    """`fill` where `mask`, ``x * scale`` elsewhere: the product in float32, rounded once."""
    y = scaled(x, scale).masked_fill_(mask, fill)  # in place: masked_fill need not keep the format
    return x.copy_(y) if inplace else y


def nothing(summand: bool) -> float:
    """What is put where all is dropped: 0, or in a summand -0.0, which adds nothing to -0.0 too."""
    return -0.0 if summand else 0.0
