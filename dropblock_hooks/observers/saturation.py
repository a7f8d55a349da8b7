"""Where activations are flat: within 1 % of the bounds of their values."""

from __future__ import annotations

from torch import nn

from .moments import Zone

NEAR = 0.01
_BOUNDS = {
    "sigmoid": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "softsign": (-1.0, 1.0),
    "relu6": (0.0, 6.0),
}
_FLAT_AT_ZERO = {"hardswish": 0.375}
"""Those that are flat at zero, and bounded only below: how deep they go."""


def bounds_of(module: nn.Module) -> tuple[float, float] | None:
    """Between which numbers the values of this activation lie, where that is known.

    It is known by the name of its class, so that copies of torch's (timm's) are known as well.
    """
    bounds = _BOUNDS.get(type(module).__name__.lower())
    if isinstance(module, nn.Hardtanh) and bounds is None:
        bounds = float(module.min_val), float(module.max_val)
    return bounds


def zone_of(module: nn.Module) -> Zone | None:
    """Where this activation is flat; None of a layer whose bounds are not known."""
    bounds = bounds_of(module)
    if bounds is not None:
        low, high = bounds
        radius = (high - low) / 2
        return Zone((low + high) / 2, radius - NEAR * (high - low))
    depth = _FLAT_AT_ZERO.get(type(module).__name__.lower())
    return None if depth is None else Zone(0.0, NEAR * depth, within=True)
