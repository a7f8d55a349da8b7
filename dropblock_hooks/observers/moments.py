"""Sums over the calls of a window: moments, shares, a histogram. Nothing waits for the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ..functional.masks import wide_dtype
from .base import State

KEPT, COUNT, SUM, SQUARES, NORMS, ZEROS, NONFINITE, BINS = range(8)
"""The places in ``state["sums"]``: kept calls, their values, sums of these; shares; the bins."""
_ROW = 4096  # values that are added up in float32
_BITS = {torch.float32: (23, torch.int32), torch.float64: (52, torch.int64)}  # of the mantissa


@dataclass(frozen=True)
class Statistics:
    """The statistics of an epoch. None without values to compute it from."""

    calls: int  # for `WeightStats`, the number of parameters
    left_out: int  # calls with NaN or Inf, left out of the moments, from `values` to `norm`
    values: int  # the number of values
    looked: int  # the number of values in the calls that `zeros` to `histogram` use (``every``)
    histogram: tuple[int, ...]  # the number of magnitudes below, between and above the ``edges``
    mean: float | None = None
    std: float | None = None  # of the population; rough below 1e-4 of the mean
    rms: float | None = None
    largest: float | None = None  # the largest magnitude
    norm: float | None = None  # the mean norm of a call; for `WeightStats`, of all values
    zeros: float | None = None  # the share of values that are exactly zero
    nonfinite: float | None = None  # the share of values that are NaN or Inf
    channels: int | None = None  # their number, if their axis is known
    dead: int | None = None  # channels that were exactly zero in every call
    # of a BatchNorm, the distance of its running mean from the mean of the batches, in running
    # standard deviations; and |log(variance of the batches / running variance)|, each with the eps
    # of the layer; means over channels
    mean_shift: float | None = None
    variance_shift: float | None = None
    norms: Mapping[str, float] = field(default_factory=dict)  # of `WeightStats`, by parameter
    # the norm of the change of each parameter since the epoch began, divided by its norm then
    updates: Mapping[str, float] = field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """Return the numbers for a logger, by name."""
        counted = ("left_out", "dead")
        found = {
            name: value
            for name, value in asdict(self).items()
            if isinstance(value, float) or (name in counted and value is not None)
        }
        found |= {f"norm/{name}": norm for name, norm in self.norms.items()}
        return found | {f"update/{name}": update for name, update in self.updates.items()}


def new_moments(edges: Sequence[float]) -> State:
    """Return an empty state, with a bin between each two edges and one beyond each end."""
    return {
        "sums": torch.zeros(BINS + len(edges) + 1, dtype=torch.float64),
        "largest": torch.zeros((), dtype=torch.float64),
        "looked": 0,  # the number of values in the calls that gave the shares
    }


def add_moments(state: State, x: Tensor, scale: float | Tensor = 1.0) -> None:
    """Add the moments of the values of a call, divided by `scale`."""
    sums = state["sums"]
    if not x.numel():
        sums[KEPT].add_(1)  # its norm is 0
        return
    low, high = torch.aminmax(x)
    largest = torch.maximum(high, -low).to(sums.dtype)
    total, norm = _sum_and_norm(x, largest)
    total, norm, largest = total / scale, norm / scale, largest / scale
    ones = torch.ones_like(norm)
    new = torch.stack((ones, ones * x.numel(), total, norm.square(), norm))
    finite = torch.isfinite(largest)
    sums[KEPT:ZEROS].add_(torch.where(finite, new, 0.0))
    state["largest"].clamp_(min=torch.where(finite, largest, 0.0))


def _sum_and_norm(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """The sum and the norm of the values."""
    wide = wide_dtype(x.device)
    # on the CPU, torch adds up float32 in float64 ten times slower than in float32: so rows of some
    # thousand values are added up in float32, unless they may overflow or cancel
    if x.device.type == "cpu" and x.dtype.itemsize <= 4 and 1e-12 < float(largest) < 1e15:
        in_memory = x.permute(sorted(range(x.ndim), key=x.stride, reverse=True))
        flat = in_memory.reshape(-1).float()
        whole = flat.numel() // _ROW * _ROW
        rows, rest = flat[:whole].view(-1, _ROW), flat[whole:].double()
        total = rows.sum(1).sum(dtype=wide) + rest.sum()
        norm = torch.hypot(vector_norm(vector_norm(rows, dim=1), dtype=wide), vector_norm(rest))
        if float(norm) ** 2 > 1.01 * float(total) ** 2 / x.numel():
            return total, norm
    return x.sum(dtype=wide), vector_norm(x, dtype=wide)


def add_shares(
    state: State, x: Tensor, edges: Sequence[float], scale: float | Tensor = 1.0
) -> None:
    """Count zeros, values that are not finite, and magnitudes by octave (their exponent)."""
    if not x.numel():
        return
    state["looked"] += x.numel()
    x = (x.float() if x.dtype.itemsize < 4 else x) / scale
    bits, ints = _BITS[x.dtype]
    few = 2 ** (8 * x.dtype.itemsize - 1 - bits)
    exponents = ((x.view(ints) >> bits) & (few - 1)).reshape(-1).to(torch.int32)
    if x.device.type == "cpu":
        counts = torch.bincount(exponents, minlength=few)
    else:  # bincount would wait for the device
        counts = torch.histc(exponents, few, 0, few)
    first = int(math.log2(edges[0])) + few // 2 - 1
    last = first + len(edges) - 1
    below, above = counts[:first].sum(0, keepdim=True), counts[last:-1].sum(0, keepdim=True)
    zeros = x.numel() - torch.count_nonzero(x)
    found = torch.stack((zeros, counts[-1])), below - zeros, counts[first:last], above
    state["sums"][ZEROS:].add_(torch.cat(found))


def statistics(state: State) -> Statistics:
    """Return the sums in a state."""
    sums, calls, looked = state["sums"].tolist(), state["calls"], state["looked"]
    values = int(sums[COUNT])
    mean, square = sums[SUM] / max(values, 1), sums[SQUARES] / max(values, 1)
    return Statistics(
        calls=calls,
        left_out=calls - int(sums[KEPT]),
        values=values,
        looked=looked,
        histogram=tuple(map(int, sums[BINS:])),
        mean=mean if values else None,
        std=math.sqrt(max(square - mean * mean, 0.0)) if values else None,
        rms=math.sqrt(square) if values else None,
        largest=state["largest"].item() if values else None,
        norm=sums[NORMS] / sums[KEPT] if sums[KEPT] else None,
        zeros=sums[ZEROS] / looked if looked else None,
        nonfinite=sums[NONFINITE] / looked if looked else None,
    )


def add_alive(state: State, x: Tensor, zero: float = 0.0) -> None:
    """Note which channels of a call (N, C, ...) were alive: had a magnitude above `zero`."""
    flags = state.get("alive")
    if flags is not None and (flags.shape != x.shape[1:2] or flags.device != x.device):
        flags = None  # with another number of channels it begins anew
    if not x.numel() or (flags is not None and flags.device.type == "cpu" and bool(flags.all())):
        return  # nothing to note
    alive = ~(x.abs().amax([0, *range(2, x.ndim)]) <= zero)  # true for NaN
    state["alive"] = alive if flags is None else flags | alive
