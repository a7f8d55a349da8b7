"""Histograms of gradient norms before a bound.

A histogram is one tensor of *cells*: the sum of the norms, then the number of norms in each bin. A
bin covers a quarter of an octave (a factor of two), from 2**-64 to 2**64. A quantile that is read
from the bins has a relative error of at most 9.1 %. Smaller norms count as 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..checks import as_number
from ..functional.masks import wide_dtype

_PER_OCTAVE, _LOWEST, _OCTAVES = 4, -64, 128
_LAST = _PER_OCTAVE * _OCTAVES + 1  # the bin above all others; bin 0 is that of zeros


def add_norms(cells: Tensor | None, norms: Tensor) -> Tensor | None:
    """Return new cells with these norms counted; no device is waited for.

    Norms that are not finite are left out, and so are those without data.
    """
    norms = norms.detach().reshape(-1)
    if norms.is_meta or norms.numel() == 0:
        return cells
    dtype = wide_dtype(norms.device)
    norms = norms.to(dtype)
    cells = norms.new_zeros(_LAST + 2) if cells is None else cells.to(norms.device, dtype)
    finite = norms < float("inf")  # False for NaN, too
    norms = norms.where(finite, 0.0)
    at = norms.log2() * _PER_OCTAVE + (1 - _LOWEST * _PER_OCTAVE)  # -inf of 0
    at = at.clamp(0, _LAST).long() + 1
    counted = cells.index_add(0, at, finite.to(dtype))
    counted[0] += norms.sum()
    return counted


class Norms:
    """How large gradient norms were before a bound, in units of the unscaled loss.

    For `ClipGradNorm` they are the norms that it bounds: of gradients, samples or channels. For
    `ClampGrad` it is the largest magnitude of each gradient; with one bound only, towards that
    bound. Norms that are not finite are left out.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 2))
        >>> attached = attach(model, {"0": ClipGradNorm(1.0, per="sample")})
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> attached.sites[0].norms.count
        4

    Args:
        cells: of a histogram; None holds no norms.

    Attributes:
        total: the sum of the norms.
        bins: the number of norms in each bin that is not empty.
    """

    def __init__(self, cells: Sequence[float] | None) -> None:
        self.total, *counts = cells or (0.0,)
        self.bins = {at: n for at, n in enumerate(counts) if n}

    def saved(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {"total": self.total, "bins": [[at, n] for at, n in self.bins.items()]}

    @staticmethod
    def restored(saved: Mapping[str, Any]) -> list[float]:
        """Return the cells of what `saved` returned, or raise ValueError, TypeError or KeyError."""
        cells = [float(saved["total"]), *[0.0] * (_LAST + 1)]
        for at, n in saved["bins"]:
            if not 0 <= at <= _LAST:
                raise ValueError(f"the bins are 0 to {_LAST}")
            cells[1 + at] = float(n)
        return cells

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
