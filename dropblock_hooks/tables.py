"""Rows that print as a table, and convert to HTML, dicts and pandas."""

import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import takewhile
from textwrap import TextWrapper
from typing import Any, Generic, TypeVar

from .quoting import shorten

Row = TypeVar("Row")
Columns = dict[str, Callable[[Row], Any]]
"""For each heading, a function from the row to the cell; a heading may have two lines."""
WIDTH = 100  # characters in a printed line, if the width of the terminal is not known
_PREFIX = 10  # a longer prefix of all names is printed only once


@dataclass(frozen=True)
class Short:
    """A text that may be cut in the middle; ``wide=True`` and notebooks show `whole`."""

    text: str
    whole: str = ""


@dataclass(frozen=True)
class Varying:
    """A cell that may differ between rows that print as one line, such as a measured number."""

    value: Any


@dataclass(frozen=True)
class Section(Generic[Row]):
    """Rows under one heading; the first column has the names, and `note` is a line above.

    Equal rows of an `entry` of a spec print as one line, and a common prefix of all names once.
    """

    rows: Sequence[Row]
    columns: Columns[Row]
    note: str = ""
    entry: Callable[[Row], str | None] | None = None


class Table(Sequence[Row], Generic[Row]):
    """A sequence of dataclass rows that prints as text for the terminal.

    It prints the `sections`, or all rows under the headings of `columns`. The title is a line above
    it, and `notes` are lists below it, by heading; lines without a heading are never wrapped.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        columns: Columns[Row],
        title: str = "",
        *,
        sections: Iterable[Section[Row]] = (),
        notes: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.rows, self.columns, self.title = tuple(rows), columns, title
        self._sections = [each for each in sections if each.rows] or [Section(self.rows, columns)]
        self._notes = notes or {}

    def __getitem__(self, i: Any) -> Any:
        return self.rows[i]

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> list[dict[str, Any]]:
        """The rows as dicts."""
        return [asdict(row) for row in self.rows]  # type: ignore[call-overload]  # rows are dataclasses

    def to_pandas(self) -> Any:
        """The rows as a ``pandas.DataFrame``; needs pandas."""
        import pandas

        return pandas.DataFrame(self.to_dict())

    def to_text(self, width: int = WIDTH, wide: bool = False) -> str:
        """The table as text; texts are shortened to `width` characters, but no names and numbers.

        Equal sites of an entry of the spec print as one line. `wide` prints a line for each row,
        and shortens nothing.
        """
        width = sys.maxsize if wide else width
        parts = ["\n".join(_lines(section, width, wide)) for section in self._sections]
        wrapper = TextWrapper(width, subsequent_indent="    ", break_on_hyphens=False)
        for heading, lines in self._notes.items():
            items = [f"{heading}:", *(wrapper.fill(f"  - {line}") for line in lines)]
            parts += ["\n".join(items if heading else lines)] if lines else []
        return (f"{shown(self.title)}\n" if self.title else "") + "\n\n".join(parts)

    def __str__(self) -> str:
        return self.to_text(terminal_width())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre">{escape(self.to_text(wide=True))}</pre>'


def terminal_width() -> int:
    """The width of the terminal, or of the environment variable ``COLUMNS``; at least 80."""
    return max(80, shutil.get_terminal_size((WIDTH, 24)).columns)


def _lines(section: Section[Row], width: int, wide: bool) -> list[str]:
    """Notes, the lines of the heading, a rule and the rows."""
    cells = [[find(row) for find in section.columns.values()] for row in section.rows]
    notes = [section.note] if section.note else []
    if section.entry is not None and not wide:
        parts = zip(*(line[0].split(".")[:-1] for line in cells), strict=False)
        prefix = "".join(f"{e[0]}." for e in takewhile(lambda e: len(set(e)) == 1, parts))
        cells = _merged([section.entry(row) for row in section.rows], cells)
        if len(prefix) > _PREFIX and any(isinstance(line[0], str) for line in cells):
            notes.append(f"names begin with {prefix}")
            for line in cells:
                line[0] = shown(line[0]).removeprefix(prefix)
    height = 1 + max((head.count("\n") for head in section.columns), default=0)
    columns: dict[int, list[str]] = {}
    for i, head in enumerate(section.columns):
        texts = [shown(line[i], wide) for line in cells]
        if any(texts) or not cells:
            columns[i] = [*[*head.split("\n"), ""][:height], *texts]
    excess = sum(max(map(len, column)) + 2 for column in columns.values()) - 2 - width
    for i, column in columns.items():
        longest = n = max(map(len, column))
        if any(isinstance(line[i], Short) for line in cells):
            n = min(n, max(n - excess, 4, *map(len, column[:height])))
        excess -= longest - n
        column.insert(height, "-" * n)
        column[:] = [shorten(text, n).ljust(n) for text in column]
    lines = zip(*columns.values(), strict=True)
    return [*notes, *("  ".join(line).rstrip() for line in lines)]


def _merged(entries: Sequence[str | None], cells: list[list[Any]]) -> list[list[Any]]:
    """Put the largest group of equal lines of each entry together; the others keep their names."""
    alike: dict[tuple[Hashable, ...], list[int]] = defaultdict(list)
    for i, (entry, line) in enumerate(zip(entries, cells, strict=True)):
        kept = [c.value is None if isinstance(c, Varying) else shown(c) for c in line[1:]]
        alike[entry, *kept].append(i)
    lines = dict(enumerate(cells))
    for entry, n in Counter(entries).items():
        group = max((alike[key] for key in alike if key[0] == entry), key=len)
        if entry is not None and len(group) > 1:
            of = "" if len(group) == n else f" of {n}"
            columns = zip(*(lines.pop(i)[1:] for i in group), strict=True)
            name = Varying(f"{len(group)}{of} sites {entry}")
            lines[group[0]] = [name, *map(_together, columns)]  # at the place of the first line
    return [lines[i] for i in sorted(lines)]


def _together(cells: Sequence[Any]) -> Any:
    """One cell for several rows: the mean of numbers, and the lowest and highest of all values."""
    if len({shown(cell) for cell in cells}) == 1:
        return cells[0]
    values = [cell.value for cell in cells]
    low, high = min(values), max(values)
    if not isinstance(low, float):
        return ranged((low, high))
    digits = ".3f" if 0.01 <= high <= 1 else ".3g"
    mean, low, high = (f"{x:{digits}}" for x in (sum(values) / len(values), low, high))
    text = f"{mean}, {low} to {high}" if low != high else mean
    return text.replace("0.", ".") if digits == ".3f" else text


def counted(n: int, noun: str) -> str:
    """``1 site``, ``2 sites``."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def shown(value: Any, whole: bool = True) -> str:
    """A cell in one line: ``-`` for None, four digits of a float, ``14x14`` for a size."""
    if isinstance(value, Short):
        value = value.whole if whole and value.whole else value.text
    if isinstance(value, Varying):
        value = value.value
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return " ".join(str(value).split())


def named(name: str, aliases: Sequence[str]) -> str:
    """``layer (= alias, alias)``: a layer with several names."""
    return f"{name} (= {', '.join(aliases)})" if aliases else name


def ranged(value: float | tuple[Any, Any] | None) -> str:
    """A cell with one number, or with a range: ``0 to 0.1``."""
    return " to ".join(map(shown, value)) if isinstance(value, tuple) else shown(value)


def range_of(values: Iterable[float | None]) -> float | tuple[float, float] | None:
    """The lowest and the highest value, or one number if they are equal."""
    known = sorted({value for value in values if value is not None})
    return (known[0], known[-1]) if len(known) > 1 else next(iter(known), None)
