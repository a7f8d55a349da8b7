"""BatchNorm's running statistics against those of the batches that it was given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .base import State


def look_at_running(state: State, module: nn.Module) -> None:
    """Copy the running mean and variance of a BatchNorm that keeps them, and its eps."""
    if not isinstance(module, nn.modules.batchnorm._BatchNorm):
        return
    mean, variance = module.running_mean, module.running_var
    if type(mean) is Tensor and type(variance) is Tensor and not mean.is_meta:
        state["running"] = torch.stack((mean.detach(), variance.detach())).to(state["sums"])
        state["eps"] = float(module.eps)


def add_batch(state: State, x: Tensor) -> None:
    """Add the mean and the variance by channel of one batch of shape (N, C, ...)."""
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
