"""Histograms of gradient norms before a bound.

A bin covers a quarter of an octave (a factor of two), from 2**-64 to 2**64. A quantile that is read
from the bins has a relative error of at most 9.1 %. Smaller norms count as 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import as_number
from ..functional.masks import wide_dtype

_PER_OCTAVE, _LOWEST, _OCTAVES = 4, -64, 128
_LAST = _PER_OCTAVE * _OCTAVES + 1  # the bin above all others; bin 0 is that of zeros


class Histogram:
    """Counts norms into bins, on the device of the gradients.

    Attributes:
        cells: one tensor: the sum of the norms, then the number of norms in each bin.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.cells = torch.zeros(_LAST + 2, dtype=wide_dtype(device), device=device)

    @classmethod
    def of(cls, norms: Norms) -> Histogram:
        """A histogram on the CPU that holds these norms."""
        made = cls(torch.device("cpu"))
        made.cells[0] = norms.total
        for at, n in norms.bins.items():
            made.cells[1 + at] = n
        return made

    def add(self, norms: Tensor) -> None:
        """Count norms, except those that are not finite; no device is waited for."""
        norms = norms.detach().reshape(-1)
        if norms.is_meta or type(norms) is not Tensor or norms.numel() == 0:
            return
        with torch.inference_mode(False):
            if self.cells.device != norms.device:  # the model has moved
                self.cells = self.cells.to(norms.device, wide_dtype(norms.device))
            norms = norms.to(self.cells.dtype)
            finite = norms < float("inf")  # False for NaN, too
            norms = norms.where(finite, 0.0)
            at = norms.log2() * _PER_OCTAVE + (1 - _LOWEST * _PER_OCTAVE)  # -inf of 0
            at = at.clamp(0, _LAST).long() + 1
            self.cells.index_add_(0, at, finite.to(self.cells.dtype))
            self.cells[0].add_(norms.sum())

    def copy(self) -> Tensor:
        """The cells of now, to be read later."""
        with torch.inference_mode(False):
            return self.cells.clone()


@dataclass(frozen=True, repr=False)
class Norms:
    """How large gradient norms were before a bound, in units of the unscaled loss.

    For `ClipGradNorm` they are the norms that it bounds: of gradients, samples or channels. For
    `ClampGrad` it is the largest magnitude of each gradient; with one bound only, towards that
    bound. Norms that are not finite are left out.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 2))
        >>> attached = attach(model, {"0": ClipGradNorm(1.0, per="sample")})
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> norms = attached.sites[0].norms
        >>> norms.count
        4
        >>> norms.quantile(0.5) <= norms.quantile(0.9) <= norms.largest
        True

    Attributes:
        total: the sum of the norms.
        bins: the number of norms in each bin that is not empty.
    """

    total: float
    bins: Mapping[int, float]

    @classmethod
    def between(cls, now: Sequence[float] | None, before: Sequence[float] | None) -> Norms:
        """The norms that were counted between two states of the cells; None stands for none."""
        if now is None:
            return NO_NORMS
        total, *more = now if before is None else (a - b for a, b in zip(now, before, strict=True))
        return cls(total, {at: n for at, n in enumerate(more) if n})

    def plus(self, other: Norms) -> Norms:
        """The norms of both."""
        return Norms(self.total + other.total, Counter(self.bins) + Counter(other.bins))

    def saved(self) -> dict[str, Any]:
        """As plain numbers."""
        return {"total": self.total, "bins": [[at, n] for at, n in self.bins.items()]}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Norms:
        """The inverse of `saved`; ValueError, TypeError or KeyError for something else."""
        bins = {at: float(n) for at, n in saved["bins"]}
        if not bins.keys() <= set(range(_LAST + 1)):
            raise ValueError(f"the bins are 0 to {_LAST}")
        return cls(float(saved["total"]), bins)

    @property
    def count(self) -> int:
        """The number of norms."""
        return round(sum(self.bins.values()))

    @property
    def mean(self) -> float | None:
        """The mean; None where there are no norms."""
        return self.total / self.count if self.bins else None

    @property
    def largest(self) -> float | None:
        """The largest norm, within 9 %; None where there are no norms."""
        return self.quantile(1.0)

    def quantile(self, q: float) -> float | None:
        """The norm that a share `q` of them does not exceed, within 9 %; None without norms.

        Raises:
            ValueError: for `q` outside [0, 1].
        """
        q = as_number("q", q)
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"q must be in [0, 1], got {q:g}")
        left, at = q * self.count * (1 - 1e-12), None  # a share such as 0.1 is rounded
        for at in sorted(self.bins):
            left -= self.bins[at]
            if left <= 0:
                break
        return None if at is None else float(at and 2 ** (_LOWEST + (at - 0.5) / _PER_OCTAVE))

    def __repr__(self) -> str:
        if not self.bins:
            return "Norms(count=0)"
        shown = {"mean": self.mean, "median": self.quantile(0.5), "p99": self.quantile(0.99)}
        listed = ", ".join(f"{name}={x:.4g}" for name, x in shown.items())
        return f"Norms(count={self.count}, {listed}, largest={self.largest:.4g})"


NO_NORMS = Norms(0.0, {})
