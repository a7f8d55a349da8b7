"""A spec as it was given, read as far as it can be: its entries, and all that is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from ..quoting import described, label, quote, shorten, shown
from ..regularizers.base import Regularizer
from ..selectors.select import Select, Selector
from ..tables import counted
from . import files
from .convert import construct, regularizer_from
from .copying import Copier, Path, PlainError, Problems, explained, is_list, key_text

_SHOWN = 10  # problems in the text of an error
_LONGEST_PROBLEM = 1_000
_LONGEST_TEXT = 3_500
_Item: TypeAlias = tuple[Path, Any, Any]
"""Key path, selector and value of an entry; a PlainError in the place of what can't be copied."""


class SpecError(ValueError):
    """What is wrong with a spec: the first problems in the message, all of them in `problems`."""

    def __init__(self, problems: Iterable[str], source: str = "") -> None:
        self.problems = tuple(shorten(problem, _LONGEST_PROBLEM) for problem in problems)
        self._source = source
        n = len(self.problems)
        where = f" in {label(source, 200)}" if source else ""
        first = self.problems[:_SHOWN]
        if sum(map(len, first)) > _LONGEST_TEXT:
            first = tuple(shorten(problem, _LONGEST_TEXT // len(first)) for problem in first)
        lines = [f"{counted(n, 'problem')} in the spec{where}:"]
        lines += [f"  - {problem}" for problem in first]
        if n > _SHOWN:
            lines.append(f"  and {n - _SHOWN} more, in the problems of this error")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> Any:
        return SpecError, (self.problems, self._source)


@dataclass(frozen=True)
class Entry:
    """One line of a spec: what is put on the layers of a selector; None clears earlier entries'."""

    selector: Selector
    regularizers: tuple[Regularizer, ...] | None


class Entries:
    """What holds entries that were checked: a Spec."""

    entries: tuple[Entry, ...]


class Draft:
    """A spec that may have faults: what could be read of it, and what could not.

    ``attach`` resolves on the model what could be read, so that all faults come in one error.
    """

    def __init__(self, data: Any, source: files.Source) -> None:
        self.problems = Problems[str]()
        self.entries: list[Entry] = []
        self.cause: BaseException | None = None
        """What somebody's code raised, if it did."""
        self._source = source
        self._known: dict[str, Regularizer] = {}  # many layers, one text
        copier, items = Copier(), []
        try:
            for item in self._items(data, copier):
                items.append(item)
        except PlainError as error:
            if copier.full:  # refused before anything is built
                items = []
            items.append(error)
        for item in self.problems.limited(items):
            self._note(item) if isinstance(item, PlainError) else self._read(*item)
        if self.problems.cut:
            self.problems.append("what comes behind was not read")
        if not self.entries and not self.problems:
            self.problems.append("it is empty")

    @property
    def source(self) -> str:
        """The name of the file, or nothing."""
        return self._source.name

    @classmethod
    def of(cls, spec: Any) -> Draft:
        """From all that ``attach`` takes."""
        if isinstance(spec, str | os.PathLike):
            return cls.load(spec)
        return cls(spec.entries if isinstance(spec, Entries) else spec, files.Source())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Draft:
        """From a file."""
        name = ""
        try:
            name = os.fsdecode(os.fspath(path))
            with open(name, "rb") as file:
                data = file.read(files.MOST_BYTES + 1)
        except FileNotFoundError:
            problem = f"there is no file {quote(name)}; a spec is a mapping or the path of a file"
            raise SpecError([problem]) from None
        except OSError as error:
            raise SpecError([f"can't read it: {error.strerror}"], name) from error
        except Exception as error:  # ValueError for a NUL; a path of somebody's may raise anything
            raise SpecError([f"can't read it: {described(error)}"], name) from error
        is_json = os.path.splitext(name)[1].lower() == ".json"
        return cls.read(files.read_json if is_json else files.read_yaml, data, name)

    @classmethod
    def read(cls, read: files.Reader, text: str | bytes, source: str) -> Draft:
        """From text."""
        try:
            return cls(*read(text, source))
        except files.FileError as error:
            raise SpecError([str(error)], source) from error.__cause__

    def checked(self) -> tuple[Entry, ...]:
        """The entries, or a SpecError with all faults."""
        if self.problems:
            raise self.error(self.problems)
        return tuple(self.entries)

    def error(self, problems: Iterable[str]) -> SpecError:
        """An error to raise, with these problems."""
        error = SpecError(problems, self.source)
        error.__cause__ = self.cause
        return error

    def _note(self, error: PlainError) -> None:
        self.problems += [self._source.located(path, message) for path, message in error.faults]
        self.cause = self.cause or error.__cause__

    def _items(self, data: Any, copier: Copier) -> Iterator[_Item | PlainError]:
        """The entries, or why they are none."""
        faults = Problems[PlainError]()
        with explained(()):
            is_mapping = isinstance(data, Mapping)
            if not is_mapping and not is_list(data):
                problem = f"a spec is a mapping from selectors to regularizers, got {shown(data)}"
                raise PlainError((), problem)
            items = data.items() if is_mapping else data
            for i, item in faults.limited(enumerate(items)):
                if i == files.MOST_NODES:
                    raise PlainError((), f"it has more than {files.MOST_NODES:,} entries")
                try:
                    with explained((str(i),)):
                        read = _keyed(item) if is_mapping else _listed(str(i), item)
                except PlainError as error:
                    yield error
                    faults.append(error)
                    continue
                path, selector, value = read
                copies = _tried(copier, value, path), _tried(copier, selector, path)
                if copier.full:
                    raise next(copy for copy in copies if isinstance(copy, PlainError))
                yield path, copies[1], copies[0]
        self.problems.cut |= faults.cut

    def _read(self, path: Path, selector: Any, value: Any) -> None:
        regularizers: tuple[Regularizer, ...] | None = ()
        try:
            with explained(path):
                regularizers = self._regularizers(_given(value), path)
        except PlainError as error:
            self._note(error)
        try:
            with explained(path):
                found = _selector(_given(selector), path)
                self.entries.append(Entry(found, regularizers))
        except PlainError as error:
            self._note(error)

    def _regularizers(self, value: Any, path: Path) -> tuple[Regularizer, ...] | None:
        if value is None:
            return None
        if isinstance(value, dict) and len(value) > 1:
            items = [(path, {name: given}) for name, given in value.items()]
        elif is_list(value):
            items = [((*path, str(i)), item) for i, item in enumerate(value)]
        else:
            items = [(path, value)]
        if not items:
            problem = "has no regularizer: write None (null) to clear earlier entries'"
            raise PlainError(path, problem)
        found = []
        for where, item in self.problems.limited(items):
            try:
                with explained(where):
                    found.append(self._regularizer(item, where))
            except PlainError as error:
                self._note(error)
        return tuple(found)

    def _regularizer(self, item: Any, where: Path) -> Regularizer:
        if type(item) is not str:
            return regularizer_from(item, where)
        if item not in self._known:
            self._known[item] = regularizer_from(item, where)
        return self._known[item]


def _tried(copier: Copier, value: Any, path: Path) -> Any:
    """A copy, or the PlainError why there is none."""
    try:
        with explained(path):
            return copier.copy(value, path)
    except PlainError as error:
        return error


def _given(copy: Any) -> Any:
    if isinstance(copy, PlainError):
        raise copy
    return copy


def _keyed(item: Any) -> tuple[Path, Any, Any]:
    selector, value = item
    return (key_text(selector),), selector, value


def _listed(i: str, item: Any) -> tuple[Path, Any, Any]:
    if isinstance(item, Entry):
        return (key_text(item.selector),), item.selector, item.regularizers
    if isinstance(item, Mapping) and set(islice(item, 3)) == {"select", "apply"}:
        return (i, "apply"), item["select"], item["apply"]
    if is_list(item) and len(item) == 2:
        return (i, "1"), item[0], item[1]
    raise PlainError(
        (i,),
        "an entry of a list is a pair (selector, regularizers) or {select: ..., apply: ...}, "
        f"got {shown(item)}",
    )


def _selector(value: Any, path: Path) -> Selector:
    if isinstance(value, str | Select):
        return value
    if isinstance(value, Mapping):
        select: Select = construct(Select, value, (*path[:-1], "select"))
        return select
    raise PlainError(path, f"a selector is text or a Select, got {shown(value)}: quote it")
