"""Sums of what a site has seen, on the device: of the open window, and of the one before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..functional.masks import wide_dtype
from .statistics import Statistics

CALLS, KEPT, COUNT, SUM, SQUARES, NORMS, LOOKS, LOOKED, ZEROS, NONFINITE, BINS = range(11)
LARGEST, CHANNELS = range(2)
CAPACITY = 8192
"""Channels that are watched one by one; of more, none is."""
_ROW = 4096  # float32 sums of so many values are exact enough, added up in float64
_SMALL = 2**15  # values that are cheaper in float64 than with more calls
_BITS = {torch.float32: (23, torch.int32), torch.float64: (52, torch.int64)}  # of the mantissa
_WORD = 32  # flags that are read as one number


class Zone(NamedTuple):
    """Where an activation is flat: at both its bounds, ``|x - centre| >= radius``; or, `within`,
    where ``|x - centre| <= radius``.
    """

    centre: float
    radius: float
    within: bool = False

    def holds(self, x: Tensor, high: Tensor, low: Tensor) -> Tensor:
        """Of each channel of (N, C, ...), whether all its values lie there.

        Args:
            x: the values.
            high: the largest of each channel.
            low: the smallest.
        """
        if self.within:
            return (high <= self.centre + self.radius) & (low >= self.centre - self.radius)
        far = (x - self.centre).abs_()
        return _over_channels(far, torch.amin) >= self.radius


class Moments:
    """Sums of values over a window, added to in place; nothing waits for the device.

    A call with a value that is not finite is left out of the sums, and counted. All tensors hold
    the open window in row 0, and the one that was closed last in row 1.

    Args:
        octaves: the first and the last of the edges of bins for magnitudes, as powers of 2; a bin
            is an octave.
        units: whether channels are watched one by one: which were never other than zero, and which
            never left the zone where their activation is flat.

    Attributes:
        sums: what is added up: calls, values, squares, shares, bins.
        most: the largest magnitude and the number of channels.
        live: of each channel, whether a value was not zero.
        moved: of each channel, whether a value lay outside of the zone.
        turn: eager calls in the open window.
    """

    def __init__(self, octaves: tuple[int, int] = (-27, 14), units: bool = False) -> None:
        self.first, self.last = octaves
        capacity = CAPACITY if units else 0
        with torch.inference_mode(False), torch.device("cpu"):
            self.sums = torch.zeros(2, BINS + self.last - self.first + 2, dtype=torch.float64)
            self.most = torch.zeros(2, 2, dtype=torch.float64)
            self.live = torch.zeros(2, capacity, dtype=torch.bool)
            self.moved = torch.zeros(2, capacity, dtype=torch.bool)
        self.turn = 0
        self._words: list[Tensor] = []

    def to(self, device: torch.device) -> None:
        """Follow the values to their device."""
        if self.sums.device == device or device.type == "meta":
            return
        with torch.inference_mode(False):
            wide = wide_dtype(device)
            self.sums, self.most = self.sums.to(device, wide), self.most.to(device, wide)
            self.live, self.moved = self.live.to(device), self.moved.to(device)

    def add(
        self,
        x: Tensor,
        every: int,
        channels: Tensor | None = None,
        zone: Zone | None = None,
        scale: float | Tensor = 1.0,
    ) -> bool:
        """One more call; whether it was looked at closely.

        Args:
            x: its values.
            every: shares and bins are taken at every so many calls; in compiled code at each of
                them, of one in so many samples.
            channels: the same values as (N, C, ...), where the channels are known.
            zone: where the activation is flat.
            scale: what the values were multiplied by.
        """
        self.to(x.device)
        if is_compiling():
            looked: Tensor | None = x[::every] if x.ndim else x
        else:
            x = _in_memory_order(x)
            looked = None if self.turn % every else x
            self.turn += 1
        self.sums[0, CALLS].add_(1)
        if not x.numel():
            self.sums[0, KEPT].add_(1)
            return False
        low, high = torch.aminmax(x)
        if channels is not None:
            self._see_units(channels, zone)
        largest = torch.maximum(high, -low).to(self.sums.dtype)
        total, squares = _sums(x, largest)
        finite = torch.isfinite(total)
        unscaled = 1.0 / scale
        sums = torch.stack(
            (
                torch.ones_like(total),
                torch.full_like(total, x.numel()),
                total * unscaled,
                squares * unscaled * unscaled,
                squares.sqrt() * unscaled,
            )
        )
        self.sums[0, KEPT:LOOKS].add_(torch.where(finite, sums, 0.0))
        self.most[0, LARGEST].clamp_(min=torch.where(finite, largest * unscaled, 0.0))
        if looked is not None:
            self._look(looked, scale)
        return looked is not None

    def _see_units(self, x: Tensor, zone: Zone | None) -> None:
        """Note which channels were not zero, and which were not flat."""
        count = x.shape[1]
        self.most[0, CHANNELS].clamp_(min=count)
        if count > self.live.shape[1]:
            return
        live, moved = self.live[0, :count], self.moved[0, :count]
        on_host = x.device.type == "cpu" and not is_compiling()
        if on_host and bool(live.all()) and (zone is None or bool(moved.all())):
            return  # nothing more to note in this window
        high, low = _over_channels(x, torch.amax), _over_channels(x, torch.amin)
        live.logical_or_((high != 0) | (low != 0))  # a NaN is not zero either
        if zone is not None:
            moved.logical_or_(~zone.holds(x, high, low))

    def _look(self, x: Tensor, scale: float | Tensor) -> None:
        """Count zeros, what is not finite, and magnitudes by bins."""
        x = x.float() if x.dtype.itemsize < 4 else x
        if isinstance(scale, Tensor) or scale != 1.0:
            x = x * (1.0 / scale)  # in float32 or more
        zeros, n = x.numel() - torch.count_nonzero(x), x.numel()
        if is_compiling():
            finite = torch.isfinite(x)
            nonfinite = (~finite).sum()
            bins = self._compared(torch.where(finite, x.abs(), 0.0))
            bins[0] -= nonfinite
        else:
            bins, nonfinite = self._binned(x)
        bins[0] -= zeros
        looks = torch.stack((torch.ones_like(zeros), torch.full_like(zeros, n), zeros, nonfinite))
        self.sums[0, LOOKS:BINS].add_(looks)
        self.sums[0, BINS:].add_(bins)

    def _binned(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """How many lie in each bin, zeros in the first one; and how many are not finite.

        The bins are octaves, so the exponent of a number tells its bin.
        """
        bits, ints = _BITS[x.dtype]
        few = 2 ** (8 * x.dtype.itemsize - 1 - bits)
        exponents = (x.contiguous().view(ints) >> bits) & (few - 1)
        if x.device.type == "cpu":
            counts = torch.bincount(exponents.view(-1), minlength=few)
        else:  # which waits for nothing
            counts = torch.histc(exponents.view(-1).to(torch.int32), few, 0, few)
        first, last = self.first + few // 2 - 1, self.last + few // 2 - 1
        ends = counts[:first].sum(0, keepdim=True), counts[last:-1].sum(0, keepdim=True)
        return torch.cat((ends[0], counts[first:last], ends[1])), counts[-1]

    def _compared(self, sizes: Tensor) -> Tensor:
        """The same of finite magnitudes, for a compiler, which makes one loop of it."""
        octaves = torch.arange(self.first, self.last + 1, device=sizes.device)
        above = (sizes.reshape(-1, 1) >= torch.exp2(octaves.to(sizes.dtype))).sum(0)
        first, last = above.new_full((1,), sizes.numel()), above.new_zeros(1)
        return torch.cat((first, above)) - torch.cat((above, last))

    def close(self) -> None:
        """Begin a new window."""
        for tensor in (self.sums, self.most, self.live, self.moved):
            tensor[1].copy_(tensor[0])
            tensor[0].zero_()
        self.turn = 0

    def tensors(self) -> list[Tensor]:
        """What `read` needs; flags by words."""
        self._words = [_words(self.live), _words(self.moved)]
        return [self.sums, self.most, *self._words]

    def read(self, numbers: Mapping[int, list[float]], zone: bool = True) -> Statistics | None:
        """The open window, or, where nothing was seen in it, the one before; None of neither.

        Args:
            numbers: of each of its `tensors`, by identity.
            zone: whether a zone was given.
        """
        tensors = [self.sums, self.most, *self._words]
        self._words = []
        rows = [_rows(numbers[id(tensor)]) for tensor in tensors]
        for sums, most, alive, moved in zip(*rows, strict=True):
            if sums[CALLS]:
                return statistics_of(sums, most, _bits(alive), _bits(moved), zone)
        return None

    def state_dict(self) -> dict[str, Tensor]:
        """What is saved: both windows."""
        return {
            "sums": self.sums,
            "most": self.most,
            "live": _words(self.live),
            "moved": _words(self.moved),
            "turn": torch.tensor(self.turn, device="cpu"),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what was saved."""
        self.sums.copy_(state["sums"])
        self.most.copy_(state["most"])
        self.live.copy_(_flags(state["live"]))
        self.moved.copy_(_flags(state["moved"]))
        self.turn = int(state["turn"])


