"""Single channels: which were zero in all calls, and which were at the bounds of an activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .base import State

NEAR = 0.01
"""How near to a bound an activation counts as saturated, as a share of the distance of both."""
_BOUNDS = {
    "sigmoid": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "softsign": (-1.0, 1.0),
    "relu6": (0.0, 6.0),
}


def bounds_of(module: nn.Module) -> tuple[float, float] | None:
    """Return the bounds of the values of an activation, or None if they are not known.

    The name of the class tells, so that copies of torch's classes (timm's) are known as well.
    """
    bounds = _BOUNDS.get(type(module).__name__.lower())
    if isinstance(module, nn.Hardtanh) and bounds is None:
        bounds = float(module.min_val), float(module.max_val)
    return bounds


def new_units() -> State:
    """Return an empty state: of each channel, whether it was alive, and left the bounds."""
    return {"alive": torch.zeros(0, dtype=torch.bool), "moved": torch.zeros(0, dtype=torch.bool)}


def add_units(
    state: State, x: Tensor, bounds: tuple[float, float] | None, zero: float = 0.0
) -> None:
    """Add one call of shape (N, C, ...); magnitudes up to `zero` count as 0."""
    if not x.numel():
        return
    channels = x.shape[1]
    for name in ("alive", "moved"):
        state[name] = padded(state[name].to(x.device), channels)
    alive, moved = state["alive"][:channels], state["moved"][:channels]
    if x.device.type == "cpu" and bool(alive.all()) and (bounds is None or bool(moved.all())):
        return  # nothing more to note in this window
    alive.logical_or_(~(_by_channel(torch.amax, x.abs()) <= zero))  # true for NaN
    if bounds is not None:
        lower, upper = bounds
        nearest = _by_channel(torch.amin, (x - (lower + upper) / 2).abs_())
        moved.logical_or_(~(nearest >= (upper - lower) * (0.5 - NEAR)))  # true for NaN


def padded(flags: Tensor, size: int) -> Tensor:
    """Return at least so many flags; new ones are False."""
    more = size - len(flags)
    return torch.cat((flags, flags.new_zeros(more))) if more > 0 else flags


def _by_channel(reduce: Any, x: Tensor) -> Tensor:
    """Reduce (N, C, ...) to (C,)."""
    within: Tensor = reduce(x.flatten(2), 2) if x.ndim > 2 else x
    found: Tensor = reduce(within, 0)
    return found
