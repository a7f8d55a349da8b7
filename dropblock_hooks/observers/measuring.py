"""What the observers that take statistics share: how often, and the bins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checks import as_count, as_number
from ..quoting import shown
from ..tables import Columns
from .base import Observer
from .statistics import columns_of_moments


@dataclass(frozen=True, repr=False)
class Measuring(Observer):
    """Moments at every call; shares of zeros and a histogram of magnitudes now and then.

    Args:
        every: shares and the histogram are taken at each so many calls of an epoch, the first
            included; in compiled code at all calls, of one in so many samples.
        low, high: the bounds of the histogram, magnitudes above 0.
        bins: how many bins lie between them, evenly on a logarithmic scale. What lies below and
            beyond them is counted in two more.
    """

    every: int = 10
    low: float = 1e-8
    high: float = 1e4
    bins: int = 24

    def check(self, values: Mapping[str, float]) -> None:
        super().check(values)
        as_count("every", self.every)
        as_count("bins", self.bins)
        low, high = as_number("low", self.low), as_number("high", self.high)
        if not 0 < low < high:
            raise ValueError(
                "the bounds of the histogram must be magnitudes with 0 < low < high, got "
                f"low={shown(self.low)}, high={shown(self.high)}"
            )

    @property
    def edges(self) -> tuple[float, ...]:
        """The bounds of the bins, rising: one more than there are bins."""
        low, high, n = float(self.low), float(self.high), self.bins
        inner = (low * (high / low) ** (i / n) for i in range(1, n))
        return (low, *inner, high)

    def headings(self) -> tuple[str, Columns[Any]]:
        return self.note(), columns_of_moments()

    def note(self) -> str:
        """What the columns are taken from."""
        times = "every call" if self.every == 1 else f"calls 1, {1 + self.every}, ..."
        return f"since the epoch began; zeros, not finite: shares in {times}"
