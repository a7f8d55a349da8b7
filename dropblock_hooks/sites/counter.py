"""Counting: totals that only grow, snapshots of them, and windows between two snapshots.

A `Counter` adds in Python. A count that is a tensor is added on its device and is read only when
someone asks, for all counters at once (`read`), which puts numbers in place of the tensors. The
totals are never set back: a window is the difference of two snapshots.

The norms of gradients are counted in a histogram, one tensor of *cells*: the sum of the norms, then
the number of norms in each bin. A bin covers a quarter of an octave (a factor of two), from 2**-64
to 2**64. A quantile that is read from the bins has a relative error of at most 9.1 %. Smaller norms
count as 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import as_number
from ..functional.masks import wide_dtype

_PER_OCTAVE, _LOWEST, _OCTAVES = 4, -64, 128
_LAST = _PER_OCTAVE * _OCTAVES + 1  # the bin above all others; zeros are in bin 0
_MOST_NORMS = 64  # tensors of norms that wait to be counted together


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

    def __init__(self, cells: Tensor | None) -> None:
        values: list[float] = [0.0] if cells is None else cells.tolist()
        self.total, *counts = values
        self.bins = {at: n for at, n in enumerate(counts) if n}

    def saved(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {"total": self.total, "bins": [[at, n] for at, n in self.bins.items()]}

    @staticmethod
    def restored(saved: Mapping[str, Any]) -> Tensor:
        """Return the cells of what `saved` returned, or raise ValueError, TypeError or KeyError."""
        cells = [float(saved["total"]), *[0.0] * (_LAST + 1)]
        for at, n in saved["bins"]:
            if not 0 <= at <= _LAST:
                raise ValueError(f"the bins are 0 to {_LAST}")
            cells[1 + at] = float(n)
        return torch.tensor(cells, dtype=torch.float64, device="cpu")

    @property
    def count(self) -> int:
        """The number of norms."""
        return round(sum(self.bins.values()))

    @property
    def mean(self) -> float | None:
        """The mean; None without norms."""
        return self.total / self.count if self.bins else None

    @property
    def largest(self) -> float | None:
        """The largest norm, within 9 %; None without norms."""
        found = self.quantile(1.0)
        return None if found is None or self.mean is None else max(found, self.mean)

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


class Snapshot(NamedTuple):
    """The totals of a counter at a moment, or their growth between two moments."""

    evaluated: int = 0  # calls of the layer in evaluation mode
    trained: int = 0  # calls in training mode
    active: int = 0  # calls in which the regularizer was active; for gradients, gradients seen
    off: int = 0  # calls in training mode while the attachment was switched off
    affected: Any = 0  # elements that were dropped or changed; a tensor until it is read
    total: int = 0  # elements that passed
    expected: float = 0.0  # the sum of the nominal rates over these elements
    cells: Tensor | None = None  # the histogram of norms before a bound

    @property
    def calls(self) -> int:
        """Forward calls of the layer."""
        return self.evaluated + self.trained

    @property
    def norms(self) -> Norms:
        """The norms before a bound."""
        return Norms(self.cells)

    def plus(self, other: Snapshot, sign: int = 1) -> Snapshot:
        """The sum, for example over ranks, or with ``sign=-1`` the growth since `other`."""
        sums = [a + sign * b for a, b in zip(self[:-1], other[:-1], strict=True)]
        cells = other.cells if self.cells is None else self.cells
        if self.cells is not None and other.cells is not None:
            cells = self.cells + sign * other.cells
        return Snapshot._make([*sums, cells])

    def share(self) -> float | None:
        """The share of affected elements; None where no element was counted."""
        return self.affected / self.total if self.total else None

    def expected_share(self) -> float | None:
        """The mean nominal rate over the elements; None where no element was counted."""
        return self.expected / self.total if self.total else None


class Counter:
    """Counts the calls of a layer and the elements that a regularizer affects.

    It has the attributes of a `Snapshot`. Their tensors are never changed in place, because
    snapshots hold them. The counts are exact if one thread at a time runs the forward.
    """

    def __init__(self) -> None:
        self.evaluated = self.trained = self.active = self.off = self.total = 0
        self.affected: Any = 0
        self.expected = 0.0
        self.cells: Tensor | None = None
        self._norms: list[Tensor] = []  # that are not in the cells yet
        self.map_size: tuple[int, ...] | None = None  # the spatial size of the last tensor
        self.map_varies = False  # whether a tensor of another size came before
        self._begun = self._before = Snapshot()  # where the open window began, and the one before

    def add(
        self,
        affected: Tensor | int | None,
        total: int,
        rate: float,
        size: tuple[int, ...] | None = None,
        norms: Tensor | None = None,
    ) -> None:
        """Add one active call with `total` elements, at this nominal rate.

        `affected` of them were affected (None: unknown). `size` is the spatial size of a map.
        `norms` belong to a gradient before it was bounded, and may not be finite.
        """
        self.active += 1
        if size is not None and self.map_size != size:
            self.map_varies |= self.map_size is not None
            self.map_size = tuple(size)
        if affected is None:
            return
        if type(norms) is Tensor:  # others cannot be put together with these
            self._norms.append(norms.detach())
            if len(self._norms) >= _MOST_NORMS:
                self._bin_norms()
        if isinstance(affected, Tensor):
            affected = affected.detach()
            if isinstance(self.affected, Tensor) and self.affected.device != affected.device:
                self.affected = self.affected.to(affected.device)  # the model has moved
        self.affected = self.affected + affected
        self.total += total
        self.expected += rate * total

    def _bin_norms(self) -> None:
        """Count the norms in the cells, without those that are not finite or have no data.

        Many at once take hardly longer than one. No device is waited for.
        """
        waiting, self._norms = self._norms, []
        for device in dict.fromkeys(each.device for each in waiting if not each.is_meta):
            dtype = wide_dtype(device)
            here = [each.reshape(-1) for each in waiting if each.device == device]
            norms = torch.cat(here).to(dtype)
            before = norms.new_zeros(_LAST + 2) if self.cells is None else self.cells
            finite = norms < float("inf")  # False for NaN, too
            norms = norms.where(finite, 0.0)
            at = norms.log2() * _PER_OCTAVE + (1 - _LOWEST * _PER_OCTAVE)  # -inf of 0
            at = at.clamp(0, _LAST).long() + 1
            self.cells = before.to(device, dtype).index_add(0, at, finite.to(dtype))
            self.cells[0] += norms.sum()

    def life(self) -> Snapshot:
        """The totals since attaching, including a loaded state."""
        self._bin_norms()
        return Snapshot._make(getattr(self, name) for name in Snapshot._fields)

    def window(self) -> Snapshot:
        """The growth since the epoch began, or since attaching, loading or (elements) ``set``."""
        return self.life().plus(self._begun, -1)

    def closed(self) -> Snapshot:
        """The growth in the window before; empty in the first window."""
        return self._begun.plus(self._before, -1)

    def shown(self) -> Snapshot:
        """The open window; where no element was counted in it, the window that closed last."""
        window = self.window()
        return window if window.total else self.closed()

    def calls_in_windows(self) -> tuple[Snapshot, Snapshot]:
        """The calls in the open window and in the one before; no device is waited for."""
        now, begun, before = (Snapshot(*s[:4]) for s in (self.life(), self._begun, self._before))
        return now.plus(begun, -1), begun.plus(before, -1)

    def close_window(self) -> None:
        """Begin a new window; the present one becomes the closed one."""
        self._before, self._begun = self._begun, self.life()

    def forget_elements(self) -> None:
        """Begin the windows of the elements anew, as after ``set``; calls stay in theirs."""
        elements = self.life()[4:]
        self._begun = Snapshot._make((*self._begun[:4], *elements))
        self._before = Snapshot._make((*self._before[:4], *elements))

    def restore(self, life: Snapshot, window: Snapshot) -> None:
        """Take over totals that were read or saved. Only elements count in the open window."""
        self._begun = self._before = life.plus(window, -1)
        self._norms = []
        vars(self).update(life._asdict())

    def plus(self, other: Counter) -> Counter:
        """The counts of two ranks together."""
        both = Counter()
        both.restore(self.life().plus(other.life()), Snapshot())
        both._begun, both._before = self._begun.plus(other._begun), self._before.plus(other._before)
        both.map_size = self.map_size or other.map_size
        both.map_varies = self.map_varies or other.map_varies or self.map_size != other.map_size
        return both

    def read(self) -> Counter:
        """Read everything that was counted, which waits for the device; return itself."""
        read([self])
        return self


def read(counters: Sequence[Counter]) -> None:
    """Put numbers in place of the tensors of several counters; each device is waited for once."""
    moments = [(counter.life(), counter._begun, counter._before) for counter in counters]
    found = [x for moment in moments for each in moment for x in (each.affected, each.cells)]
    unread = {id(x): x for x in found if isinstance(x, Tensor)}
    numbers: dict[int, Tensor] = {}
    for device in {x.device for x in unread.values()}:
        rows = {key: x.detach().reshape(-1) for key, x in unread.items() if x.device == device}
        values = torch.cat(list(rows.values())).cpu().double()
        parts = torch.split(values, [row.numel() for row in rows.values()])
        numbers |= dict(zip(rows, parts, strict=True))

    def known(counts: Snapshot) -> Snapshot:
        affected = counts.affected
        if isinstance(affected, Tensor):
            affected = int(numbers[id(affected)])
        return counts._replace(affected=affected, cells=numbers.get(id(counts.cells)))

    for counter, (life, begun, before) in zip(counters, moments, strict=True):
        vars(counter).update(known(life)._asdict(), _begun=known(begun), _before=known(before))
