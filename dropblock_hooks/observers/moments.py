"""Sums over the calls of a window, in a state: moments, shares and a histogram of magnitudes.

Nothing waits for the device. A call with a value that is not finite is counted, but its values are
left out of the moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..functional.masks import wide_dtype
from .base import State

KEPT, COUNT, SUM, SQUARES, NORMS, ZEROS, NONFINITE, BINS = range(8)
"""The places in ``state["sums"]``: kept calls, their values, sums of these; shares; the bins."""
_BITS = {torch.float32: (23, torch.int32), torch.float64: (52, torch.int64)}  # of the mantissa


def octaves(low: float, high: float) -> tuple[float, ...]:
    """Return the powers of 2 from `low`, rounded down, to `high`, rounded up."""
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    return tuple(2.0**octave for octave in range(first, last + 1))


def new_moments(edges: Sequence[float]) -> State:
    """Return an empty state, with a bin between each two edges and one beyond each end."""
    return {
        "sums": torch.zeros(BINS + len(edges) + 1, dtype=torch.float64),
        "largest": torch.zeros((), dtype=torch.float64),
        "looked": 0,  # the number of values in calls of which the shares were taken
    }


def add_moments(state: State, x: Tensor, scale: float | Tensor = 1.0) -> None:
    """Add the moments of the values of one call, divided by `scale`."""
    sums = state["sums"]
    if not x.numel():
        sums[KEPT].add_(1)  # its norm is 0
        return
    wide = wide_dtype(x.device)
    low, high = torch.aminmax(x)
    largest = torch.maximum(high, -low).to(sums.dtype)
    finite = torch.isfinite(largest)
    unscaled = 1.0 / scale
    norm = torch.linalg.vector_norm(x, dtype=wide) * unscaled
    ones = torch.ones_like(norm)
    total = x.sum(dtype=wide) * unscaled
    new = torch.stack((ones, ones * x.numel(), total, norm.square(), norm))
    sums[KEPT:ZEROS].add_(torch.where(finite, new, 0.0))
    state["largest"].clamp_(min=torch.where(finite, largest * unscaled, 0.0))


def add_shares(
    state: State, x: Tensor, edges: Sequence[float], scale: float | Tensor = 1.0
) -> None:
    """Count zeros, values that are not finite, and magnitudes by octave.

    The exponent of a number tells its octave.
    """
    if not x.numel():
        return
    x = x.float() if x.dtype.itemsize < 4 else x
    if isinstance(scale, Tensor) or scale != 1.0:
        x = x * (1.0 / scale)
    state["looked"] += x.numel()
    bits, ints = _BITS[x.dtype]
    few = 2 ** (8 * x.dtype.itemsize - 1 - bits)
    exponents = ((x.view(ints) >> bits) & (few - 1)).reshape(-1)
    if x.device.type == "cpu":
        counts = torch.bincount(exponents, minlength=few)
    else:  # bincount would wait for the device
        counts = torch.histc(exponents.to(torch.int32), few, 0, few)
    first = int(math.log2(edges[0])) + few // 2 - 1
    last = first + len(edges) - 1
    below, above = counts[:first].sum(0, keepdim=True), counts[last:-1].sum(0, keepdim=True)
    zeros = x.numel() - torch.count_nonzero(x)
    found = torch.stack((zeros, counts[-1])), below - zeros, counts[first:last], above
    state["sums"][ZEROS:].add_(torch.cat(found))
