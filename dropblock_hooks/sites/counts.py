"""What a site counts: numbers in eager mode, one tensor in compiled code.

Totals only grow. A `Mark` holds them as they were at one moment, and a window is the difference of
two marks: nothing is ever set back, and no device is waited for until someone asks.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional.gradients import Clipped
from .meter import (
    ACTIVE,
    AFFECTED,
    CALLS,
    EXPECTED,
    MODE,
    NORM,
    NORMS,
    NOTHING,
    RESUMED,
    TOTAL,
    Counted,
    Meter,
    Sizes,
)

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


Lying = tuple[Tensor | int, Tensor | float, Tensor | int]
"""Elements affected, the sum of norms and their number, as tensors that nobody has read yet."""


class Mark:
    """The totals of a site at one moment; tensors in it are read when someone asks.

    Args:
        eager: the counts of eager mode, but for those that may be on a device.
        lying: these: elements affected, the sum of norms, their number.
        metered: what the meter showed; None where nothing was compiled.
    """

    def __init__(
        self,
        eager: Counts,
        lying: Lying = (0, 0.0, 0),
        metered: Tensor | list[float] | None = None,
    ) -> None:
        self.eager = eager
        self._lying = lying
        self._metered = metered

    def numbers(self) -> list[float] | None:
        """What the meter showed. Waits for the device, the first time."""
        if isinstance(self._metered, Tensor):
            self._metered = self._metered.tolist()
        return self._metered

    def calls(self) -> Counts:
        """The calls alone, without a look at the elements."""
        numbers = self.numbers() or NOTHING
        return Counts(
            self.eager.evaluated,
            self.eager.trained + int(numbers[CALLS]),
            self.eager.active + int(numbers[ACTIVE]),
        )

    def counts(self) -> Counts:
        """All counts. Waits for the device, the first time."""
        affected, norm, norms = self._lying
        self._lying = affected, norm, norms = int(affected), float(norm), int(norms)
        numbers = self.numbers() or NOTHING
        return self.calls()._replace(
            affected=affected + int(numbers[AFFECTED]),
            total=self.eager.total + int(numbers[TOTAL]),
            expected=self.eager.expected + numbers[EXPECTED],
            norm=norm + numbers[NORM],
            norms=norms + int(numbers[NORMS]),
        )

    def with_elements_of(self, other: Mark) -> Mark:
        """The calls of this moment, and the elements of another."""
        mine, theirs = self.numbers() or NOTHING, other.numbers() or NOTHING
        numbers = [*mine[:AFFECTED], *theirs[AFFECTED:MODE], *mine[MODE:]]
        eager = other.eager._replace(
            evaluated=self.eager.evaluated, trained=self.eager.trained, active=self.eager.active
        )
        return Mark(eager, other._lying, numbers)


@dataclass(frozen=True)
class Reading:
    """What a site has counted, read at one moment.

    Attributes:
        life: since attaching, with what a loaded state had counted.
        window: since the epoch began, or since attaching or loading; elements also since `set`.
        closed: the window before; empty where there is none.
        maps: the smallest and the largest map, per axis.
        compiled: calls that compiled code has counted.
    """

    life: Counts
    window: Counts
    closed: Counts
    maps: Sizes | None
    compiled: int = 0

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
        )

    def read(self) -> Reading:
        """Itself: it may stand in for the record."""
        return self

    def calls(self) -> Counts:
        """The calls of the whole life, as of the record."""
        return self.life

    def sizes(self) -> Sizes | None:
        """The smallest and the largest map, as of the record."""
        return self.maps


class Record:
    """All that a site has counted, whether in eager mode or in compiled code.

    Attributes:
        evaluated: counts the calls in evaluation mode, one with each `next`, from any thread.
        trained: the same in training mode.
        meter: what compiled code has counted.
    """

    def __init__(self, spatial: int | None, device: torch.device) -> None:
        self.meter = Meter(spatial, device)
        self.evaluated, self.trained = itertools.count(), itertools.count()
        self._reads = 0
        self._active = self._total = 0
        self._lying: Lying = (0, 0.0, 0)
        self._expected = 0.0
        self._maps: Sizes | None = None
        self._earlier = Counts()  # what a loaded state had counted
        self._loaded = self._begun = self._before = Mark(Counts())

    def __getstate__(self) -> dict[str, Any]:
        evaluated, trained = self._ticked()
        return {**self.__dict__, "evaluated": evaluated, "trained": trained, "_reads": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.evaluated = itertools.count(state["evaluated"])
        self.trained = itertools.count(state["trained"])

    def _ticked(self) -> tuple[int, int]:
        """Calls by mode. To look at a counter is to count, so looks are taken off."""
        with _COUNTING:
            reads, self._reads = self._reads, self._reads + 1
            return next(self.evaluated) - reads, next(self.trained) - reads

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

    def add_idle(self, total: int) -> None:
        """One more call in which the regularizer was on at a rate of 0."""
        with _COUNTING:
            self._active += 1
            self._total += total

    def see_map(self, size: tuple[int, ...]) -> None:
        """Widen the range of map sizes."""
        if self._maps != (size, size) and all(isinstance(edge, int) for edge in size):
            self._maps = _union(self._maps, (tuple(size), tuple(size)))

    def eager_window(self) -> Counts:
        """Calls of the open window in eager mode alone; does not wait for the device."""
        then = self._begun.eager
        evaluated, trained = self._ticked()
        return Counts(
            evaluated - then.evaluated, trained - then.trained, self._active - then.active
        )

    def windows(self) -> tuple[Counts, Counts]:
        """The calls of the open window and of the one before, without their elements."""
        begun = self._begun.calls()
        return self._now().calls().since(begun), begun.since(self._before.calls())

    def read(self) -> Reading:
        """All that was counted. Waits for the device."""
        now = self._now()
        counts, begun = now.counts(), self._begun.counts()
        numbers = now.numbers()
        return Reading(
            life=self._earlier.plus(counts.since(self._loaded.counts())),
            window=counts.since(begun),
            closed=begun.since(self._before.counts()),
            maps=_union(self._maps, Meter.maps(numbers) if numbers else None),
            compiled=int(numbers[CALLS]) if numbers else 0,
        )

    def calls(self) -> Counts:
        """The calls of the whole life, without their elements."""
        return self._earlier.plus(self._now().calls().since(self._loaded.calls()))

    def sizes(self) -> Sizes | None:
        """The smallest and the largest map, per axis."""
        numbers = self._now().numbers()
        return _union(self._maps, Meter.maps(numbers) if numbers else None)

    def compiled_calls(self) -> int:
        """Calls that compiled code has counted. Waits for the device, where there may be any."""
        numbers = self._now().numbers()
        return int(numbers[CALLS]) if numbers else 0

    def resumed(self) -> int:
        """How often training has resumed after an evaluation, as compiled code has seen it."""
        numbers = self._now().numbers()
        return int(numbers[RESUMED]) if numbers else 0

    def _now(self) -> Mark:
        evaluated, trained = self._ticked()
        with _COUNTING:
            eager = Counts(evaluated, trained, self._active, 0, self._total, self._expected)
            return Mark(eager, self._lying, self.meter.copied())

    def close_window(self) -> None:
        """Begin a new window; the old one is the one before, then."""
        self._before, self._begun = self._begun, self._now()

    def forget_elements(self) -> None:
        """Begin the windows of the elements anew; calls stay in theirs. Waits for the device."""
        now = self._now()
        self._before = self._before.with_elements_of(now)
        self._begun = self._begun.with_elements_of(now)

    def restore(self, life: Counts) -> None:
        """Take over what another record had counted in its life, and begin a new window."""
        self._earlier = life
        self._loaded = self._before = self._begun = self._now()


def _sum(before: Any, more: Any) -> Any:
    """The sum, on the device of what is new: the model may have moved."""
    if isinstance(more, Tensor):
        more = more.detach() if more.requires_grad else more
        if isinstance(before, Tensor) and before.device != more.device:
            before = before.to(more.device)
    return before + more


def _union(a: Sizes | None, b: Sizes | None) -> Sizes | None:
    if a is None or b is None:
        return a or b
    return tuple(map(min, a[0], b[0])), tuple(map(max, a[1], b[1]))
