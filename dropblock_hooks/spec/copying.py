"""The mappings, lists and scalars of a spec, read once into plain ones of limited size.

What is behind a mapping or a list of somebody's can be endless, hold itself, or raise; what comes
after this module meets dicts, lists, tuples and scalars only. Other objects are handed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ..quoting import quote
from .files import MOST_LEVELS, MOST_NODES

_T = TypeVar("_T")
_E = TypeVar("_E")
Path = tuple[str, ...]
MOST_PROBLEMS = 200
"""Problems after which reading stops: each takes time to explain."""
_SCALARS = (str, int, float, bool, type(None))
_EXACT: dict[type, Any] = {str: str.__str__, int: int, float: float}  # also of an Enum


class PlainError(ValueError):
    """Plain data that means nothing; `faults` are what is wrong, and the keys that lead there."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.faults: tuple[tuple[Path, str], ...] = ((path, message),)

    @classmethod
    def of(cls, errors: Sequence[PlainError]) -> PlainError:
        """Several in one."""
        joined = cls(*errors[0].faults[0])
        joined.faults = tuple(fault for error in errors for fault in error.faults)
        return joined


class Problems(list[_E]):
    """What is wrong; once these are many, what comes behind is not looked at."""

    cut = False
    """Whether there was more to look at."""

    def limited(self, items: Iterable[_T]) -> Iterator[_T]:
        """The items, as long as there are not too many problems."""
        for item in items:
            if len(self) >= MOST_PROBLEMS:
                self.cut = True
                return
            yield item


def is_list(value: Any) -> bool:
    """Whether it is a list, a tuple, or a configuration library's list."""
    return isinstance(value, Sequence) and not isinstance(
        value, str | bytes | bytearray | memoryview
    )


def key_text(key: Any) -> str:
    """A key as a part of a path."""
    return str.__str__(key) if isinstance(key, str) else quote(key)  # also of an Enum


class Copier:
    """Copies the values of one spec; they share the limit of its size."""

    def __init__(self) -> None:
        self._left = MOST_NODES
        self._known: dict[int, tuple[Any, Any, int]] = {}

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return self._left < 0

    def copy(self, value: Any, path: Path) -> Any:
        """`value` with dicts, lists, tuples and scalars in place of their kin.

        Raises:
            PlainError: for what is too large or too deep, or holds itself.
        """
        self._spend(1, path)
        if type(value) in _SCALARS:
            return value
        for base, exact in _EXACT.items():
            if isinstance(value, base):
                return exact(value)
        is_mapping = isinstance(value, Mapping)
        if not is_mapping and not is_list(value):
            return value
        if len(path) > MOST_LEVELS:
            problem = f"is nested too deeply, more than {MOST_LEVELS} levels, or holds itself"
            raise PlainError(path[:3], problem)
        left = self._left
        if id(value) in self._known:  # it stands here again, and counts again
            self._spend(self._known[id(value)][2], path)
        else:
            copy = self._mapping(value, path) if is_mapping else self._list(value, path)
            self._known[id(value)] = value, copy, left - self._left
        return self._known[id(value)][1]

    def _spend(self, n: int, path: Path) -> None:
        self._left -= n
        if self.full:
            raise PlainError(path, f"the spec has more than {MOST_NODES:,} values")

    def _mapping(self, value: Mapping[Any, Any], path: Path) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, item in value.items():
            key = self.copy(key, path)
            below = (*path, key_text(key))
            if key in found:
                raise PlainError(below, "stands twice")
            found[key] = self.copy(item, below)
        return found

    def _list(self, value: Sequence[Any], path: Path) -> Any:
        items = [self.copy(item, (*path, str(i))) for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
