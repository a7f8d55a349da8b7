"""BatchNorm's running statistics against those of the batches that it was given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.masks import wide_dtype

MEAN, VARIANCE, RUNNING_MEAN, RUNNING_VARIANCE, BATCHES = range(5)


def has_running(module: nn.Module) -> bool:
    """Whether the layer is a BatchNorm that keeps running statistics."""
    return (
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        and isinstance(module.running_mean, Tensor)
        and not isinstance(module, nn.modules.lazy.LazyModuleMixin)
    )


class BatchMoments:
    """Sums over batches of their mean and variance by channel, and the running statistics.

    Row 0 of its tensor is the open window, row 1 the last closed one.

    Attributes:
        eps: what the layer adds to a variance.
    """

    eps = 0.0

    def __init__(self, channels: int) -> None:
        with torch.inference_mode(False):
            self.sums = torch.zeros(2, BATCHES + 1, channels, dtype=torch.float64, device="cpu")

    def to(self, device: torch.device) -> None:
        """Move to the device of the values."""
        if self.sums.device != device and device.type != "meta":
            with torch.inference_mode(False):
                self.sums = self.sums.to(device, wide_dtype(device))

    def add(self, x: Tensor) -> None:
        """Add one batch of shape (N, C, ...)."""
        self.to(x.device)
        if x.numel() <= x.shape[1]:
            return  # one value has no variance
        variance, mean = torch.var_mean(x.to(self.sums.dtype), [0, *range(2, x.ndim)])
        self.sums[0, MEAN].add_(mean)
        self.sums[0, VARIANCE].add_(variance)
        self.sums[0, BATCHES].add_(1)

    def look(self, module: Any) -> None:
        """Copy the running statistics of the layer."""
        self.eps = float(module.eps)
        if module.running_mean.is_meta:
            return
        self.to(module.running_mean.device)
        self.sums[0, RUNNING_MEAN].copy_(module.running_mean.detach())
        self.sums[0, RUNNING_VARIANCE].copy_(module.running_var.detach())

    def close(self) -> None:
        """Begin a new window."""
        self.sums[1].copy_(self.sums[0])
        self.sums[0].zero_()

    def read(self, numbers: Mapping[int, list[float]]) -> tuple[float | None, float | None]:
        """Return how far the running mean and variance are off; None before any batch."""
        for rows in torch.tensor(numbers[id(self.sums)], dtype=torch.float64).view(self.sums.shape):
            if rows[BATCHES][0]:
                return _distances(rows.tolist(), self.eps)
        return None, None


def _distances(rows: list[list[float]], eps: float) -> tuple[float | None, float | None]:
    means, logs = [], []
    for mean, variance, running_mean, running_variance, batches in zip(*rows, strict=True):
        kept = running_variance + eps
        if kept > 0:
            means.append(abs(mean / batches - running_mean) / math.sqrt(kept))
            ratio = (variance / batches + eps) / kept
            logs.append(abs(math.log(ratio)) if ratio > 0 else math.inf)
    return _average(means), _average(logs)


def _average(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
