"""What a site counts: numbers in eager mode, one tensor in compiled code.

Totals only grow. A `Mark` holds them as they were at one moment, and a window is the difference of
two marks: nothing is ever set back, and no device is waited for until someone asks. Then all that
lies on a device is read at once: of one record, or of those that are held still together.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional.axes import Form
from ..functional.gradients import Clipped
from .meter import ACTIVE, AFFECTED, CALLS, MODE, NOTHING, RESUMED, Counted, Meter, Sizes
from .transfer import numbers_of

Varying = tuple[int | tuple[int, int], ...]
"""A size per axis; (smallest, largest) where it varies."""

_COUNTING = threading.Lock()  # one for all: a lock of its own could be neither copied nor pickled


class Counts(NamedTuple):
    """Numbers of calls and of elements: since the beginning, or of a window.

    Attributes:
        evaluated: calls of the layer in evaluation mode.
        trained: calls in training mode, and all that compiled code has regularized.
        active: calls in which the regularizer was on; of one for gradients, gradients seen.
        affected: elements that were dropped or changed.
        total: elements that passed.
        expected: the sum of the nominal rates over these elements.
        norm: the sum of the norms of gradients before they were clipped, of the unscaled loss.
        norms: how many these are.
    """

    evaluated: int = 0
    trained: int = 0
    active: int = 0
    affected: int = 0
    total: int = 0
    expected: float = 0.0
    norm: float = 0.0
    norms: int = 0

    @classmethod
    def of(cls, numbers: Iterable[float]) -> Counts:
        """Of numbers in this order, which a device may hold as floats."""
        kinds = (type(nothing) for nothing in cls._field_defaults.values())
        return cls._make(kind(each) for kind, each in zip(kinds, numbers, strict=True))

    @property
    def calls(self) -> int:
        """Forward calls of the layer."""
        return self.evaluated + self.trained

    def plus(self, other: Counts) -> Counts:
        """The sum."""
        return Counts._make(a + b for a, b in zip(self, other, strict=True))

    def since(self, earlier: Counts) -> Counts:
        """The difference."""
        return Counts._make(a - b for a, b in zip(self, earlier, strict=True))

    def share(self) -> float | None:
        """The share affected; None where nothing was counted."""
        return self.affected / self.total if self.total else None

    def expected_share(self) -> float | None:
        """The mean of the nominal rates, by elements; None where nothing was counted."""
        return self.expected / self.total if self.total else None

    def mean_norm(self) -> float | None:
        """The mean norm of gradients before they were clipped; None where none was taken."""
        return self.norm / self.norms if self.norms else None


class Mark:
    """The totals of a site at one moment; `settle` reads what lies on a device.

    Args:
        eager: the counts of eager mode; elements and norms may be tensors.
        metered: what the meter showed; None where nothing was compiled.
    """

    def __init__(self, eager: Counts, metered: Tensor | list[float] | None = None) -> None:
        self.eager = eager
        self._metered: Any = metered

    def unread(self) -> Iterator[Tensor]:
        """What lies on a device."""
        return (each for each in (*self.eager, self._metered) if isinstance(each, Tensor))

    def fill(self, read: dict[int, list[float]]) -> None:
        """Take what was read, by the identity of its tensor."""
        self.eager = Counts.of(read.get(id(each), (each,))[0] for each in self.eager)
        self._metered = read.get(id(self._metered), self._metered)

    def numbers(self) -> list[float]:
        """What the meter showed, once that is settled."""
        return NOTHING if self._metered is None else self._metered

    def calls(self) -> Counts:
        """The calls alone: those of eager mode never lie on a device."""
        evaluated, trained, active, *_ = self.eager
        numbers = self.numbers()
        return Counts(evaluated, trained + int(numbers[CALLS]), active + int(numbers[ACTIVE]))

    def counts(self) -> Counts:
        """All counts, once they are settled."""
        return self.eager.plus(Counts.of((0, *self.numbers()[:MODE])))

    def with_elements_of(self, other: Mark) -> Mark:
        """The calls of this moment, and the elements of another."""
        mine, theirs = self.numbers(), other.numbers()
        eager = Counts._make((*self.eager[:3], *other.eager[3:]))
        return Mark(eager, [*mine[:AFFECTED], *theirs[AFFECTED:MODE], *mine[MODE:]])


def settle(marks: list[Mark]) -> None:
    """Read all that lies on devices, each of which is waited for once; none is left in the list."""
    unsettled = {id(mark): mark for mark in marks}.values()
    read = numbers_of([each for mark in unsettled for each in mark.unread()])
    for mark in unsettled:
        mark.fill(read)
    marks.clear()  # records that stand still share the list


@dataclass(frozen=True)
class Reading:
    """What a site has counted, read at one moment.

    Attributes:
        life: since attaching, with what a loaded state had counted.
        window: since the epoch began, or since attaching or loading; elements also since `set`.
        closed: the window before; empty where there is none.
        maps: the smallest and the largest map, per axis.
        compiled: calls that compiled code has counted.
        resumed: how often training has resumed after an evaluation, as compiled code has seen it.
    """

    life: Counts
    window: Counts
    closed: Counts
    maps: Sizes | None
    compiled: int = 0
    resumed: int = 0

    @property
    def map_size(self) -> Varying | None:
        """The size of the maps, per axis; (smallest, largest) where it varies."""
        return None if self.maps is None else varying(self.maps)

    @property
    def shown(self) -> Counts:
        """The open window; where nothing was counted in it, the one that was closed last."""
        return self.window if self.window.total else self.closed

    def plus(self, other: Reading) -> Reading:
        """The sum, as over processes."""
        return Reading(
            self.life.plus(other.life),
            self.window.plus(other.window),
            self.closed.plus(other.closed),
            _union(self.maps, other.maps),
            self.compiled + other.compiled,
            self.resumed + other.resumed,
        )


class Idle:
    """Calls at a rate of 0 with tensors of one shape and type, in which nothing is to be done.

    Attributes:
        form: how their axes are read.
        total: elements to count in each.
        calls: counts them, one with each `next`, from any thread.
        looks: how often they were looked at.
    """

    def __init__(self, dtype: torch.dtype, form: Form, total: int) -> None:
        self.dtype, self.form, self.total = dtype, form, total
        self.calls, self.looks = itertools.count(), 0


class Record:
    """All that a site has counted, whether in eager mode or in compiled code.

    Attributes:
        evaluated: counts the calls in evaluation mode, one with each `next`, from any thread.
        trained: the same in training mode.
        idle: counts those at a rate of 0 that need no run, by the shape of the tensor.
        meter: what compiled code has counted.
    """

    def __init__(self, spatial: int | None, device: torch.device) -> None:
        self.meter = Meter(spatial, device)
        self.evaluated, self.trained = itertools.count(), itertools.count()
        self.idle: dict[torch.Size, Idle] = {}
        self._reads = 0
        self._active = self._total = 0
        self._lying: tuple[Any, Any, Any] = (0, 0.0, 0)  # affected, norm, norms: unread tensors
        self._expected = 0.0
        self._maps: Sizes | None = None
        self._earlier = Counts()  # what a loaded state had counted
        self._loaded = self._begun = self._before = Mark(Counts())
        self._held: tuple[Mark, list[Mark]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        evaluated, trained, active, total = self._ticked()
        ticked = {"evaluated": evaluated, "trained": trained, "_active": active, "_total": total}
        return {**self.__dict__, **ticked, "idle": {}, "_reads": 0, "_held": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.evaluated = itertools.count(state["evaluated"])
        self.trained = itertools.count(state["trained"])

    def _ticked(self) -> tuple[int, int, int, int]:
        """Calls by mode, those in which it was on, and the elements that passed in these.

        To look at a counter is to count, so looks are taken off.
        """
        with _COUNTING:
            reads, self._reads = self._reads, self._reads + 1
            active, total = self._active, self._total
            for idle in [*self.idle.values()]:
                calls, idle.looks = next(idle.calls) - idle.looks, idle.looks + 1
                active, total = active + calls, total + calls * idle.total
            return next(self.evaluated) - reads, next(self.trained) - reads, active, total

    def add_active(self, affected: Counted, total: int, rate: float) -> None:
        """One more call in which the regularizer was on, and what it did; a tensor is not read."""
        with _COUNTING:
            self._active += 1
            if affected is None:
                return
            changed, norm, norms = self._lying
            if isinstance(affected, Clipped):
                norm, norms = _sum(norm, affected.norm), _sum(norms, affected.norms)
                affected = affected.changed
            self._lying = _sum(changed, affected), norm, norms
            self._total += total
            self._expected += rate * total

    def see_map(self, size: tuple[int, ...]) -> None:
        """Widen the range of map sizes."""
        if self._maps != (size, size) and all(isinstance(edge, int) for edge in size):
            self._maps = _union(self._maps, (tuple(size), tuple(size)))

    def eager_window(self) -> Counts:
        """Calls of the open window in eager mode alone; does not wait for the device."""
        then = self._begun.eager
        return Counts(*self._ticked()[:3]).since(Counts(*then[:3]))

    def read(self, elements: bool = True) -> Reading:
        """All that was counted. Waits for the device.

        Without elements, only where compiled code may have counted.
        """
        now, marks = self._at()
        if elements or self.meter.is_used:
            settle(marks)
        of = Mark.counts if elements else Mark.calls
        counts, (loaded, begun, before) = of(now), map(of, self._marks())
        numbers = now.numbers()
        return Reading(
            life=self._earlier.plus(counts.since(loaded)),
            window=counts.since(begun),
            closed=begun.since(before),
            maps=_union(self._maps, Meter.maps(numbers)),
            compiled=int(numbers[CALLS]),
            resumed=int(numbers[RESUMED]),
        )

    def _at(self) -> tuple[Mark, list[Mark]]:
        """This moment, and all that is read with it."""
        if self._held is not None:
            return self._held
        now = self._now()
        return now, [now, *self._marks()]

    def _marks(self) -> tuple[Mark, ...]:
        return self._loaded, self._begun, self._before

    def _now(self) -> Mark:
        *calls, total = self._ticked()
        with _COUNTING:
            affected, norm, norms = self._lying
            eager = Counts._make((*calls, affected, total, self._expected, norm, norms))
            return Mark(eager, self.meter.copied())

    def close_window(self) -> None:
        """Begin a new window; the old one is the one before, then."""
        self._before, self._begun = self._begun, self._at()[0]

    def forget_elements(self) -> None:
        """Begin the windows of the elements anew; calls stay in theirs. Waits for the device."""
        now, marks = self._at()
        settle(marks)
        self._before = self._before.with_elements_of(now)
        self._begun = self._begun.with_elements_of(now)

    def restore(self, life: Counts) -> None:
        """Take over what another record had counted in its life, and begin a new window."""
        self._earlier = life
        self._loaded = self._before = self._begun = self._at()[0]


@contextmanager
def standing_still(records: Iterable[Record]) -> Iterator[None]:
    """Within it, records answer as of its beginning, and are read all at once."""
    held = {record: record._now() for record in records if record._held is None}
    marks = [*held.values(), *(mark for record in held for mark in record._marks())]
    for record, now in held.items():
        record._held = now, marks
    try:
        yield
    finally:
        for record in held:
            record._held = None


def _sum(before: Any, more: Any) -> Any:
    """The sum, on the device of what is new: the model may have moved."""
    if isinstance(more, Tensor):
        more = more.detach() if more.requires_grad else more
        if isinstance(before, Tensor) and before.device != more.device:
            before = before.to(more.device)
    return before + more


def varying(sizes: Sizes) -> Varying:
    """Per axis, the one size; (smallest, largest) where it varies."""
    return tuple(low if low == high else (low, high) for low, high in zip(*sizes, strict=True))


def _union(a: Sizes | None, b: Sizes | None) -> Sizes | None:
    if a is None or b is None:
        return a or b
    return tuple(map(min, a[0], b[0])), tuple(map(max, a[1], b[1]))