def statistics_of(
    sums: Sequence[float], most: Sequence[float], alive: int, moved: int, zone: bool
) -> Statistics:
    """What the sums of a window come to."""
    values, looked = int(sums[COUNT]), int(sums[LOOKED])
    mean = std = rms = norm = largest = None
    if values:
        mean, square = sums[SUM] / values, sums[SQUARES] / values
        rms, std = math.sqrt(square), math.sqrt(max(square - mean * mean, 0.0))
        largest = most[LARGEST]
    if sums[KEPT]:
        norm = sums[NORMS] / sums[KEPT]  # that of an empty call is 0
    found = int(most[CHANNELS])
    channels = found if 0 < found <= CAPACITY else None
    return Statistics(
        calls=int(sums[CALLS]),
        left_out=int(sums[CALLS] - sums[KEPT]),
        values=values,
        mean=mean,
        std=std,
        rms=rms,
        largest=largest,
        norm=norm,
        looked=looked,
        zeros=sums[ZEROS] / looked if looked else None,
        nonfinite=sums[NONFINITE] / looked if looked else None,
        histogram=tuple(map(int, sums[BINS:])),
        channels=channels,
        dead=None if channels is None else channels - alive.bit_count(),
        saturated=None if channels is None or not zone else channels - moved.bit_count(),
        unwatched=f"its channels are {found}, more than {CAPACITY}" if found > CAPACITY else "",
        alive=alive,
        moved=moved,
    )


