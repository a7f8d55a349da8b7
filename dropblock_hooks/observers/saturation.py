"""Where activations are flat: within 1 % of the bounds of their values."""

from __future__ import annotations

from torch import nn

from .moments import Zone

_NEAR = 0.01
_BOUNDS = {
    "sigmoid": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "softsign": (-1.0, 1.0),
    "relu6": (0.0, 6.0),
}
_FLAT_AT_ZERO = {"hardswish": 0.375}
"""Those that are flat at zero, and bounded only below: how deep they go."""


def zone_of(module: nn.Module) -> Zone | None:
    """Where this activation is flat; None of a layer whose bounds are not known.

    It is known by the name of its class, so that copies of torch's (timm's) are known as well.
    """
    name = type(module).__name__.lower()
    bounds = _BOUNDS.get(name)
    if isinstance(module, nn.Hardtanh) and bounds is None:
        bounds = float(module.min_val), float(module.max_val)
    if bounds is not None:
        low, high = bounds
        radius = (high - low) / 2
        return Zone((low + high) / 2, radius - _NEAR * (high - low))
    depth = _FLAT_AT_ZERO.get(name)
    return None if depth is None else Zone(0.0, _NEAR * depth, within=True)
