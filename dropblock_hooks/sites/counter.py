"""Counting: totals that only grow, snapshots of them, and windows between two snapshots.

A `Counter` adds in Python. A count that is a tensor is added on its device and is read only when
someone asks, for all counters at once (`read`). The totals are never set back: a window is the
difference of two snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .norms import Norms, add_norms

_MOST_NORMS = 64  # tensors of norms that wait to be counted together


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
        off: how many of the training calls were made while the attachment was switched off.
        cells: the histogram of norms before a bound; a tensor until it is read, None without norms.
    """

    evaluated: int = 0
    trained: int = 0
    active: int = 0
    affected: Any = 0
    total: int = 0
    expected: float = 0.0
    compiled: int = 0
    off: int = 0
    cells: Any = None

    @property
    def calls(self) -> int:
        """Forward calls of the layer."""
        return self.evaluated + self.trained

    @property
    def norms(self) -> Norms:
        """The norms before a bound."""
        return Norms(self.cells)

    def plus(self, other: Snapshot, sign: int = 1) -> Snapshot:
        """The sum, for example over ranks, or with ``sign=-1`` what was counted since `other`."""
        cells = self.cells or other.cells
        if self.cells and other.cells:
            cells = [a + sign * b for a, b in zip(self.cells, other.cells, strict=True)]
        sums = [a + sign * b for a, b in zip(self[:-1], other[:-1], strict=True)]
        return Snapshot._make([*sums, cells])

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
    """

    life: Snapshot
    window: Snapshot
    closed: Snapshot
    map_size: tuple[int, ...] | None
    map_varies: bool

    @property
    def shown(self) -> Snapshot:
        """The open window; where no element was counted in it, the window that closed last."""
        return self.window if self.window.total else self.closed

    def plus(self, other: Totals) -> Totals:
        """The sum over two ranks."""
        return Totals(
            self.life.plus(other.life),
            self.window.plus(other.window),
            self.closed.plus(other.closed),
            self.map_size or other.map_size,
            self.map_varies or other.map_varies or self.map_size != other.map_size,
        )


class Counter:
    """Counts the calls of a layer and the elements that a regularizer affects.

    It is exact if one thread at a time runs the forward.

    Attributes:
        evaluated, trained, active, affected, total, expected, compiled, off, cells: as in a
            `Snapshot`. Tensors are never changed in place, because snapshots hold them.
        map_size: the spatial size of the last tensor; None before the first.
        map_varies: whether a tensor of another size came before.
    """

    def __init__(self) -> None:
        self.evaluated = self.trained = self.active = self.compiled = self.off = self.total = 0
        self.affected: Any = 0
        self.expected = 0.0
        self.cells: Tensor | None = None
        self._norms: list[Tensor] = []  # that are not in the cells yet
        self.map_size: tuple[int, ...] | None = None
        self.map_varies = False
        self._begun = self._before = Snapshot()

    def add(
        self,
        affected: Tensor | int | None,
        total: int,
        rate: float,
        size: tuple[int, ...] | None = None,
        norms: Tensor | None = None,
    ) -> None:
        """Add one active call.

        Args:
            affected: the number of affected elements; None if it is unknown.
            total: the number of all elements.
            rate: the nominal rate.
            size: the spatial size of the tensor, where it is a map.
            norms: of a gradient, before it was bounded; some may not be finite.
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
                self._add_norms()
        if isinstance(affected, Tensor):
            affected = affected.detach()
            if isinstance(self.affected, Tensor) and self.affected.device != affected.device:
                self.affected = self.affected.to(affected.device)  # the model has moved
        self.affected = self.affected + affected
        self.total += total
        self.expected += rate * total

    def _add_norms(self) -> None:
        """Count the norms in the cells. Many at once take hardly longer than one."""
        norms, self._norms = self._norms, []
        for device in dict.fromkeys(each.device for each in norms):
            here = [each.reshape(-1) for each in norms if each.device == device]
            self.cells = add_norms(self.cells, torch.cat(here))

    def snapshot(self) -> Snapshot:
        """The totals of now; a tensor in them is not read."""
        self._add_norms()
        return Snapshot._make(getattr(self, name) for name in Snapshot._fields)

    def close_window(self) -> None:
        """Begin a new window; the present one becomes the closed one."""
        self._before, self._begun = self._begun, self.snapshot()

    def forget_elements(self) -> None:
        """Begin the windows of the elements anew, as after ``set``; calls stay in theirs."""
        now = self.snapshot()
        elements = {name: getattr(now, name) for name in ("affected", "total", "expected", "cells")}
        self._begun = self._begun._replace(**elements)
        self._before = self._before._replace(**elements)

    def restore(self, life: Snapshot) -> None:
        """Take over totals that were read or saved, and begin a window that is empty."""
        vars(self).update(life._asdict())
        if life.cells is not None:
            self.cells = torch.tensor(life.cells, dtype=torch.float64, device="cpu")
        self._norms = []
        self._begun = self._before = self.snapshot()

    def read(self) -> Totals:
        """Everything that was counted. Waits for the device."""
        return read([self])[0]


def read(counters: Iterable[Counter], *, wait: bool = True) -> list[Totals]:
    """Read several counters at one moment; each device is waited for once.

    With ``wait=False`` no device is waited for: affected elements on a device count as 0 then, and
    norms are left out.
    """
    counters = list(counters)
    moments = [(c.snapshot(), c._begun, c._before) for c in counters]
    found = (x for triple in moments for each in triple for x in (each.affected, each.cells))
    unread = [x for x in found if isinstance(x, Tensor)] if wait else []
    numbers: dict[int, list[float]] = {}
    for device in {each.device for each in unread}:
        rows = {id(each): _row(each) for each in unread if each.device == device}
        values = iter(torch.cat(list(rows.values())).tolist())
        numbers |= {key: list(islice(values, row.numel())) for key, row in rows.items()}

    def known(counts: Snapshot) -> Snapshot:
        affected = counts.affected
        if isinstance(affected, Tensor):
            affected = int(numbers.get(id(affected), [0.0])[0])
        return counts._replace(affected=affected, cells=numbers.get(id(counts.cells)))

    totals = []
    for counter, triple in zip(counters, moments, strict=True):
        now, begun, before = map(known, triple)
        window, closed = now.plus(begun, -1), begun.plus(before, -1)
        totals.append(Totals(now, window, closed, counter.map_size, counter.map_varies))
    return totals


def _row(tensor: Tensor) -> Tensor:
    """The elements in one row, whole if they are spread over devices."""
    whole: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return whole.detach().reshape(-1)
