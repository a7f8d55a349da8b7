"""ActivationStats: moments, shares, dead and saturated channels of what a layer gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..registry import register
from ..tables import Columns
from .base import Seen, Watch
from .measuring import Measuring
from .moments import Moments, Zone
from .saturation import zone_of
from .statistics import Statistics, columns_of_moments, columns_of_units


@register
class ActivationStats(Measuring):
    """Mean, deviation, largest magnitude and norm of what a layer gives, by epoch; dead channels.

    Nothing waits for the device until the report is asked for.

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

    def bind(self) -> Watch:
        """A `StatsWatch`."""
        return StatsWatch(self)

    def headings(self) -> tuple[str, Columns[Any]]:
        return (
            f"{self.note()}; dead, saturated: channels, so at all calls",
            {**columns_of_moments(), **columns_of_units()},
        )


class StatsWatch(Watch):
    """What one site has seen of its activations."""

    def __init__(self, options: ActivationStats) -> None:
        self.every, self.at = options.every, options.at
        self.moments = Moments(options.octaves, units=True)
        self.zone: Zone | None = None
        self.unwatched = ""

    def look(self, module: nn.Module, parameter: str | None) -> None:
        self.zone = zone_of(module) if self.at == "output" else None
        self.unwatched = "" if self.zone else f"{type(module).__name__} has no known bounds"

    def see(self, seen: Seen) -> None:
        (x,) = seen.tensors
        if not x.is_floating_point():
            raise TypeError(f"takes statistics of floating-point tensors, got {x.dtype}")
        self.moments.add(x, self.every, seen.channels_first(x), self.zone)

    def to(self, device: torch.device) -> None:
        self.moments.to(device)

    def close_window(self) -> None:
        self.moments.close()

    def tensors(self) -> list[Tensor]:
        return self.moments.tensors()

    def read(self, numbers: Mapping[int, list[float]]) -> Statistics | None:
        found = self.moments.read(numbers, self.zone is not None)
        if found is None:
            return None
        unwatched = self.unwatched if found.channels else "its channels are not known"
        return replace(found, unwatched=unwatched)

    def state_dict(self) -> dict[str, Tensor]:
        return self.moments.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.moments.load_state_dict(state)
