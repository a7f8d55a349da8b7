"""What the observers of statistics share: how often they look, and the bins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..checks import as_count, as_number
from ..quoting import shown
from ..tables import Columns
from .base import Observer, Watch
from .moments import Moments
from .statistics import Statistics, columns_of_moments


@dataclass(frozen=True, repr=False)
class Measuring(Observer):
    """Moments at every call; shares of zeros and a histogram of magnitudes now and then.

    Args:
        every: zeros, values that are not finite and the histogram are counted at each n-th call of
            an epoch, the first included.
        low, high: the bounds of the histogram of magnitudes, from 1e-30 to 1e30. Its bins are
            octaves: the bounds are rounded down and up to powers of 2. What lies below and beyond
            them is counted in two more.
    """

    every: int = 10
    low: float = 1e-8
    high: float = 1e4

    def check(self, values: Mapping[str, float]) -> None:
        super().check(values)
        as_count("every", self.every)
        low, high = as_number("low", self.low), as_number("high", self.high)
        if not 1e-30 <= low < high <= 1e30:
            raise ValueError(
                "the bounds of the histogram must be 1e-30 <= low < high <= 1e30, got "
                f"low={shown(self.low)}, high={shown(self.high)}"
            )

    @property
    def octaves(self) -> tuple[int, int]:
        """The first and the last of `edges`, as powers of 2."""
        return math.floor(math.log2(self.low)), math.ceil(math.log2(self.high))

    @property
    def edges(self) -> tuple[float, ...]:
        """The edges of the bins, rising."""
        first, last = self.octaves
        return tuple(2.0**octave for octave in range(first, last + 1))

    def headings(self) -> tuple[str, Columns[Any]]:
        return self.note(), columns_of_moments()

    def note(self) -> str:
        """What the columns are taken from."""
        every = "" if self.every == 1 else f"{_ordinal(self.every)} "
        return f"{self.label}: this epoch; zeros, nan/inf: every {every}call"


def _ordinal(n: int) -> str:
    """As in ``3rd``."""
    teen = n // 10 % 10 == 1
    return f"{n}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


class MomentsWatch(Watch):
    """The state of one site: `Moments` of the open window, and of the last closed one."""

    def __init__(self, options: Measuring, units: bool = False) -> None:
        self.every = options.every
        self.open, self.closed = (Moments(options.octaves, units) for _ in range(2))

    def close_window(self) -> None:
        octaves, units = (self.open.first, self.open.last), self.open.units
        self.closed, self.open = self.open, Moments(octaves, units)

    def tensors(self) -> list[Tensor]:
        return self.open.tensors() + self.closed.tensors()

    def read(self, numbers: Mapping[int, list[float]]) -> Statistics | None:
        return self.read_moments(numbers)

    def read_moments(
        self, numbers: Mapping[int, list[float]], zone: bool = True
    ) -> Statistics | None:
        """Return the open window, or the closed one if the open one is empty."""
        for window in (self.open, self.closed):
            if window.calls:
                return window.read(numbers, zone)
        return None

    def state_dict(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": tensor
            for name, window in (("open", self.open), ("closed", self.closed))
            for key, tensor in window.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, window in (("open", self.open), ("closed", self.closed)):
            window.load_state_dict({key: state[f"{name}.{key}"] for key in window.state_dict()})
