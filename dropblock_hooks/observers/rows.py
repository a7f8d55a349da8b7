"""What a `Watchdog` keeps of the last measured calls of a layer, to show them before NaN or Inf."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Row(NamedTuple):
    """A measured call of a layer, or the gradient of it.

    Attributes:
        call: the number of the call since attaching, from 1.
        value: the largest magnitude in the output, or the norm of the gradient.
    """

    call: int
    value: float


@dataclass
class Rows:
    """The last measured calls with finite values, up to the first call with others.

    Attributes:
        keep: the largest number of rows; 0 keeps none.
        last: the rows, the newest one last.
        first_bad: the number of the first call with NaN or Inf since the last look; inf without.
    """

    keep: int = 0
    last: list[Row] = field(default_factory=list)
    first_bad: float = math.inf

    def add(self, call: float, value: float) -> None:
        """Add a call. After NaN or Inf, the rows stay what they are."""
        if self.first_bad < math.inf:
            return
        if not value < math.inf:
            self.first_bad = call
        elif self.keep:
            self.last = [*self.last, Row(round(call), value)][-self.keep :]

    def take(self, numbers: Sequence[float], before: int, first_bad: float) -> None:
        """Add the rows that compiled code has kept.

        Args:
            numbers: of each row, the number of the call in compiled code and the value. A row that
                was not written has the number 0.
            before: the calls before those that compiled code counts.
            first_bad: the number of the first call with NaN or Inf in compiled code; or inf.
        """
        for call, value in zip(numbers[::2], numbers[1::2], strict=True):
            if call:
                self.add(before + call, value)
        self.add(before + first_bad, math.inf)

    def forget(self) -> None:
        """Forget the first call with NaN or Inf, so that rows are kept again."""
        self.first_bad = math.inf
