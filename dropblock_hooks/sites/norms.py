"""How large the norms of gradients were before a bound: counted into bins, which only grow.

There are 8 bins from one power of two to the next, from 2**-64 to 2**64: a quantile that is read
from them is within `ERROR` of the norm that it stands for. What is smaller counts as 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import as_number
from ..functional.gradients import Met
from ..functional.masks import wide_dtype

_PER_OCTAVE, _LOWEST, _OCTAVES = 8, -64, 128
_LARGEST, _SUM, _BINS = range(3)  # the cells; the first bin is that of zeros
_LAST = _PER_OCTAVE * _OCTAVES + 1  # the bin of what lies above
_CELLS = _BINS + _LAST + 1
NO_CELLS = (0.0,) * _CELLS
ERROR = 2 ** (0.5 / _PER_OCTAVE) - 1
"""How far a quantile may be off, as a share of it: 0.044."""


class NormBins:
    """What the norms are counted into: one tensor, whose numbers grow; it is read when asked.

    Only the largest norm is one of a window, and set back when that closes.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.cells = torch.zeros(_CELLS, dtype=wide_dtype(device), device=device)

    def to(self, device: torch.device) -> None:
        """Follow the gradients to their device."""
        if self.cells.device == device or device.type == "meta":
            return
        with torch.inference_mode(False):
            moved = self.cells.to(device, wide_dtype(device), non_blocking=True)
            self.cells = moved.clone() if moved.is_inference() else moved

    def add(self, met: Met) -> None:
        """Count these norms, but those that are not finite; no device is waited for."""
        if met.norms.numel() == 0:
            return
        cells = self.cells
        norms = met.norms.detach().reshape(-1).to(cells.dtype)
        finite = norms < float("inf")  # nor is it NaN
        norms = norms.where(finite, 0.0)
        at = norms.log2() * _PER_OCTAVE + (_BINS + 1 - _LOWEST * _PER_OCTAVE)  # -inf of 0
        cells.index_add_(
            0, at.clamp(_BINS, _BINS + _LAST).long(), finite.to(cells.dtype), alpha=met.weight
        )
        cells[_SUM].add_(norms.sum(), alpha=met.weight)
        cells[_LARGEST].clamp_(min=norms.amax())
        if met.largest is not None:
            known = met.largest.detach().to(cells.dtype)
            cells[_LARGEST].clamp_(min=known.where(known.isfinite(), 0.0))

    def forget_largest(self) -> None:
        """A window begins."""
        with torch.inference_mode(False):
            self.cells[_LARGEST].zero_()

    def copied(self) -> Tensor | None:
        """The numbers of now, to be read later; None where there are none, as on meta."""
        if type(self.cells) is not Tensor or self.cells.is_meta:
            return None
        with torch.inference_mode(False):
            return self.cells.clone()


@dataclass(frozen=True, repr=False)
class Norms:
    """How large norms were before a bound, of the unscaled loss; without those not finite.

    Of a `ClipGradNorm` they are the norms of what it clips: of gradients, samples or channels. Of a
    `ClampGrad` each value is a norm of its own, its size; with one bound only, values of the other
    sign count as 0. Of a gradient with more than 16,384 values so many are looked at, spread over
    it, and stand for all; the largest is that of all, unless some are not finite.

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
        peak: the largest norm; 0 where it is not known.
        total: the sum of the norms.
        bins: how many lie in each bin, where there are any.
    """

    peak: float
    total: float
    bins: Mapping[int, float]

    @classmethod
    def between(cls, now: Sequence[float], before: Sequence[float]) -> Norms:
        """Of the cells at two moments; the largest is that of the later one."""
        more = (a - b for a, b in zip(now[_BINS:], before[_BINS:], strict=True))
        bins = {at: n for at, n in enumerate(more) if n}
        return cls(now[_LARGEST] if bins else 0.0, now[_SUM] - before[_SUM], bins)

    def plus(self, other: Norms) -> Norms:
        """The sum."""
        every = sorted({*self.bins, *other.bins})
        bins = {at: self.bins.get(at, 0.0) + other.bins.get(at, 0.0) for at in every}
        return Norms(max(self.peak, other.peak), self.total + other.total, bins)

    def saved(self) -> dict[str, Any]:
        """As plain numbers."""
        return {"total": self.total, "bins": [[at, n] for at, n in self.bins.items()]}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Norms:
        """The inverse of `saved`; ValueError, TypeError or KeyError for what is none."""
        bins = {at: float(n) for at, n in saved["bins"]}
        if not bins.keys() <= set(range(_LAST + 1)):
            raise ValueError(f"the bins are 0 to {_LAST}")
        return cls(0.0, float(saved["total"]), bins)

    @property
    def count(self) -> int:
        """How many norms there were."""
        return round(sum(self.bins.values()))

    @property
    def mean(self) -> float | None:
        """The mean; None of none."""
        return self.total / sum(self.bins.values()) if self.bins else None

    @property
    def largest(self) -> float | None:
        """The largest; where it is not known, as after loading a state, at most 9 % above it."""
        return self.peak or _edge(max(self.bins)) if self.bins else None

    def quantile(self, q: float) -> float | None:
        """The norm that a share `q` of them does not exceed, within 4.5 %; None of none.

        Raises:
            ValueError: for `q` outside [0, 1].
        """
        q = as_number("q", q)
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"q must be in [0, 1], got {q:g}")
        left = q * sum(self.bins.values()) * (1 - 1e-12)  # a share such as 0.1 is rounded
        for at, n in sorted(self.bins.items()):
            left -= n
            if left <= 0:
                largest = self.largest
                return min(_middle(at), largest) if largest is not None and q < 1 else largest
        return self.largest

    def __repr__(self) -> str:
        if not self.bins:
            return "Norms(count=0)"
        shown = {"mean": self.mean, "median": self.quantile(0.5), "p99": self.quantile(0.99)}
        listed = ", ".join(f"{name}={x:.4g}" for name, x in shown.items())
        return f"Norms(count={self.count}, {listed}, largest={self.largest:.4g})"


NO_NORMS = Norms(0.0, 0.0, {})


def _edge(at: int) -> float:
    """Where a bin ends."""
    return float(2 ** (_LOWEST + at / _PER_OCTAVE)) if at else 0.0


def _middle(at: int) -> float:
    """What stands for the norms in a bin: no more than `ERROR` from any."""
    return float(_edge(at) / (1 + ERROR)) if at <= _LAST - 1 else float("inf")
