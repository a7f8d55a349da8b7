"""ActivationStats: moments, shares, dead and saturated channels of what a layer gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from ..registry import register
from ..tables import Columns
from .base import Seen
from .batch_norm import BatchMoments, has_running
from .measuring import Measuring, MomentsWatch
from .moments import Zone
from .saturation import zone_of
from .statistics import Statistics, columns_of_moments, columns_of_units


@register
class ActivationStats(Measuring):
    """Mean, deviation, largest magnitude and norm of what a layer gives, by epoch; dead channels.

    Nothing waits for the device until the report is asked for. A call with a value that is not
    finite is counted, but left out of the moments.

    A channel is dead if it was exactly zero in every call of the epoch. It is saturated if all its
    values were flat: within 1 % of the bounds of Sigmoid, Tanh, Hardsigmoid, Softsign, Hardtanh or
    ReLU6, or on the flat negative side of Hardswish. If a regularizer of this layer changes these
    values (Dropout, say), use ``when="before"``.

    For a BatchNorm, its running mean and variance are compared with those of the batches that were
    looked at (``every``).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from dropblock_hooks import ActivationStats, attach
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> attached = attach(model, {"1": ActivationStats()})
        >>> y = model(torch.zeros(4, 2))
        >>> seen = attached.report()[0].observed
        >>> seen.values, seen.channels
        (12, 3)
    """

    channelwise: ClassVar[bool] = True

    def bind(self) -> Any:
        """A `StatsWatch`."""
        return StatsWatch(self)

    def headings(self) -> tuple[str, Columns[Any]]:
        return (
            f"{self.note()}; dead, saturated: channels, always so",
            {**columns_of_moments(), **columns_of_units()},
        )


_UNKNOWN = "its channels are not known"


class StatsWatch(MomentsWatch):
    """The state of one site."""

    reads_channels = True

    def __init__(self, options: ActivationStats) -> None:
        super().__init__(options, units=True)
        self.at = options.at
        self.zone: Zone | None = None
        self.unwatched = ""
        self.batches: BatchMoments | None = None

    def look(self, module: nn.Module, parameter: str | None) -> None:
        self.zone = zone_of(module) if self.at == "output" else None
        if has_running(module):
            self.reads_given = True
            if self.batches is None:
                self.batches = BatchMoments(int(module.num_features))  # type: ignore[arg-type]  # a BatchNorm's
            self.batches.look(module)
        kind = type(module).__name__
        of = kind if self.at == "output" else f"what {kind} is given"
        self.unwatched = "" if self.zone else f"{of} has no known bounds"

    def see(self, seen: Seen) -> None:
        (x,) = seen.tensors
        looks = self.open.add(x, self.every, seen.channels_first(), self.zone)
        if self.batches is not None and looks and seen.training and seen.given:
            self.batches.add(seen.given[0].detach())

    def close_window(self) -> None:
        super().close_window()
        if self.batches is not None:
            self.batches.close()

    def tensors(self) -> list[Tensor]:
        batches = [] if self.batches is None else [self.batches.sums]
        return super().tensors() + batches

    def read(self, numbers: Mapping[int, list[float]]) -> Statistics | None:
        found = self.read_moments(numbers, self.zone is not None)
        if found is None:
            return None
        mean, variance = (None, None) if self.batches is None else self.batches.read(numbers)
        return replace(
            found,
            unwatched=self.unwatched if found.channels else found.unwatched or _UNKNOWN,
            mean_shift=mean,
            variance_shift=variance,
        )

    def state_dict(self) -> dict[str, Tensor]:
        state = super().state_dict()
        return state if self.batches is None else {**state, "batches": self.batches.sums}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        if self.batches is not None:
            self.batches.sums.copy_(state["batches"])
