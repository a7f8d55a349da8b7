"""Rows that print as a table, and convert to HTML, dicts and pandas."""

import os
import shutil
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import chain
from textwrap import TextWrapper
from typing import Any, Generic, Self, TypeVar

from .quoting import shorten

Row = TypeVar("Row")
Columns = dict[str, Callable[[Row], Any]]
"""For each heading, a function from the row to the cell; a heading may have two lines."""
WIDTH = 100  # characters in a printed line, if the width of the terminal is not known
UNLIMITED = sys.maxsize  # the width of a pipe or a file, where lists are wrapped at `WIDTH`
_PREFIX = 10  # a longer prefix of all names is printed only once


@dataclass(frozen=True)
class Short:
    """A text that may be cut in the middle; ``wide=True`` and notebooks show `whole`."""

    text: str
    whole: str = ""


@dataclass(frozen=True)
class Varying:
    """A cell that may differ between rows that print as one line, such as a measured number.

    A mean of shares prints with three decimals, and a mean of other numbers, or of shares that are
    all below 0.01, with three digits.
    """

    value: Any
    is_share: bool = False


@dataclass(frozen=True)
class Neighbors:
    """The name of a line for several sites that follow each other in an entry of a spec."""

    number: int
    first: str
    last: str

    def __str__(self) -> str:
        # the last name ends in the regularizer, which is the same for all sites
        layer, slash, _ = self.first.rpartition("/")
        first = layer if slash else self.first
        return f"{self.number} sites {first} to {self.last}"

    def removeprefix(self, prefix: str) -> "Neighbors":
        """Return the same name, without a prefix of both layers."""
        first = self.first.removeprefix(prefix)
        last = self.last.removeprefix(prefix)
        return Neighbors(self.number, first, last)


@dataclass(frozen=True)
class Section(Generic[Row]):
    """Rows under one heading; the first column has the names, and `note` is a line above.

    `entry` returns the entry of the spec that a row belongs to. Equal rows of one entry print as
    one line if its name tells which rows they are. A common prefix of all names is printed once.
    """

    rows: Sequence[Row]
    columns: Columns[Row]
    note: str = ""
    entry: Callable[[Row], str | None] | None = None


class Table(Sequence[Row], Generic[Row]):
    """A sequence of dataclass rows that prints as text for the terminal.

    It prints the `sections`, or all rows under the headings of `columns`. The title is a line above
    it. `notes` are lists below it, by heading. Those under the heading "" are never wrapped.
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
        self.rows = tuple(rows)
        self.columns = columns
        self.title = title
        self._notes = notes or {}
        self._sections = [section for section in sections if section.rows]
        if not self._sections:
            self._sections = [Section(self.rows, columns)]

    def __getitem__(self, i: Any) -> Any:
        return self.rows[i]

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the rows as dicts."""
        return [asdict(row) for row in self.rows]  # type: ignore[call-overload]  # rows are dataclasses

    def to_pandas(self) -> Any:
        """Return the rows as a ``pandas.DataFrame``.

        Raises:
            ImportError: if pandas is not installed.
        """
        import pandas

        return pandas.DataFrame(self.to_dict())

    def to_text(self, width: int = WIDTH, wide: bool = False) -> str:
        """Return the table as text, in lines of at most `width` characters if possible.

        Names and numbers are never shortened. Equal sites of an entry of the spec print as one
        line. `wide` prints a line for each row, and shortens nothing.
        """
        wrapped_at = WIDTH if width == UNLIMITED else width
        if wide:
            width = UNLIMITED
            wrapped_at = UNLIMITED

        blocks = []
        for section in self._sections:
            lines = _lines(section, width, wide)
            blocks.append("\n".join(lines))
        for heading, items in self._notes.items():
            if items:
                blocks.append(_listed_below(heading, items, wrapped_at))

        body = "\n\n".join(blocks)
        if not self.title:
            return body
        return f"{shown(self.title)}\n{body}"

    def __str__(self) -> str:
        return self.to_text(table_width())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        text = escape(self.to_text(wide=True))
        return f'<pre style="white-space: pre">{text}</pre>'


def terminal_width() -> int:
    """Return the width of the terminal, or of the variable ``COLUMNS``; at least 80."""
    size = shutil.get_terminal_size((WIDTH, 24))
    return max(80, size.columns)