def _sums(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the values and that of their squares, as exact as float64 has them.

    On the CPU, where float32 is added up several times as fast: in float32 by short rows, if that
    is exact enough for these values.
    """
    wide = wide_dtype(x.device)
    if x.device.type != "cpu" or is_compiling():
        total = x.sum(dtype=wide)
        if is_compiling():
            return total, x.to(wide).square().sum()
        return total, torch.linalg.vector_norm(x, dtype=wide).square()
    if x.numel() > _SMALL and x.dtype.itemsize <= 4:
        total, squares = _sums_by_rows(x.float())
        if _is_exact(float(total), float(squares), float(largest), x.numel()):
            return total, squares
    x = x.to(wide)
    return x.sum(), torch.dot(x, x)


def _sums_by_rows(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The same of float32 values, by rows."""
    whole = len(flat) // _ROW * _ROW
    rows, rest = flat[:whole].view(-1, _ROW), flat[whole:].double()
    total = rows.sum(1).sum(dtype=torch.float64) + rest.sum()
    norms = torch.linalg.vector_norm(rows, dim=1).double()
    return total, torch.dot(norms, norms) + torch.dot(rest, rest)


def _is_exact(total: float, squares: float, largest: float, n: int) -> bool:
    """Whether float32 does for sums of these values: their squares neither too large nor too small
    for it, and their deviation not small against their mean.
    """
    if not math.isfinite(largest):
        return True  # it is left out
    mean, square = total / n, squares / n
    return (1e-12 < largest < 1e15 or largest == 0.0) and mean * mean <= 0.99 * square


def _in_memory_order(x: Tensor) -> Tensor:
    """All values in one row: a view wherever they lie side by side."""
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda axis: -strides[axis])
    return x.permute(order).reshape(-1)


def _over_channels(x: Tensor, reduce: Any) -> Tensor:
    """A reduction of (N, C, ...) to (C,)."""
    within: Tensor = reduce(x.flatten(2), 2) if x.ndim > 2 else x
    found: Tensor = reduce(within, 0)
    return found


def _words(flags: Tensor) -> Tensor:
    """Flags as integers of so many bits."""
    bits = torch.arange(_WORD, device=flags.device)
    return (flags.view(len(flags), -1, _WORD).long() << bits).sum(-1)


def _flags(words: Tensor) -> Tensor:
    """The inverse."""
    bits = torch.arange(_WORD, device=words.device)
    return ((words[..., None] >> bits) & 1).bool().flatten(1)


def _bits(words: Sequence[float]) -> int:
    """Words as one integer."""
    return sum(int(word) << (_WORD * place) for place, word in enumerate(words))


def _rows(numbers: list[float]) -> tuple[list[float], list[float]]:
    half = len(numbers) // 2
    return numbers[:half], numbers[half:]
