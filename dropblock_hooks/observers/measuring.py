"""What the observers that take statistics share: how often, and the bins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
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
        every: shares and the histogram are taken at each so many calls of an epoch, the first
            included; in compiled code at all calls, of one in so many samples.
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
    """What one site has seen, as `Moments`."""

    def __init__(self, options: Measuring, units: bool = False) -> None:
        self.every = options.every
        self.moments = Moments(options.octaves, units=units)

    def to(self, device: torch.device) -> None:
        self.moments.to(device)

    def close_window(self) -> None:
        self.moments.close()

    def tensors(self) -> list[Tensor]:
        return self.moments.tensors()

    def read(self, numbers: Mapping[int, list[float]]) -> Statistics | None:
        return self.moments.read(numbers)

    def state_dict(self) -> dict[str, Tensor]:
        return self.moments.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.moments.load_state_dict(state)