def _listed_below(heading: str, items: Sequence[str], width: int) -> str:
    """Write a list below a table: wrapped items under the heading, or plain lines without one."""
    if not heading:
        return "\n".join(items)

    wrapper = TextWrapper(width, subsequent_indent="    ", break_on_hyphens=False)
    lines = [f"{heading}:"]
    for item in items:
        lines.append(wrapper.fill(f"  - {item}"))
    return "\n".join(lines)


def table_width() -> int:
    """Return `terminal_width`, or `UNLIMITED` if a table goes to a pipe or a file."""
    has_width = "COLUMNS" in os.environ
    if has_width or sys.stdout is None or sys.stdout.isatty():
        return terminal_width()
    return UNLIMITED


def _lines(section: Section[Row], width: int, wide: bool) -> list[str]:
    """Write the note of a section, the lines of its heading, a rule and its rows."""
    lines = []
    if section.note:
        lines.append(section.note)

    cells = [_cells(section, row) for row in section.rows]
    if section.entry is not None and not wide:
        names = [line[0] for line in cells]
        prefix = _common_prefix(names)
        entries = [section.entry(row) for row in section.rows]
        cells = _merged(entries, cells)
        if _cut(prefix, cells):
            lines.append(f"names begin with {prefix}")

    columns = _columns(section.columns, cells, wide)
    gaps = 2 * (len(columns) - 1)
    excess = sum(column.width for column in columns) + gaps - width
    for column in columns:
        excess -= column.shrink(excess)

    lines_of_columns = [column.lines() for column in columns]
    for texts in zip(*lines_of_columns, strict=True):
        line = "  ".join(texts)
        lines.append(line.rstrip())
    return lines


def _cells(section: Section[Row], row: Row) -> list[Any]:
    """Return the cells of a row, before they are shortened."""
    return [cell_of(row) for cell_of in section.columns.values()]


def _common_prefix(names: Iterable[str]) -> str:
    """Return the parent modules that all dotted names have in common: ``model.encoder.``."""
    parents = [name.split(".")[:-1] for name in names]
    prefix = ""
    for parts in zip(*parents, strict=False):
        if len(set(parts)) > 1:
            break
        prefix += f"{parts[0]}."
    return prefix


def _cut(prefix: str, cells: list[list[Any]]) -> bool:
    """Remove a long prefix from the names in the first column; return whether it was removed.

    A single name is printed as a whole.
    """
    names = [line[0] for line in cells if not isinstance(line[0], Varying)]
    has_several = len(names) > 1 or any(isinstance(name, Neighbors) for name in names)
    if len(prefix) <= _PREFIX or not has_several:
        return False

    for line in cells:
        name = line[0]
        line[0] = name if isinstance(name, Varying) else name.removeprefix(prefix)
    return True


def _columns(headings: Collection[str], cells: list[list[Any]], wide: bool) -> list["_Column"]:
    """Make the columns to print. If there are rows, columns without any text are left out."""
    breaks = [heading.count("\n") for heading in headings]
    height = 1 + max(breaks, default=0)

    columns = []
    for i, heading in enumerate(headings):
        cells_of_column = [line[i] for line in cells]
        column = _Column.of(heading, height, cells_of_column, wide)
        if any(column.texts) or not cells:
            columns.append(column)
    return columns


@dataclass
class _Column:
    """The texts of a printed column, which is as wide as the longest of them or narrower."""

    heading: list[str]  # one text for each line of the heading
    texts: list[str]  # one text for each row
    may_shrink: bool  # whether it holds texts that may be cut
    width: int

    @classmethod
    def of(cls, heading: str, height: int, cells: Sequence[Any], wide: bool) -> Self:
        """Make a column of cells, with the heading filled up to a height in lines."""
        heading_lines = heading.split("\n")
        missing = height - len(heading_lines)
        heading_lines += [""] * missing
        texts = [shown(cell, wide) for cell in cells]
        may_shrink = any(isinstance(cell, Short) for cell in cells)
        width = max(map(len, [*heading_lines, *texts]))
        return cls(heading_lines, texts, may_shrink, width)

    def shrink(self, excess: int) -> int:
        """Make the column narrower by `excess` at most, if it may be; return by how much."""
        if not self.may_shrink:
            return 0
        least = max(4, *map(len, self.heading))
        wanted = max(self.width - excess, least)
        width = min(self.width, wanted)
        saved = self.width - width
        self.width = width
        return saved

    def lines(self) -> list[str]:
        """Return the lines of the heading, a rule and the rows, all of the same width."""
        rule = "-" * self.width
        lines = []
        for line in (*self.heading, rule, *self.texts):
            short = shorten(line, self.width)
            lines.append(short.ljust(self.width))
        return lines


