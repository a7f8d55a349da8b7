"""The last measured calls of a layer before NaN or Inf, which a `Watchdog` shows in its finding.

`Watched` adds the rows, and ``diagnosis.nonfinite`` shows them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Row(NamedTuple):
    """A measured call of a layer, or its gradient.

    Attributes:
        call: the number of the call since attaching, from 1.
        value: the largest magnitude in the output, or the norm of the gradient.
    """

    call: int
    value: float


@dataclass
class Rows:
    """The last measured calls of a layer and their gradients, before the first bad value.

    Attributes:
        keep: the largest number of rows of each kind; 0 keeps no rows.
        outputs: the rows of outputs, the newest one last.
        gradients: the rows of gradients.
        first_bad: the number of the first call with NaN or Inf since the last look; inf without
            such a call.
        in_gradient: True if the gradient of this call was bad, False if its output was.
    """

    keep: int = 0
    outputs: list[Row] = field(default_factory=list)
    gradients: list[Row] = field(default_factory=list)
    first_bad: float = math.inf
    in_gradient: bool = False

    def add(self, call: int, value: float, in_gradient: bool = False) -> None:
        """Add a value of a call. After NaN or Inf, the rows do not change."""
        if self.first_bad < math.inf:
            return
        if not value < math.inf:
            self.first_bad = call
            self.in_gradient = in_gradient
        elif self.keep:
            rows = self.gradients if in_gradient else self.outputs
            rows.append(Row(call, value))
            del rows[: -self.keep]

    def add_compiled(
        self,
        outputs: Sequence[Row],
        gradients: Sequence[Row],
        first_bad: float,
        first_bad_gradient: float,
    ) -> None:
        """Add the rows of compiled code, up to the first bad output or gradient.

        There, a bad output does not end the rows of gradients, nor the other way round.

        Args:
            outputs: the rows of outputs.
            gradients: the rows of gradients.
            first_bad: the number of the first call with a bad output; inf without such a call.
            first_bad_gradient: the number of the first call with a bad gradient, or inf.
        """
        in_gradient = first_bad_gradient < first_bad
        first = min(first_bad, first_bad_gradient)
        # the output of a call with a bad gradient was still good
        end_of_outputs = first + 1 if in_gradient else first
        for row in outputs:
            if row.call < end_of_outputs:
                self.add(row.call, row.value)
        for row in gradients:
            if row.call < first:
                self.add(row.call, row.value, in_gradient=True)
        if first < math.inf:
            self.add(round(first), math.inf, in_gradient)

    def forget(self) -> None:
        """Forget the first bad call, so that rows are kept again."""
        self.first_bad = math.inf


def rows_of(numbers: Sequence[float], before: int) -> list[Row]:
    """Return the rows in the numbers of compiled code.

    Args:
        numbers: of each row, the number of the call in compiled code and the value. A row that was
            not written has the number 0.
        before: the calls before those that compiled code counts.
    """
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return [Row(before + round(call), value) for call, value in pairs if call]
