"""A spec as it was given, read as far as it can be: its entries, and all that is wrong with it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..quoting import described, label, quote, shorten, shown
from ..regularizers.base import Regularizer
from ..selectors.select import Select, Selector
from ..tables import counted
from . import files
from .convert import construct, regularizer_from
from .copying import Copier, Path, PlainError, Problems, is_list, key_text

_SHOWN = 10  # problems in the text of an error
_LONGEST_PROBLEM = 1_000
_LONGEST_TEXT = 3_500


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
        with self._noting(()):
            for path, selector, value in self.problems.limited(self._copies(data)):
                self._read(path, selector, value)
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
        except Exception as error:  # ValueError for a NUL; a path of somebody's may raise anything
            why = error.strerror if isinstance(error, OSError) else described(error)
            raise SpecError([f"can't read it: {why}"], name) from error
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

    @contextlib.contextmanager
    def _noting(self, path: Path) -> Iterator[None]:
        """What is wrong with what is read within becomes a problem."""
        faults: tuple[tuple[Path, str], ...] = ()
        cause: BaseException | None = None
        try:
            yield
        except PlainError as error:
            faults, cause = error.faults, error.__cause__
        except RecursionError as error:
            faults, cause = ((path, "is nested too deeply"),), error
        except Exception as error:  # somebody's code
            faults, cause = ((path, f"reading it raised {described(error)}"),), error
        self.problems += [self._source.located(*fault) for fault in faults]
        self.cause = self.cause or cause

    def _copies(self, data: Any) -> list[tuple[Path, Any, Any]]:
        """Key path, selector and value of the entries, before anything is built from them."""
        is_mapping = isinstance(data, Mapping)
        if not is_mapping and not is_list(data):
            problem = f"a spec is a mapping from selectors to regularizers, got {shown(data)}"
            raise PlainError((), problem)
        copier, copies = Copier(), []
        items = data.items() if is_mapping else data
        for i, item in enumerate(self.problems.limited(items)):
            with self._noting((str(i),)):
                path, selector, value = _keyed(item) if is_mapping else _listed(str(i), item)
                with self._noting(path):
                    copies.append((path, copier.copy(selector, path), copier.copy(value, path)))
            if copier.full:  # what else there may be is of no use
                self.problems[:] = self.problems[-1:]
                return []
        return copies

    def _read(self, path: Path, selector: Any, value: Any) -> None:
        regularizers: tuple[Regularizer, ...] | None = ()
        with self._noting(path):
            regularizers = self._regularizers(value, path)
        with self._noting(path):
            self.entries.append(Entry(_selector(selector, path), regularizers))

    def _regularizers(self, value: Any, path: Path) -> tuple[Regularizer, ...] | None:
        if value is None:
            return None
        items: list[tuple[Path, Any]] = [(path, value)]
        if isinstance(value, dict) and len(value) > 1:
            items = [(path, {name: given}) for name, given in value.items()]
        elif is_list(value):
            items = [((*path, str(i)), item) for i, item in enumerate(value)]
        if not items:
            problem = "has no regularizer: write None (null) to clear earlier entries'"
            raise PlainError(path, problem)
        found = []
        for where, item in self.problems.limited(items):
            with self._noting(where):
                known = self._known.get(item) if isinstance(item, str) else None
                found.append(known or regularizer_from(item, where))
                if isinstance(item, str):
                    self._known[item] = found[-1]
        return tuple(found)


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
