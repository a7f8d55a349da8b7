"""BatchNorm's running statistics against those of the batches that it was given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..functional.masks import wide_dtype

MEAN, VARIANCE, RUNNING_MEAN, RUNNING_VARIANCE, BATCHES = range(5)


def has_running(module: nn.Module) -> bool:
    """Whether it is a BatchNorm that keeps running statistics."""
    return (
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        and isinstance(module.running_mean, Tensor)
        and not isinstance(module, nn.modules.lazy.LazyModuleMixin)
    )


class BatchMoments:
    """Means over batches of their mean and variance, by channel; and what the layer keeps.

    The open window is in row 0 of its tensor, the one that was closed last in row 1.

    Attributes:
        eps: what the layer adds to a variance.
    """

    eps = 0.0

    def __init__(self, channels: int) -> None:
        with torch.inference_mode(False):
            self.sums = torch.zeros(2, BATCHES + 1, channels, dtype=torch.float64, device="cpu")

    def to(self, device: torch.device) -> None:
        """Follow the values to their device."""
        if self.sums.device != device and device.type != "meta":
            with torch.inference_mode(False):
                self.sums = self.sums.to(device, wide_dtype(device))

    def add(self, x: Tensor) -> None:
        """One more batch, of (N, C, ...)."""
        self.to(x.device)
        if x.numel() <= x.shape[1]:
            return  # one value has no variance
        variance, mean = _variance_mean(x)
        self.sums[0, MEAN].add_(mean)
        self.sums[0, VARIANCE].add_(variance)
        self.sums[0, BATCHES].add_(1)

    def look(self, module: Any) -> None:
        """Take what the layer keeps."""
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
        """How far the running mean and variance are; None before any batch."""
        values = iter(numbers[id(self.sums)])
        shape = self.sums.shape
        for _ in range(shape[0]):
            rows = [[next(values) for _ in range(shape[2])] for _ in range(shape[1])]
            if rows[BATCHES][0]:
                return _distances(rows, self.eps)
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


def _variance_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each channel; the variance as the running one is, without bias."""
    axes = [0, *range(2, x.ndim)]
    wide = wide_dtype(x.device)
    if x.device.type != "cpu" or is_compiling():
        return torch.var_mean(x.to(torch.float32) if x.device.type != "cpu" else x.to(wide), axes)
    n = x.numel() // x.shape[1]  # torch's own takes several times as long
    mean = x.sum(axes, dtype=torch.float32 if x.dtype.itemsize <= 4 else wide) / n
    centred = x - mean.view(-1, *[1] * (x.ndim - 2))
    rows = torch.linalg.vector_norm(centred.flatten(2), dim=2) if x.ndim > 2 else centred.abs()
    squares = rows.to(wide).square().sum(0)
    off = centred.sum(axes).to(wide) / n
    return (squares - n * off * off) / (n - 1), mean.to(wide) + off