def _merged(entries: Sequence[str | None], cells: list[list[Any]]) -> list[list[Any]]:
    """Put equal lines of each entry together.

    The largest group gets the name of the entry. Every other line names its sites, so that it is
    clear which sites are in the largest group. Therefore the lines of a smaller group are put
    together only if they follow each other in the entry.
    """
    # for each entry, the numbers of its lines, grouped by the cells after the name
    groups: dict[str | None, dict[tuple[Hashable, ...], list[int]]] = {}
    for i, (entry, line) in enumerate(zip(entries, cells, strict=True)):
        compared = tuple(map(_compared, line[1:]))
        groups.setdefault(entry, {}).setdefault(compared, []).append(i)

    lines = dict(enumerate(cells))
    for entry, groups_of_entry in groups.items():
        if entry is None:
            continue
        of_entry = sorted(chain.from_iterable(groups_of_entry.values()))
        largest = max(groups_of_entry.values(), key=len)
        for group in groups_of_entry.values():
            is_largest = group is largest
            if len(group) == 1 or not (is_largest or _are_neighbors(group, of_entry)):
                continue

            equal_lines = [lines.pop(i) for i in group]
            names, *columns = zip(*equal_lines, strict=True)
            name: Any = Neighbors(len(group), first=names[0], last=names[-1])
            if is_largest:
                of_all = "" if len(group) == len(of_entry) else f" of {len(of_entry)}"
                # a `Varying`, because a text would be cut as the name of a layer
                name = Varying(f"{len(group)}{of_all} sites {entry}")
            lines[group[0]] = [name, *map(_together, columns)]
    return [lines[i] for i in sorted(lines)]


def _are_neighbors(group: list[int], of_entry: list[int]) -> bool:
    """Return whether the lines of a group follow each other among all lines of their entry."""
    start = of_entry.index(group[0])
    return of_entry[start : start + len(group)] == group


def _compared(cell: Any) -> Hashable:
    """Return the part of a cell that is equal in lines that print as one.

    The numbers of a `Varying` may differ, but all of them or none must be known.
    """
    if isinstance(cell, Varying):
        return cell.value is None
    return shown(cell)


def _together(cells: Sequence[Any]) -> Any:
    """Make one cell of several rows: the mean of numbers, and the lowest and highest value."""
    texts = {shown(cell) for cell in cells}
    if len(texts) == 1:
        return cells[0]

    # all cells are `Varying`, because `_compared` keeps lines with other differences apart
    values = [cell.value for cell in cells]
    low = min(values)
    high = max(values)
    if not isinstance(low, float):
        return ranged((low, high))

    mean = sum(values) / len(values)
    three_decimals = cells[0].is_share and high >= 0.01
    digits = ".3f" if three_decimals else ".3g"
    text = format(mean, digits)
    lowest = format(low, digits)
    highest = format(high, digits)
    if lowest != highest:
        text += f", {lowest} to {highest}"
    return text


def counted(n: int, noun: str) -> str:
    """Write a number with its noun: ``1 site``, ``2 sites``."""
    ending = "" if n == 1 else "s"
    return f"{n} {noun}{ending}"


def shown(value: Any, whole: bool = True) -> str:
    """Write a cell in one line: ``-`` for None, four digits of a float, ``14x14`` for a size."""
    if isinstance(value, Short):
        text = value.whole if whole else ""
        value = text or value.text
    if isinstance(value, Varying):
        value = value.value

    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    words = str(value).split()
    return " ".join(words)


def named(name: str, aliases: Sequence[str]) -> str:
    """Write a layer with all of its names: ``layer (= alias, alias)``."""
    if not aliases:
        return name
    others = ", ".join(aliases)
    return f"{name} (= {others})"


def ranged(value: float | tuple[Any, Any] | None) -> str:
    """Write a cell with one number, or with a range: ``0 to 0.1``."""
    if isinstance(value, tuple):
        ends = map(shown, value)
        return " to ".join(ends)
    return shown(value)


def range_of(values: Iterable[float | None]) -> float | tuple[float, float] | None:
    """Return the lowest and the highest value, or one number if they are equal."""
    known = [value for value in values if value is not None]
    if not known:
        return None

    low = min(known)
    high = max(known)
    if low == high:
        return low
    return low, high
