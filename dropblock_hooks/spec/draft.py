"""The entries of a spec, and everything that is wrong with it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..findings import Finding, Kind, Severity
from ..quoting import label, quote, shorten, shown
from ..regularizers.base import Regularizer
from ..selectors.select import Select, Selector
from ..tables import counted
from . import files
from .convert import PlainError, construct, is_list, key_text, regularizer_from
from .files import Path

_SHOWN = 10  # problems in the text of an error
_LONGEST_PROBLEM = 1_000


class SpecError(ValueError):
    """What is wrong with a spec: the first problems in the message, all of them in `problems`."""

    def __init__(self, problems: Iterable[str], source: str = "") -> None:
        self.problems = tuple(shorten(problem, _LONGEST_PROBLEM) for problem in problems)
        self._source = source
        n = len(self.problems)
        where = f" in {label(source, 200)}" if source else ""
        lines = [f"{counted(n, 'problem')} in the spec{where}:"]
        lines += [f"  - {problem}" for problem in self.problems[:_SHOWN]]
        if n > _SHOWN:
            lines.append(f"  and {n - _SHOWN} more, in the problems of this error")
        super().__init__("\n".join(lines))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The problems as `Finding` objects."""
        return tuple(Finding(Kind.SPEC, Severity.ERROR, (), each) for each in self.problems)

    def __reduce__(self) -> Any:
        return SpecError, (self.problems, self._source)


@dataclass(frozen=True)
class Entry:
    """A selector and what is put there; None removes what earlier entries put there."""

    selector: Selector
    regularizers: tuple[Regularizer, ...] | None


class Entries:
    """Base of `Spec`, whose entries were checked."""

    entries: tuple[Entry, ...]


class Draft:
    """A spec that may have faults: the entries that could be read, and the problems.

    ``attach`` resolves these entries on the model, so that all faults come in one error.
    """

    def __init__(self, data: Any, source: files.Source) -> None:
        self.problems: list[str] = []
        self.entries: list[Entry] = []
        self.cause: BaseException | None = None
        """The exception that a user's function raised."""
        self._source = source
        if isinstance(data, Mapping):
            for selector, value in data.items():
                self._read((key_text(selector),), selector, value)
        elif is_list(data):
            for i, item in enumerate(data):
                with self._noting((str(i),)):
                    self._read(*_pair(str(i), item))
        else:
            problem = f"a spec is a mapping from selectors to regularizers, got {shown(data)}"
            self.problems.append(problem)
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
        name = os.fsdecode(path)
        try:
            with open(name, "rb") as file:
                data = file.read(files.MOST_BYTES + 1)
        except FileNotFoundError:
            problem = f"there is no file {quote(name)}; a spec is a mapping or the path of a file"
            raise SpecError([problem]) from None
        except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
            raise SpecError([f"can't read it: {error}"], name) from error
        is_json = os.path.splitext(name)[1].lower() == ".json"
        return cls.read(files.read_json if is_json else files.read_yaml, data, name)

    @classmethod
    def read(cls, read: files.Reader, text: str | bytes, source: str) -> Draft:
        """From text."""
        try:
            return cls(*read(text, source))
        except files.FileError as error:
            raise SpecError([str(error)], source) from None

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
        """Collect the faults of what is read within."""
        try:
            yield
        except PlainError as error:
            self.problems += [self._source.located(*fault) for fault in error.faults]
        except RecursionError:
            self.problems.append(self._source.located(path, "is nested too deeply"))

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
        if isinstance(value, Mapping) and len(value) > 1:
            items = [(path, {name: given}) for name, given in value.items()]
        elif is_list(value):
            items = [((*path, str(i)), item) for i, item in enumerate(value)]
        if not items:
            problem = "has no regularizer: write None (null) to remove earlier entries"
            raise PlainError(path, problem)
        found = []
        for where, item in items:
            with self._noting(where):
                found.append(regularizer_from(item, where))
        return tuple(found)


def _pair(i: str, item: Any) -> tuple[Path, Any, Any]:
    """Key path, selector and value of an entry of a list."""
    if isinstance(item, Entry):
        return (key_text(item.selector),), item.selector, item.regularizers
    if isinstance(item, Mapping) and set(item) == {"select", "apply"}:
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
