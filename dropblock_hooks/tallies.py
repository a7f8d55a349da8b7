"""What a site counts: numbers in eager mode, one tensor in compiled code."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from .functional.masks import wide_dtype

Sizes = tuple[tuple[int, ...], tuple[int, ...]]
"""The smallest and the largest map seen, per axis."""


@dataclass
class Tally:
    """How many elements passed, and how many were dropped or changed."""

    affected: Tensor | int = 0
    total: int = 0
    expected: float = 0.0

    def add(self, affected: Tensor | int, total: int, expected: float) -> None:
        """Count more; a tensor is not read."""
        if isinstance(affected, Tensor):
            affected = affected.detach() if affected.requires_grad else affected
            if isinstance(self.affected, Tensor) and self.affected.device != affected.device:
                self.affected = self.affected.to(affected.device)  # the model has moved
        self.affected = self.affected + affected
        self.total += total
        self.expected += expected

    def plus(self, other: Tally) -> Tally:
        """The sum, as a new tally."""
        total = Tally(self.affected, self.total, self.expected)
        total.add(other.affected, other.total, other.expected)
        return total

    def share(self) -> float | None:
        """The share affected; None where nothing was counted."""
        return int(self.affected) / self.total if self.total else None

    def expected_share(self) -> float | None:
        """The mean of the nominal rates, by elements; None where nothing was counted."""
        return self.expected / self.total if self.total else None


_CALLS, _ACTIVE, _AFFECTED, _TOTAL, _EXPECTED, _LOW = range(6)


class Meter:
    """What compiled code counts into: one tensor, allocated before, so that nothing is guarded.

    Its numbers only grow, and are read when someone asks; where nothing was compiled, never. In
    float64 they are exact up to 2**53. A flag that says whether it was used would be a side effect,
    which the compiler does not allow inside a checkpoint.
    """

    def __init__(self, spatial: int | None, device: torch.device) -> None:
        self.spatial = spatial or 0
        counts = [0.0] * _LOW + [math.inf] * self.spatial + [0.0] * self.spatial
        with torch.inference_mode(False):
            # not where `with torch.device(...)` says: from meta nothing comes back
            self.counts = torch.tensor(counts, dtype=wide_dtype(device), device=device)

    def to(self, device: torch.device) -> None:
        """Follow the activations to their device."""
        if self.counts.device == device or device.type == "meta":
            return  # on meta, what was counted would be lost
        moved = self.counts.to(device, wide_dtype(device), non_blocking=True)
        if moved.is_inference():
            with torch.inference_mode(False):
                moved = moved.clone()
        self.counts = moved

    def home(self, layer: nn.Module, model_at: torch.device | None) -> torch.device | None:
        """Where a layer is; one without tensors is where the model is, until compiled code ran."""
        own = device_of(layer)
        return model_at if own is None and self.counts.device.type == "cpu" else own

    def add_call(self) -> None:
        """One more call of the layer."""
        self.counts[_CALLS].add_(1)

    def add_active(self, affected: Tensor | int | None, total: int, rate: Tensor | float) -> None:
        """One more call in which the regularizer was on, and what it did."""
        self.counts[_ACTIVE].add_(1)
        if affected is not None and not (isinstance(affected, Tensor) and affected.is_meta):
            self.counts[_AFFECTED].add_(affected)
            self.counts[_TOTAL].add_(total)
            self.counts[_EXPECTED].add_(rate * total)

    def see_map(self, size: tuple[int, ...]) -> None:
        """Widen the range of map sizes."""
        for axis, edge in enumerate(size):
            self.counts[_LOW + axis].clamp_(max=edge)
            self.counts[_LOW + self.spatial + axis].clamp_(min=edge)

    def read(self) -> tuple[int, int, Tally, Sizes | None]:
        """Calls, active calls, elements and maps since the beginning. Waits for the device."""
        unread = self.counts.is_meta or type(self.counts) is not Tensor  # or a fake one
        if unread or "torch._dynamo" not in sys.modules:
            return 0, 0, Tally(), None
        numbers = self.counts.tolist()
        calls, active, affected, total = map(int, numbers[:_EXPECTED])
        low, high = numbers[_LOW : _LOW + self.spatial], numbers[_LOW + self.spatial :]
        maps = (tuple(map(int, low)), tuple(map(int, high))) if high and high[0] else None
        return calls, active, Tally(affected, total, numbers[_EXPECTED]), maps


def device_of(module: nn.Module) -> torch.device | None:
    """Where the first tensor of a module is."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return None if first is None else first.device


class Record:
    """All that a site has counted, whether in eager mode or in compiled code.

    Attributes:
        eager_calls: calls of the layer in eager mode; reading them does not wait for the device.
        window: elements since the epoch began, in eager mode.
        closed: elements of the last window that was not empty.
        before: elements before the window.
        meter: what compiled code has counted.
    """

    def __init__(self, spatial: int | None, device: torch.device) -> None:
        self.meter = Meter(spatial, device)
        self.window, self.closed, self.before = Tally(), Tally(), Tally()
        self.eager_calls = self._active = 0
        self._maps: Sizes | None = None
        self._metered = Tally()  # what the meter showed when the window was opened

    def add_active(self, affected: Tensor | int | None, total: int, rate: float) -> None:
        """One more call in which the regularizer was on, and what it did."""
        self._active += 1
        if affected is not None:
            self.window.add(affected, total, rate * total)

    def add_idle(self, total: int) -> None:
        """One more call in which the regularizer was on at a rate of 0."""
        self._active += 1
        self.window.total += total

    def see_map(self, size: tuple[int, ...]) -> None:
        """Widen the range of map sizes."""
        if self._maps != (size, size) and all(isinstance(edge, int) for edge in size):
            self._maps = _union(self._maps, (size, size))

    @property
    def acted(self) -> bool:
        """Whether the regularizer was on in eager mode; does not wait for the device."""
        return self._active > 0

    @property
    def calls(self) -> int:
        """Forward calls of the layer."""
        return self.eager_calls + self.meter.read()[0]

    @property
    def active_calls(self) -> int:
        """Calls in which the regularizer was on."""
        return self._active + self.meter.read()[1]

    @property
    def maps(self) -> Sizes | None:
        """The smallest and the largest map, per axis."""
        return _union(self._maps, self.meter.read()[3])

    def open_window(self) -> Tally:
        """The window since the epoch began, with what compiled code has counted."""
        now, then = self.meter.read()[2], self._metered
        metered = Tally(
            int(now.affected) - int(then.affected),
            now.total - then.total,
            now.expected - then.expected,
        )
        return self.window.plus(metered)

    def last_window(self) -> Tally:
        """The open window; where it is empty, the last one."""
        window = self.open_window()
        return window if window.total else self.closed

    def all(self) -> Tally:
        """All elements since attaching."""
        return self.before.plus(self.open_window())

    def close_window(self) -> None:
        """Begin a new window."""
        window = self.open_window()
        if window.total:
            self.before, self.closed, self.window = self.before.plus(window), window, Tally()
            self._metered = self.meter.read()[2]

    def restore(self, calls: int, active: int, window: Tally, closed: Tally, before: Tally) -> None:
        """Take over what another record had counted."""
        self.meter = Meter(self.meter.spatial, self.meter.counts.device)
        self.eager_calls, self._active, self._metered = calls, active, Tally()
        self.window, self.closed, self.before = window, closed, before


def _union(a: Sizes | None, b: Sizes | None) -> Sizes | None:
    if a is None or b is None:
        return a or b
    return tuple(map(min, a[0], b[0])), tuple(map(max, a[1], b[1]))
