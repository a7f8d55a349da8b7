"""The record of a site: totals that only grow, and the moments between which its windows lie."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..functional.gradients import Clipped
from .counts import Counts, Mark, Reading, settle, union
from .meter import CALLS, RESUMED, Counted, Meter, Sizes
from .norms import NO_NORMS, Norms

_COUNTING = threading.Lock()  # one for all: a lock of its own could be neither copied nor pickled


class Record:
    """All that a site has counted, whether in eager mode or in compiled code.

    Attributes:
        evaluated: calls in evaluation mode.
        trained: calls in training mode.
        meter: what compiled code has counted.
    """

    def __init__(self, spatial: int | None, gradients: bool = False) -> None:
        self.meter = Meter(spatial, torch.device("cpu"), gradients)
        self.evaluated = self.trained = 0
        self._active = self._total = 0
        self._lying: Any = 0  # affected: an unread tensor
        self._expected = 0.0
        self._maps: Sizes | None = None
        self._earlier = Counts(), NO_NORMS  # what a loaded state had counted
        self._loaded = self._begun = self._before = Mark(Counts())
        self._held: _Moment | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}

    def _ticked(self) -> tuple[int, int, int, int]:
        """Calls by mode, those in which it was on, and the elements that passed in these."""
        return self.evaluated, self.trained, self._active, self._total

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within it, calls in evaluation are not counted."""
        evaluated = self.evaluated
        try:
            yield
        finally:
            self.evaluated = evaluated

    def add_active(self, affected: Counted, total: int, rate: float) -> None:
        """One more call in which the regularizer was on, and what it did; a tensor is not read."""
        with _COUNTING:
            self._active += 1
            if affected is None:
                return
            if isinstance(affected, Clipped):
                if self.meter.norms is not None:
                    self.meter.norms.to(affected.met.norms.device)
                    self.meter.norms.add(affected.met)
                affected = affected.changed
            self._lying = _sum(self._lying, affected)
            self._total += total
            self._expected += rate * total

    def see_map(self, size: tuple[int, ...]) -> None:
        """Widen the range of map sizes."""
        if self._maps != (size, size) and all(isinstance(edge, int) for edge in size):
            self._maps = union(self._maps, (tuple(size), tuple(size)))

    def eager_window(self) -> Counts:
        """Calls of the open window in eager mode alone; does not wait for the device."""
        with _COUNTING:
            calls = self._ticked()[:3]
        return Counts(*calls).since(Counts(*self._begun.eager[:3]))

    def read(self, elements: bool = True, norms: bool = False) -> Reading:
        """All that was counted, norms only where they are asked for. Waits for the device.

        Without elements, only where compiled code may have counted.
        """
        now, marks = self._at()
        if elements or self.meter.is_used:
            settle(marks, self._asks_norms(norms))
        if norms:
            settle([now, *self._marks()], norms)  # where that was not said before the first look
        of = Mark.counts if elements else Mark.calls
        counts, (loaded, begun, before) = of(now), map(of, self._marks())
        numbers = now.numbers()
        return Reading(
            life=self._earlier[0].plus(counts.since(loaded)),
            window=counts.since(begun),
            closed=begun.since(before),
            maps=union(self._maps, Meter.maps(numbers)),
            norms=self._norms(now) if norms else {},
            compiled=int(numbers[CALLS]),
            resumed=int(numbers[RESUMED]),
        )

    def _asks_norms(self, norms: bool) -> bool:
        """Whether norms are read now: also where all will be asked for them."""
        held = self._held
        return norms or (held is not None and held.norms)

    def _norms(self, now: Mark) -> dict[str, Norms]:
        """The norms of life, window and closed window."""
        if self.meter.norms is None:
            return {}
        latest, loaded, begun, before = (mark.norms() for mark in (now, *self._marks()))
        return {
            "life": replace(self._earlier[1].plus(Norms.between(latest, loaded)), peak=0.0),
            "window": Norms.between(latest, begun),
            "closed": Norms.between(begun, before),
        }

    def _at(self) -> tuple[Mark, list[Mark]]:
        """This moment, and all that is read with it."""
        held = self._held  # asked once: another thread may end it
        if held is not None:
            return held.of(self)
        now = self._now()
        return now, [now, *self._marks()]

    def _marks(self) -> tuple[Mark, ...]:
        return self._loaded, self._begun, self._before

    def _now(self) -> Mark:
        with _COUNTING:
            *calls, total = self._ticked()
            eager = Counts._make((*calls, self._lying, total, self._expected))
            norms = None if self.meter.norms is None else self.meter.norms.copied()
            return Mark(eager, self.meter.copied(), norms)

    def close_window(self) -> None:
        """Begin a new window; the old one is the one before, then."""
        self._before, self._begun = self._begun, self._at()[0]
        self._forget_largest()

    def forget_elements(self) -> None:
        """Begin the windows of the elements anew; calls stay in theirs. Waits for the device."""
        now, marks = self._at()
        settle(marks)
        self._before = self._before.with_elements_of(now)
        self._begun = self._begun.with_elements_of(now)
        self._forget_largest()

    def restore(self, life: Counts, norms: Norms = NO_NORMS) -> None:
        """Take over what another record had counted in its life, and begin a new window."""
        self._earlier = life, norms
        self._loaded = self._before = self._begun = self._at()[0]
        self._forget_largest()

    def _forget_largest(self) -> None:
        if self.meter.norms is not None:
            self.meter.norms.forget_largest()


class _Moment:
    """The marks of records at one moment: when one of them is first asked.

    Attributes:
        norms: whether norms are read with all else.
    """

    def __init__(self, records: list[Record], norms: bool) -> None:
        self._records, self.norms = records, norms
        self._now: dict[Record, Mark] = {}
        self._marks: list[Mark] = []

    def of(self, record: Record) -> tuple[Mark, list[Mark]]:
        """The mark of a record, and all that is read with it."""
        if not self._now:
            self._now = {each: each._now() for each in self._records}
            self._marks = [*self._now.values(), *(m for each in self._now for m in each._marks())]
        return self._now[record], self._marks


@contextmanager
def standing_still(records: Iterable[Record], norms: bool = False) -> Iterator[None]:
    """Within it, records answer as of the first question, and are read all at once.

    `norms` says whether norms will be asked for: they are read with the rest then.
    """
    held = [record for record in records if record._held is None]
    moment = _Moment(held, norms)
    for record in held:
        record._held = moment
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
