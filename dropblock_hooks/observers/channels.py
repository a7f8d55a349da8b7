"""Statistics by channel: dead and saturated channels, and BatchNorm's running statistics."""

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


def add_units(
    state: State, x: Tensor, bounds: tuple[float, float] | None, zero: float = 0.0
) -> None:
    """Note which channels of a call (N, C, ...) were alive, and which have moved off the bounds.

    Magnitudes up to `zero` count as 0. With another number of channels it begins anew.
    """
    if not x.numel():
        return
    for name in ("alive", "moved") if bounds else ("alive",):
        flags = state.get(name)
        if flags is None or flags.shape != x.shape[1:2] or flags.device != x.device:
            flags = state[name] = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device)
        if x.device.type == "cpu" and bool(flags.all()):
            continue  # nothing more to note in this window
        if name == "alive":
            flags |= ~(_by_channel(torch.amax, x.abs()) <= zero)  # true for NaN
        elif bounds:
            lower, upper = bounds
            nearest = _by_channel(torch.amin, (x - (lower + upper) / 2).abs_())
            flags |= ~(nearest >= (upper - lower) * (0.5 - NEAR))  # true for NaN


def _by_channel(reduce: Any, x: Tensor) -> Tensor:
    """Reduce (N, C, ...) to (C,)."""
    within: Tensor = reduce(x.flatten(2), 2) if x.ndim > 2 else x
    found: Tensor = reduce(within, 0)
    return found


def look_at_running(state: State, module: nn.Module) -> None:
    """Copy the running mean and variance of a BatchNorm that keeps them, and its eps."""
    if not isinstance(module, nn.modules.batchnorm._BatchNorm):
        return
    mean, variance = module.running_mean, module.running_var
    if type(mean) is Tensor and type(variance) is Tensor and not mean.is_meta:
        state["running"] = torch.stack((mean.detach(), variance.detach())).to(state["sums"])
        state["eps"] = float(module.eps)


def add_batch(state: State, x: Tensor) -> None:
    """Add the mean and the variance by channel of a batch of shape (N, C, ...)."""
    if x.numel() <= x.shape[1]:
        return  # one value has no variance
    variance, mean = torch.var_mean(x.to(state["sums"].dtype), [0, *range(2, x.ndim)])
    batch = torch.stack((mean, variance, torch.ones_like(mean)))
    state["batches"] = state.get("batches", 0.0) + batch


def shifts(state: State) -> dict[str, Any]:
    """Return how far the running mean and the running variance are off; nothing before any batch.

    Channels whose running variance is not positive are left out.
    """
    if "batches" not in state or "running" not in state:
        return {}
    mean, variance, n = state["batches"].double()
    running_mean, running_variance = state["running"].double()
    kept = running_variance + state["eps"]
    of_mean = (mean / n - running_mean).abs() / kept.sqrt()
    of_variance = ((variance / n + state["eps"]) / kept).log().abs()
    found = {"mean_shift": of_mean, "variance_shift": of_variance}
    return {name: x[kept > 0].mean().item() for name, x in found.items() if (kept > 0).any()}
