"""Single channels: which were zero in all calls, and which were flat in all calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .base import State

CAPACITY = 8192
"""Layers with more channels than this are not watched channel by channel."""
NEAR = 0.01
"""How near to a bound an activation counts as flat, as a share of the distance of its bounds."""
_BOUNDS = {
    "sigmoid": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "softsign": (-1.0, 1.0),
    "relu6": (0.0, 6.0),
}
_FLAT_AT_ZERO = {"hardswish": 0.375}
"""Activations that are flat at zero, and their smallest value, without its sign."""


class Zone(NamedTuple):
    """Where an activation is flat: at both its bounds, ``|x - center| >= radius``; or, `within`,
    where ``|x - center| <= radius``.
    """

    center: float
    radius: float
    within: bool = False

    def holds(self, x: Tensor, high: Tensor, low: Tensor) -> Tensor:
        """Return for each channel of (N, C, ...) whether all its values lie in the zone.

        Args:
            x: the values.
            high: the largest of each channel.
            low: the smallest.
        """
        if self.within:
            return (high <= self.center + self.radius) & (low >= self.center - self.radius)
        return _by_channel(torch.amin, (x - self.center).abs_()) >= self.radius


def bounds_of(module: nn.Module) -> tuple[float, float] | None:
    """Return the bounds of the values of an activation, or None if they are not known.

    The name of the class tells, so that copies of torch's classes (timm's) are known as well.
    """
    bounds = _BOUNDS.get(type(module).__name__.lower())
    if isinstance(module, nn.Hardtanh) and bounds is None:
        bounds = float(module.min_val), float(module.max_val)
    return bounds


def zone_of(module: nn.Module) -> Zone | None:
    """Return where an activation is flat, or None if its bounds are not known."""
    bounds = bounds_of(module)
    if bounds is not None:
        low, high = bounds
        return Zone((low + high) / 2, (high - low) * (0.5 - NEAR))
    depth = _FLAT_AT_ZERO.get(type(module).__name__.lower())
    return None if depth is None else Zone(0.0, NEAR * depth, within=True)


def new_units() -> State:
    """Return an empty state: of each channel, whether it was alive, and was outside the zone."""
    return {"alive": torch.zeros(0, dtype=torch.bool), "moved": torch.zeros(0, dtype=torch.bool)}


def add_units(state: State, x: Tensor, zone: Zone | None) -> None:
    """Add one call of shape (N, C, ...)."""
    if not x.numel():
        return
    channels = x.shape[1]
    for name in ("alive", "moved"):
        state[name] = padded(state[name], channels)
    if channels > CAPACITY:
        return
    alive, moved = state["alive"][:channels], state["moved"][:channels]
    if x.device.type == "cpu" and bool(alive.all()) and (zone is None or bool(moved.all())):
        return  # nothing more to note in this window
    high, low = _by_channel(torch.amax, x), _by_channel(torch.amin, x)
    alive.logical_or_((high != 0) | (low != 0))  # a NaN is not zero either
    if zone is not None:
        moved.logical_or_(~zone.holds(x, high, low))


def padded(flags: Tensor, size: int) -> Tensor:
    """Return at least so many flags; new ones are False."""
    more = size - len(flags)
    return torch.cat((flags, flags.new_zeros(more))) if more > 0 else flags


def _by_channel(reduce: Any, x: Tensor) -> Tensor:
    """Reduce (N, C, ...) to (C,)."""
    within: Tensor = reduce(x.flatten(2), 2) if x.ndim > 2 else x
    found: Tensor = reduce(within, 0)
    return found
