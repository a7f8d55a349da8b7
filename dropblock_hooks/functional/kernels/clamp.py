"""Bounds of gradients by value on a GPU, by one kernel.

    y = clamp(x, low * scale, high * scale)     scale is the factor of the loss
    changed = number of values with y != x
    largest = max(abs(x)) / scale               with one bound, of the values on its side

Inf and NaN stay unchanged. The kernel computes in float32, so it gets no float64.

`functional.gradients.clamp_measured` calls `clamp`, or does the same in torch operations.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .clip import loss_scale

_SIZE = 4096  # elements of a program


@triton.jit
def _clamp_kernel(
    x,
    y,
    numbers,
    scale,
    low,
    high,
    largest_finite,
    n_elements,
    HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
    SCALE_ON_DEVICE: tl.constexpr,
    SIZE: tl.constexpr,
    BIG: tl.constexpr,
):
    """Clamp finite values, count the changed ones, and find the largest magnitude.

    `numbers` has two places. The first is the count, an int64. The second has the bits of the
    largest magnitude, a float64. Magnitudes are not negative, so their bits have the order of the
    numbers, and an atomic maximum of integers finds the largest one.
    """
    factor = loss_scale(scale, SCALE_ON_DEVICE).to(tl.float32)
    program = tl.program_id(0)
    if BIG:
        program = program.to(tl.int64)
    place = program * SIZE + tl.arange(0, SIZE)
    exists = place < n_elements
    value = tl.load(x + place, mask=exists, other=0.0).to(tl.float32)
    finite = tl.abs(value) < float("inf")

    clamped = value
    magnitude = tl.abs(value)
    if HAS_LOW:
        clamped = tl.maximum(clamped, tl.full([], low, tl.float32) * factor)
        if not HAS_HIGH:
            magnitude = tl.maximum(-value, 0.0)
    if HAS_HIGH:
        clamped = tl.minimum(clamped, tl.full([], high, tl.float32) * factor)
        if not HAS_LOW:
            magnitude = tl.maximum(value, 0.0)
    highest = tl.full([], largest_finite, tl.float32)  # a larger bound is Inf in the dtype of `y`
    clamped = tl.minimum(tl.maximum(clamped, -highest), highest)
    clamped = tl.where(finite, clamped, value)
    result = clamped.to(y.dtype.element_ty)
    tl.store(y + place, result, mask=exists)

    changed = finite & exists & (result.to(tl.float32) != value)
    tl.atomic_add(numbers, tl.sum(changed.to(tl.int64), axis=0))
    seen = tl.where(value != value, float("inf"), magnitude)  # a NaN is larger than all
    largest = tl.max(seen, axis=0).to(tl.float64) / factor.to(tl.float64)
    tl.atomic_max(numbers + 1, largest.to(tl.int64, bitcast=True))


def clamp(
    x: Tensor, low: float | None, high: float | None, scale: float | Tensor = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the clamped tensor, the number of changed values, and the largest magnitude.

    Args:
        x: the gradient.
        low: lower bound; None for no bound.
        high: upper bound; None for no bound. With one bound only, the largest magnitude is
            the largest one on its side.
        scale: the factor of the loss, by which the bounds are multiplied and the magnitude divided.
    """
    y = torch.empty_like(x)
    if x.stride() != y.stride():  # the kernel reads and writes the same places in memory
        x = torch.empty_like(y).copy_(x)
    numbers = launch.zeros(x.device, 2)
    launch.start(
        _clamp_kernel,
        launch.parts(x.numel(), _SIZE),
        x.device,
        x,
        y,
        numbers,
        scale,
        0.0 if low is None else low,
        0.0 if high is None else high,
        torch.finfo(x.dtype).max,
        x.numel(),
        HAS_LOW=low is not None,
        HAS_HIGH=high is not None,
        SCALE_ON_DEVICE=isinstance(scale, Tensor),
        SIZE=_SIZE,
        BIG=launch.is_big(x.numel()),
    )
    return y, numbers[0], numbers.view(torch.float64)[1]
