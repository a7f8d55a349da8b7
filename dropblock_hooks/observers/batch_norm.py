"""BatchNorm's running statistics against those of the batches that it was given."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import State


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether the layer is a BatchNorm."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def look_at_running(state: State, module: nn.Module) -> None:
    """Copy the running mean and variance of a BatchNorm, and its eps."""
    mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
    if type(mean) is not Tensor or type(variance) is not Tensor or mean.is_meta:
        return  # it keeps none, or none yet
    state["running"] = torch.stack((mean.detach(), variance.detach())).to(state["sums"])
    state["eps"] = float(module.eps)  # type: ignore[arg-type]  # a BatchNorm's


def add_batch(state: State, x: Tensor) -> None:
    """Add the mean and the variance by channel of one batch of shape (N, C, ...)."""
    if x.numel() <= x.shape[1]:
        return  # one value has no variance
    wide = state["sums"].dtype
    variance, mean = torch.var_mean(x.to(wide), [0, *range(2, x.ndim)])
    state["batches"] = state.get("batches", 0.0) + torch.stack(
        (mean, variance, torch.ones_like(mean))
    )


def shifts(state: State) -> tuple[float | None, float | None]:
    """Return how far the running mean and the running variance are off; None before any batch.

    Channels whose running variance is not positive are left out.
    """
    if "batches" not in state or "running" not in state:
        return None, None
    mean, variance, n = state["batches"].double()
    running_mean, running_variance = state["running"].double()
    kept = running_variance + state["eps"]
    of_mean = (mean / n - running_mean).abs() / kept.sqrt()
    of_variance = ((variance / n + state["eps"]) / kept).log().abs()
    there = kept > 0
    if not there.any():
        return None, None
    return of_mean[there].mean().item(), of_variance[there].mean().item()
