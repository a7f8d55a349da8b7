"""Sums over the values of a window, on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional.masks import wide_dtype
from .base import new_zeros
from .statistics import Statistics

KEPT, COUNT, SUM, SQUARES, NORMS, ZEROS, NONFINITE, BINS = range(8)
CAPACITY = 8192
"""Layers with more channels than this are not watched channel by channel."""
_BITS = {torch.float32: (23, torch.int32), torch.float64: (52, torch.int64)}  # of the mantissa


class Zone(NamedTuple):
    """Where an activation is flat: at both its bounds, ``|x - centre| >= radius``; or, `within`,
    where ``|x - centre| <= radius``.
    """

    centre: float
    radius: float
    within: bool = False

    def holds(self, x: Tensor, high: Tensor, low: Tensor) -> Tensor:
        """Return for each channel of (N, C, ...) whether all its values lie in the zone.

        Args:
            x: the values.
            high: the largest of each channel.
            low: the smallest.
        """
        if self.within:
            return (high <= self.centre + self.radius) & (low >= self.centre - self.radius)
        return _over_channels((x - self.centre).abs_(), torch.amin) >= self.radius


class Moments:
    """Sums over the calls of one window. Nothing waits for the device.

    A call with a value that is not finite is counted, but its values are left out.

    Args:
        octaves: the first and the last edge of the bins of magnitudes, as powers of 2. Each bin is
            an octave.
        units: whether single channels are watched.

    Attributes:
        calls: the number of calls.
        looked: the number of values in calls that were looked at closely.
        channels: the number of channels; 0 if they are not known.
        sums: kept calls, values, their sums and shares, and the bins.
        largest: the largest magnitude.
        alive: for each channel, whether any value was not zero.
        moved: for each channel, whether any value lay outside of the zone.
    """

    def __init__(self, octaves: tuple[int, int] = (-27, 14), units: bool = False) -> None:
        self.first, self.last = octaves
        self.units = units
        self.calls = self.looked = self.channels = 0
        with torch.inference_mode(False), torch.device("cpu"):
            self.sums = torch.zeros(BINS + self.last - self.first + 2, dtype=torch.float64)
            self.largest = torch.zeros((), dtype=torch.float64)
            self.alive = self.moved = torch.zeros(0, dtype=torch.bool)

    def to(self, device: torch.device) -> None:
        """Move to the device of the values."""
        if self.sums.device == device or device.type == "meta":
            return
        with torch.inference_mode(False):
            wide = wide_dtype(device)
            self.sums, self.largest = self.sums.to(device, wide), self.largest.to(device, wide)
            self.alive, self.moved = self.alive.to(device), self.moved.to(device)

    def add(
        self,
        x: Tensor,
        every: int = 1,
        channels: Tensor | None = None,
        zone: Zone | None = None,
        scale: float | Tensor = 1.0,
    ) -> bool:
        """Add one call; return whether it was looked at closely.

        Args:
            x: the values.
            every: zeros and bins are counted at each n-th call, the first included.
            channels: a view of the values as (N, C, ...), if the channels are known.
            zone: where the activation is flat.
            scale: the factor of the values.
        """
        self.to(x.device)
        looks = self.calls % every == 0
        self.calls += 1
        if not x.numel():
            self.sums[KEPT].add_(1)  # its norm is 0
            return False
        if channels is not None and self.units:
            self._add_channels(channels, zone)
        low, high = torch.aminmax(x)
        largest = torch.maximum(high, -low).to(self.sums.dtype)
        finite = torch.isfinite(largest)
        total, norm = _sum_and_norm(x)
        unscaled = 1.0 / scale
        norm = norm * unscaled
        ones = torch.ones_like(norm)
        sums = torch.stack((ones, ones * x.numel(), total * unscaled, norm.square(), norm))
        self.sums[KEPT:ZEROS].add_(torch.where(finite, sums, 0.0))
        self.largest.clamp_(min=torch.where(finite, largest * unscaled, 0.0))
        if looks:
            self._look(x, scale)
        return looks

    def _add_channels(self, x: Tensor, zone: Zone | None) -> None:
        """Note which channels were not zero, and which were not flat."""
        self.channels = max(self.channels, x.shape[1])
        if self.channels > CAPACITY:
            return
        if len(self.alive) < self.channels:
            more = new_zeros(self.channels - len(self.alive), like=x, dtype=torch.bool)
            self.alive, self.moved = torch.cat((self.alive, more)), torch.cat((self.moved, more))
        alive, moved = self.alive[: x.shape[1]], self.moved[: x.shape[1]]
        if x.device.type == "cpu" and bool(alive.all()) and (zone is None or bool(moved.all())):
            return  # nothing more to note in this window
        high, low = _over_channels(x, torch.amax), _over_channels(x, torch.amin)
        alive.logical_or_((high != 0) | (low != 0))  # a NaN is not zero either
        if zone is not None:
            moved.logical_or_(~zone.holds(x, high, low))

    def _look(self, x: Tensor, scale: float | Tensor) -> None:
        """Count zeros, values that are not finite, and magnitudes by octave.

        The exponent of a number tells its octave.
        """
        x = x.float() if x.dtype.itemsize < 4 else x
        if isinstance(scale, Tensor) or scale != 1.0:
            x = x * (1.0 / scale)
        self.looked += x.numel()
        bits, ints = _BITS[x.dtype]
        few = 2 ** (8 * x.dtype.itemsize - 1 - bits)
        exponents = ((x.view(ints) >> bits) & (few - 1)).reshape(-1)
        if x.device.type == "cpu":
            counts = torch.bincount(exponents, minlength=few)
        else:  # bincount would wait for the device
            counts = torch.histc(exponents.to(torch.int32), few, 0, few)
        first, last = self.first + few // 2 - 1, self.last + few // 2 - 1
        below, above = counts[:first].sum(0, keepdim=True), counts[last:-1].sum(0, keepdim=True)
        zeros = x.numel() - torch.count_nonzero(x)
        found = torch.stack((zeros, counts[-1])), below - zeros, counts[first:last], above
        self.sums[ZEROS:].add_(torch.cat(found))

    def tensors(self) -> list[Tensor]:
        """Return what `read` needs."""
        return [self.sums, self.largest, self.alive, self.moved]

    def read(self, numbers: Mapping[int, list[float]], zone: bool = True) -> Statistics:
        """Return the sums as `Statistics`.

        Args:
            numbers: the values of each of its `tensors`, by ``id``.
            zone: whether a zone was given.
        """
        sums, (largest,), alive, moved = (numbers[id(each)] for each in self.tensors())
        values = int(sums[COUNT])
        mean = std = rms = norm = None
        if values:
            mean, square = sums[SUM] / values, sums[SQUARES] / values
            rms, std = math.sqrt(square), math.sqrt(max(square - mean * mean, 0.0))
        if sums[KEPT]:
            norm = sums[NORMS] / sums[KEPT]
        looked, channels = self.looked, self.channels
        known = 0 < channels <= CAPACITY
        were_alive, had_moved = _bits(alive), _bits(moved)
        return Statistics(
            calls=self.calls,
            left_out=self.calls - int(sums[KEPT]),
            values=values,
            mean=mean,
            std=std,
            rms=rms,
            largest=largest if values else None,
            norm=norm,
            looked=looked,
            zeros=sums[ZEROS] / looked if looked else None,
            nonfinite=sums[NONFINITE] / looked if looked else None,
            histogram=tuple(map(int, sums[BINS:])),
            channels=channels if known else None,
            dead=channels - were_alive.bit_count() if known else None,
            saturated=channels - had_moved.bit_count() if known and zone else None,
            unwatched=""
            if channels <= CAPACITY
            else f"its channels are {channels}, more than {CAPACITY}",
            alive=were_alive,
            moved=had_moved,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return what is saved."""
        counts = torch.tensor([self.calls, self.looked, self.channels], device="cpu")
        return {
            "counts": counts,
            "sums": self.sums,
            "largest": self.largest,
            "alive": self.alive,
            "moved": self.moved,
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what was saved."""
        self.calls, self.looked, self.channels = map(int, state["counts"])
        self.sums.copy_(state["sums"])
        self.largest.copy_(state["largest"])
        device = self.sums.device
        self.alive, self.moved = state["alive"].to(device), state["moved"].to(device)


def _sum_and_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the values and the root of the sum of their squares, in float64."""
    wide = wide_dtype(x.device)
    return x.sum(dtype=wide), torch.linalg.vector_norm(x, dtype=wide)


def _over_channels(x: Tensor, reduce: Any) -> Tensor:
    """Reduce (N, C, ...) to (C,)."""
    within: Tensor = reduce(x.flatten(2), 2) if x.ndim > 2 else x
    found: Tensor = reduce(within, 0)
    return found


def _bits(flags: list[float]) -> int:
    """Return flags as the bits of one integer."""
    return sum(1 << place for place, flag in enumerate(flags) if flag)
