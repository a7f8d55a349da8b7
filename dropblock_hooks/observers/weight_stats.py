"""WeightStats: moments and shares of a layer's parameters, and how far their norm has moved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..registry import register
from ..selectors.wrappers import shard_refusal
from ..tables import Columns
from .base import Observer, Watch
from .moments import KEPT, SQUARES, Moments
from .statistics import Statistics, columns_of_moments, short


@register
class WeightStats(Observer):
    """Mean, deviation, largest magnitude and norm of a layer's own parameters, all taken together.

    They are looked at when the epoch ends and when the report is asked for: a forward costs
    nothing, and the layer need not be called. On ``param:`` selectors, of one parameter alone. Of
    parameters that FSDP shards nothing is seen: a process holds them whole but now and then.

    Example:
        >>> from torch import nn
        >>> from dropblock_hooks import WeightStats, attach
        >>> attached = attach(nn.Sequential(nn.Linear(2, 3)), {"0": WeightStats()})
        >>> attached.report()[0].observed.values
        9
    """

    acts_on: ClassVar[Literal["activation", "gradient"]] = "gradient"  # as what parameters take
    sees_values: ClassVar[bool] = False
    needs_calls: ClassVar[bool] = False

    edges: ClassVar[tuple[float, ...]] = tuple(2.0**octave for octave in range(-27, 15))
    """The edges of the bins of its histogram."""

    def bind(self) -> Any:
        """A `WeightWatch`."""
        return WeightWatch()

    def headings(self) -> tuple[str, Columns[Any]]:
        moved: Columns[Any] = {"change": lambda s: short(s.change)}
        note = f"{self.label}: of now; change: of the norm in this epoch, relative"
        return note, {**columns_of_moments(), **moved}


@dataclass(frozen=True)
class WeightStatistics(Statistics):
    """What parameters are now.

    Attributes:
        change: the norm in relation to that when the epoch began, less 1; of the epoch before,
            where it has not moved since. None where not all is finite, now or then.
    """

    change: float | None = None

    def plus(self, other: Any) -> Any:
        """Ranks hold the same parameters: those of the first one."""
        return self


class WeightWatch(Watch):
    """The parameters of one site as they are now, and what their norm was."""

    def __init__(self) -> None:
        self.now = Moments()
        with torch.inference_mode(False):
            self.past = torch.full((2,), -1.0, dtype=torch.float64, device="cpu")

    def look(self, module: nn.Module, parameter: str | None) -> None:
        self.now = Moments()
        for each in _parameters(module, parameter):
            self.now.add(each.detach())
        with torch.inference_mode(False):
            self.past = self.past.to(self.now.sums)
            self.past = torch.where(self.past < 0, self._squares(), self.past)

    def close_window(self) -> None:
        with torch.inference_mode(False):
            self.past = torch.stack((self._squares(), self.past[0]))

    def _squares(self) -> Tensor:
        """Return the square of the present norm; NaN if not all values are finite."""
        sums = self.now.sums
        return torch.where(sums[KEPT] == self.now.calls, sums[SQUARES], math.nan)

    def tensors(self) -> list[Tensor]:
        return [*self.now.tensors(), self.past]

    def read(self, numbers: Mapping[int, list[float]]) -> WeightStatistics | None:
        found = self.now.read(numbers)
        if not found.looked:
            return None
        squares = numbers[id(self.now.sums)][SQUARES]
        begun, before = numbers[id(self.past)]
        before = before if squares == begun else begun
        known = before > 0 and not found.left_out
        change = (squares / before) ** 0.5 - 1 if known else None
        norm = None if found.norm is None else squares**0.5
        values = {each.name: getattr(found, each.name) for each in fields(found)}
        return WeightStatistics(**{**values, "norm": norm, "change": change})

    def state_dict(self) -> dict[str, Tensor]:
        return {"past": self.past}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.past.copy_(state["past"])


def _parameters(module: nn.Module, name: str | None) -> Iterator[Tensor]:
    """The layer's own, or the one of this name, as far as they hold numbers."""
    if shard_refusal(module) is not None:
        return
    for key, each in module._parameters.items():
        if each is None or type(each) not in (Tensor, nn.Parameter) or each.is_meta:
            continue
        if key == (name or key) and each.is_floating_point():
            yield each
