"""Numbers of calls and elements: at one moment, or of a window between two.

Totals only grow. A `Mark` holds them as they were at one moment, and a window is the difference of
two marks: nothing is ever set back, and no device is waited for until someone asks. Then all that
lies on a device is read at once: of one record, or of those that are held still together.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional.masks import wide_dtype
from .meter import ACTIVE, AFFECTED, CALLS, MODE, NOTHING, Sizes
from .norms import NO_CELLS, NO_NORMS, Norms

Varying = tuple[int | tuple[int, int], ...]
"""A size per axis; (smallest, largest) where it varies."""
_FORMATS = {torch.int64: "q", torch.float64: "d", torch.float32: "f"}


class Counts(NamedTuple):
    """Numbers of calls and of elements: since the beginning, or of a window.

    Attributes:
        evaluated: calls of the layer in evaluation mode.
        trained: calls in training mode, and all that compiled code has regularized.
        active: calls in which the regularizer was on; of one for gradients, gradients seen.
        affected: elements that were dropped or changed.
        total: elements that passed.
        expected: the sum of the nominal rates over these elements.
    """

    evaluated: int = 0
    trained: int = 0
    active: int = 0
    affected: int = 0
    total: int = 0
    expected: float = 0.0

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


class Mark:
    """The totals of a site at one moment; `settle` reads what lies on a device.

    Args:
        eager: the counts of eager mode; elements and norms may be tensors.
        metered: what the meter showed; None where nothing was compiled.
        norms: the cells of the norms, read apart: they are many, and seldom asked for.
    """

    def __init__(
        self,
        eager: Counts,
        metered: Tensor | list[float] | None = None,
        norms: Tensor | None = None,
    ) -> None:
        self.eager = eager
        self._metered: Any = metered
        self._norms: Any = norms

    def unread(self, norms: bool = False) -> Iterator[Tensor]:
        """What lies on a device, norms only where they are asked for."""
        kept = (*self.eager, self._metered, self._norms if norms else None)
        return (each for each in kept if isinstance(each, Tensor))

    def fill(self, read: dict[int, list[float]]) -> None:
        """Take what was read, by the identity of its tensor."""
        if id(self._norms) in read:
            self._norms = array("d", read[id(self._norms)])
        self.eager = Counts.of(read.get(id(each), (each,))[0] for each in self.eager)
        self._metered = read.get(id(self._metered), self._metered)

    def numbers(self) -> list[float]:
        """What the meter showed, once that is settled."""
        return NOTHING if self._metered is None else self._metered

    def norms(self) -> Sequence[float]:
        """The cells of the norms, once they are settled."""
        return NO_CELLS if self._norms is None else self._norms

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
        return Mark(eager, [*mine[:AFFECTED], *theirs[AFFECTED:MODE], *mine[MODE:]], other._norms)


def settle(marks: list[Mark], norms: bool = False) -> None:
    """Read all that lies on devices, each of which is waited for once; none is left in the list."""
    unsettled = {id(mark): mark for mark in marks}.values()
    read = numbers_of([each for mark in unsettled for each in mark.unread(norms)])
    for mark in unsettled:
        mark.fill(read)
    marks.clear()  # records that stand still share the list


def numbers_of(tensors: Sequence[Tensor]) -> dict[int, list[float]]:
    """The numbers of each tensor, by its identity; each device is waited for once.

    They travel as bytes: a float64 does not hold all that an int64 does.
    """
    found: dict[int, list[float]] = {}
    for device in {each.device for each in tensors}:
        here = {id(each): _plain(each) for each in tensors if each.device == device}
        whole = torch.cat([each.view(torch.uint8) for each in here.values()]).cpu()
        raw = ctypes.string_at(
            whole.data_ptr(), whole.numel()
        )  # a list of bytes takes 40 times as long
        formats = (f"{each.numel()}{_FORMATS[each.dtype]}" for each in here.values())
        numbers = iter(struct.unpack(f"={''.join(formats)}", raw))
        found |= {key: list(islice(numbers, each.numel())) for key, each in here.items()}
    return found


def _plain(tensor: Tensor) -> Tensor:
    """In one row, whole where it is spread over devices, and of a type that can be read."""
    whole: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    wide = wide_dtype(whole.device) if whole.is_floating_point() else torch.int64
    return whole.to(wide).reshape(-1)


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
        norms: those of gradients before a bound, by the names of life, window and closed; empty
            where that was not asked.
    """

    life: Counts
    window: Counts
    closed: Counts
    maps: Sizes | None
    compiled: int = 0
    resumed: int = 0
    norms: Mapping[str, Norms] = field(default_factory=dict)

    @property
    def map_size(self) -> Varying | None:
        """The size of the maps, per axis; (smallest, largest) where it varies."""
        return None if self.maps is None else varying(self.maps)

    @property
    def shown(self) -> Counts:
        """The open window; where nothing was counted in it, the one that was closed last."""
        return self.window if self.window.total else self.closed

    @property
    def shown_norms(self) -> Norms | None:
        """The norms of the same window; None where there are none."""
        norms = self.norms.get("window" if self.window.total else "closed")
        return norms if norms is not None and norms.bins else None

    def plus(self, other: Reading) -> Reading:
        """The sum, as over processes."""
        return Reading(
            self.life.plus(other.life),
            self.window.plus(other.window),
            self.closed.plus(other.closed),
            union(self.maps, other.maps),
            self.compiled + other.compiled,
            self.resumed + other.resumed,
            {name: n.plus(other.norms.get(name, NO_NORMS)) for name, n in self.norms.items()},
        )


def varying(sizes: Sizes) -> Varying:
    """Per axis, the one size; (smallest, largest) where it varies."""
    return tuple(low if low == high else (low, high) for low, high in zip(*sizes, strict=True))


def union(a: Sizes | None, b: Sizes | None) -> Sizes | None:
    """The smallest and the largest of both."""
    if a is None or b is None:
        return a or b
    return tuple(map(min, a[0], b[0])), tuple(map(max, a[1], b[1]))
