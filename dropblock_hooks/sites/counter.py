"""Counting: totals that only grow, snapshots of them, and windows between two snapshots.

A `Counter` adds in Python. A count that is a tensor is added on its device and is read only when
someone asks, for all counters at once (`read`). The totals are never set back: a window is the
difference of two snapshots, and `Counter.close_window` is the only place where a window ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .norms import NO_NORMS, Histogram, Norms


class Clipped(NamedTuple):
    """What a bound has done to a gradient; neither tensor is read before someone asks.

    Attributes:
        changed: the number of values that it has changed.
        norms: the norms before it has changed any; some may not be finite.
    """

    changed: Tensor
    norms: Tensor


Counted = Clipped | Tensor | int | None
"""The number of affected elements; of a gradient with a bound, the norms before the bound too."""


class Snapshot(NamedTuple):
    """The totals of a counter at one moment, or what was counted between two moments.

    Attributes:
        evaluated: calls of the layer in evaluation mode.
        trained: calls in training mode.
        active: calls in which the regularizer was active; for gradients, gradients seen.
        affected: elements that were dropped or changed; a tensor until it is read.
        total: elements that passed.
        expected: the sum of the nominal rates over these elements.
        compiled: how many of the calls were made by compiled code.
    """

    evaluated: int = 0
    trained: int = 0
    active: int = 0
    affected: Any = 0
    total: int = 0
    expected: float = 0.0
    compiled: int = 0

    @property
    def calls(self) -> int:
        """Forward calls of the layer."""
        return self.evaluated + self.trained

    def plus(self, other: Snapshot) -> Snapshot:
        """The sum, for example over ranks."""
        return Snapshot._make(a + b for a, b in zip(self, other, strict=True))

    def since(self, earlier: Snapshot) -> Snapshot:
        """What was counted since an earlier snapshot."""
        return Snapshot._make(a - b for a, b in zip(self, earlier, strict=True))

    def share(self) -> float | None:
        """The share of affected elements; None where no element was counted."""
        return self.affected / self.total if self.total else None

    def expected_share(self) -> float | None:
        """The mean nominal rate over the elements; None where no element was counted."""
        return self.expected / self.total if self.total else None


@dataclass(frozen=True)
class Totals:
    """What one counter holds, read at one moment.

    Attributes:
        life: since attaching, with what a loaded state had counted.
        window: since the epoch began, or since attaching or loading; elements also since ``set``.
        closed: the window before; empty where there is none.
        map_size: the spatial size of the last tensor; None where there is none.
        map_varies: whether other sizes came before.
        norms: gradient norms before a bound over life, window and closed window; empty unless
            they were read.
    """

    life: Snapshot
    window: Snapshot
    closed: Snapshot
    map_size: tuple[int, ...] | None
    map_varies: bool
    norms: tuple[Norms, Norms, Norms] = (NO_NORMS, NO_NORMS, NO_NORMS)

    @property
    def shown(self) -> Snapshot:
        """The open window; where no element was counted in it, the window that closed last."""
        return self.window if self.window.total else self.closed

    @property
    def shown_norms(self) -> Norms | None:
        """The norms of the same window; None where there are none."""
        norms = self.norms[1 if self.window.total else 2]
        return norms if norms.bins else None

    def plus(self, other: Totals) -> Totals:
        """The sum over two ranks."""
        return Totals(
            self.life.plus(other.life),
            self.window.plus(other.window),
            self.closed.plus(other.closed),
            self.map_size or other.map_size,
            self.map_varies or other.map_varies or self.map_size != other.map_size,
            tuple(a.plus(b) for a, b in zip(self.norms, other.norms, strict=True)),  # type: ignore[arg-type]  # three
        )


class _Moment(NamedTuple):
    """The totals and the cells of the histogram at one moment."""

    counts: Snapshot = Snapshot()
    cells: Any = None


class Counter:
    """Counts the calls of a layer and the elements that a regularizer affects.

    It is exact if one thread at a time runs the forward.

    Attributes:
        evaluated: calls in evaluation mode.
        trained: calls in training mode.
        compiled: calls that compiled code has made, of both kinds.
        map_size: the spatial size of the last tensor; None before the first.
        map_varies: whether a tensor of another size came before.
        histogram: of gradient norms before a bound; None before the first.
    """

    def __init__(self) -> None:
        self.evaluated = self.trained = self.compiled = 0
        self._active = self._total = 0
        self._affected: Any = 0
        self._expected = 0.0
        self.map_size: tuple[int, ...] | None = None
        self.map_varies = False
        self.histogram: Histogram | None = None
        self._begun = self._before = _Moment()

    def add(
        self, affected: Counted, total: int, rate: float, size: tuple[int, ...] | None = None
    ) -> None:
        """Add one active call.

        Args:
            affected: the number of affected elements; None if it is unknown.
            total: the number of all elements.
            rate: the nominal rate.
            size: the spatial size of the tensor, where it is a map.
        """
        self._active += 1
        if size is not None and self.map_size != size:
            self.map_varies |= self.map_size is not None
            self.map_size = tuple(size)
        if affected is None:
            return
        if isinstance(affected, Clipped):
            if self.histogram is None:
                self.histogram = Histogram(affected.norms.device)
            self.histogram.add(affected.norms)
            affected = affected.changed
        if isinstance(affected, Tensor):
            affected = affected.detach()
            if isinstance(self._affected, Tensor) and self._affected.device != affected.device:
                self._affected = self._affected.to(affected.device)  # the model has moved
        self._affected = self._affected + affected
        self._total += total
        self._expected += rate * total

    def snapshot(self) -> Snapshot:
        """The totals of now; a tensor in them is not read."""
        return Snapshot(
            self.evaluated,
            self.trained,
            self._active,
            self._affected,  # never changed in place
            self._total,
            self._expected,
            self.compiled,
        )

    def _moment(self) -> _Moment:
        return _Moment(self.snapshot(), None if self.histogram is None else self.histogram.copy())

    @property
    def trained_in_window(self) -> tuple[int, int]:
        """Training calls and active calls since the window began; no device is waited for."""
        begun = self._begun.counts
        return self.trained - begun.trained, self._active - begun.active

    def close_window(self) -> None:
        """Begin a new window; the present one becomes the closed one."""
        self._before, self._begun = self._begun, self._moment()

    def forget_elements(self) -> None:
        """Begin the windows of the elements anew, as after ``set``; calls stay in theirs."""
        now = self._moment()
        self._begun, self._before = (
            _Moment(
                Snapshot(*moment.counts[:3], *now.counts[3:6], moment.counts.compiled), now.cells
            )
            for moment in (self._begun, self._before)
        )

    def restore(self, life: Snapshot, norms: Norms = NO_NORMS) -> None:
        """Take over the totals of a saved counter, and begin a window that is empty."""
        self.evaluated, self.trained, self._active = life[:3]
        self._affected, self._total, self._expected, self.compiled = life[3:]
        if norms.bins:
            self.histogram = Histogram.of(norms)
        self._begun = self._before = self._moment()

    def read(self, norms: bool = False) -> Totals:
        """Everything that was counted, norms only if asked for. Waits for the device."""
        return read([self], norms=norms)[0]

    @contextmanager
    def uncounted(self) -> Any:
        """Calls in evaluation are not counted within a ``with`` block."""
        evaluated = self.evaluated
        try:
            yield
        finally:
            self.evaluated = evaluated


def read(counters: Iterable[Counter], *, norms: bool = False, wait: bool = True) -> list[Totals]:
    """Read several counters at one moment; each device is waited for once.

    With ``wait=False`` no device is waited for: affected elements on a device count as 0 then.
    """
    counters = list(counters)
    moments = [(c._moment(), c._begun, c._before) for c in counters]
    tensors = [
        each
        for triple in moments
        for moment in triple
        for each in (moment.counts.affected, moment.cells if norms else None)
        if isinstance(each, Tensor)
    ]
    numbers = numbers_of(tensors) if wait else {}

    def known(moment: _Moment) -> tuple[Snapshot, list[float] | None]:
        counts, cells = moment
        if isinstance(counts.affected, Tensor):
            affected = numbers.get(id(counts.affected), [0.0])[0]
            counts = counts._replace(affected=int(affected))
        return counts, numbers.get(id(cells))

    found = []
    for counter, triple in zip(counters, moments, strict=True):
        (now, cells), (begun, begun_cells), (before, before_cells) = map(known, triple)
        totals = Totals(
            now, now.since(begun), begun.since(before), counter.map_size, counter.map_varies
        )
        if cells is not None:
            spans = (cells, None), (cells, begun_cells), (begun_cells, before_cells)
            life, window, closed = (Norms.between(a, b) for a, b in spans)
            totals = replace(totals, norms=(life, window, closed))
        found.append(totals)
    return found


def numbers_of(tensors: Sequence[Tensor]) -> dict[int, list[float]]:
    """The numbers of each tensor, by its ``id``; each device is waited for once."""
    found: dict[int, list[float]] = {}
    for device in {each.device for each in tensors}:
        here = {id(each): _row(each) for each in tensors if each.device == device}
        numbers = iter(torch.cat(list(here.values())).tolist())
        found |= {key: list(islice(numbers, row.numel())) for key, row in here.items()}
    return found


def _row(tensor: Tensor) -> Tensor:
    """The elements in one row, whole if they are spread over devices."""
    whole: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return whole.detach().reshape(-1)
