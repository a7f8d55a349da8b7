"""What a site counts: numbers in eager mode, one tensor in compiled code.

Totals only grow. A `Mark` holds them as they were at one moment, and a window is the difference of
two marks: nothing is ever set back, and no device is waited for until someone asks.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .functional.gradients import Clipped
from .functional.masks import wide_dtype

Counted = Clipped | Tensor | int | None
"""How many elements were dropped or changed; of a gradient clipped by its norm, that norm too."""
Sizes = tuple[tuple[int, ...], tuple[int, ...]]
"""The smallest and the largest map seen, per axis."""

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


_CALLS, _ACTIVE, _AFFECTED, _TOTAL, _EXPECTED, _NORM, _NORMS, _MODE, _RESUMED, _LOW = range(10)
_TRAINED, _EVALUATED = 1, 2  # what the cell of the mode holds; 0 before any training
_NOTHING = [0.0] * _LOW


class Meter:
    """What compiled code counts into: one tensor, allocated before, so that nothing is guarded.

    Its numbers only grow, and are read when someone asks; where nothing was compiled, never. In
    float64 they are exact up to 2**53. A flag that says whether it was used would be a side effect,
    which the compiler does not allow inside a checkpoint.
    """

    def __init__(self, spatial: int | None, device: torch.device) -> None:
        self.spatial = spatial or 0
        counts = [0.0] * _LOW + [math.inf] * self.spatial + [0.0] * self.spatial
        with torch.inference_mode(False):
            # not where `with torch.device(...)` says: from meta nothing comes back
            self.counts = torch.tensor(counts, dtype=wide_dtype(device), device=device)

    def to(self, device: torch.device) -> None:
        """Follow the activations to their device."""
        if self.counts.device == device or device.type == "meta":
            return  # on meta, what was counted would be lost
        moved = self.counts.to(device, wide_dtype(device), non_blocking=True)
        if moved.is_inference():
            with torch.inference_mode(False):
                moved = moved.clone()
        self.counts = moved

    def home(self, layer: nn.Module, model_at: torch.device | None) -> torch.device | None:
        """Where a layer is; one without tensors is where the model is, until compiled code ran."""
        own = device_of(layer)
        return model_at if own is None and self.counts.device.type == "cpu" else own

    def add_call(self) -> None:
        """One more call of the layer."""
        self.counts[_CALLS].add_(1)

    def add_active(self, affected: Counted, total: int, rate: Tensor | float) -> None:
        """One more call in which the regularizer was on, and what it did."""
        self.counts[_ACTIVE].add_(1)
        changed = affected.changed if isinstance(affected, Clipped) else affected
        if changed is None or (isinstance(changed, Tensor) and changed.is_meta):
            return
        if isinstance(affected, Clipped):
            self.counts[_NORM].add_(affected.norm)
            self.counts[_NORMS].add_(affected.norms)
        self.counts[_AFFECTED].add_(changed)
        self.counts[_TOTAL].add_(total)
        self.counts[_EXPECTED].add_(rate * total)

    def see_map(self, size: tuple[int, ...]) -> None:
        """Widen the range of map sizes."""
        for axis, edge in enumerate(size):
            self.counts[_LOW + axis].clamp_(max=edge)
            self.counts[_LOW + self.spatial + axis].clamp_(min=edge)

    @staticmethod
    def maps(numbers: list[float]) -> Sizes | None:
        """The smallest and the largest map in what the meter has shown."""
        half = (len(numbers) - _LOW) // 2
        low, high = numbers[_LOW : _LOW + half], numbers[_LOW + half :]
        return (tuple(map(int, low)), tuple(map(int, high))) if high and high[0] else None

    def see_mode(self, training: bool) -> None:
        """Count how often training has resumed after an evaluation."""
        mode = self.counts[_MODE]
        if training:
            self.counts[_RESUMED].add_(mode == _EVALUATED)
            mode.fill_(_TRAINED)
        else:
            mode.add_(mode == _TRAINED)

    @property
    def is_used(self) -> bool:
        """Whether there may be something to read; without waiting for the device."""
        real = type(self.counts) is Tensor and not self.counts.is_meta  # no fake one
        return real and "torch._dynamo" in sys.modules

    def copied(self) -> Tensor | None:
        """The numbers of now, to be read later."""
        if not self.is_used:
            return None
        with torch.inference_mode(False):
            return self.counts.clone()


def device_of(module: nn.Module) -> torch.device | None:
    """Where the first tensor of a module is."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return None if first is None else first.device


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
        numbers = self.numbers() or _NOTHING
        return Counts(
            self.eager.evaluated,
            self.eager.trained + int(numbers[_CALLS]),
            self.eager.active + int(numbers[_ACTIVE]),
        )

    def counts(self) -> Counts:
        """All counts. Waits for the device, the first time."""
        affected, norm, norms = self._lying
        self._lying = affected, norm, norms = int(affected), float(norm), int(norms)
        numbers = self.numbers() or _NOTHING
        return self.calls()._replace(
            affected=affected + int(numbers[_AFFECTED]),
            total=self.eager.total + int(numbers[_TOTAL]),
            expected=self.eager.expected + numbers[_EXPECTED],
            norm=norm + numbers[_NORM],
            norms=norms + int(numbers[_NORMS]),
        )

    def with_elements_of(self, other: Mark) -> Mark:
        """The calls of this moment, and the elements of another."""
        mine, theirs = self.numbers() or _NOTHING, other.numbers() or _NOTHING
        numbers = [*mine[:_AFFECTED], *theirs[_AFFECTED:_MODE], *mine[_MODE:]]
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
            self._maps = _union(self._maps, (size, size))

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
            compiled=int(numbers[_CALLS]) if numbers else 0,
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
        return int(numbers[_CALLS]) if numbers else 0

    def resumed(self) -> int:
        """How often training has resumed after an evaluation, as compiled code has seen it."""
        numbers = self._now().numbers()
        return int(numbers[_RESUMED]) if numbers else 0

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
