"""Rows that print as a table of at most 100 columns, and convert to HTML, dicts and pandas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Generic, TypeVar, overload

from .textwidth import apart, elide, fit, padded, width_of

Row = TypeVar("Row")
Columns = dict[str, Callable[[Row], Any]]


@dataclass(frozen=True)
class Forms:
    """One cell in several lengths, the longest first: a table takes the longest that fits."""

    texts: tuple[str, ...]

    def __str__(self) -> str:
        return self.texts[0]


@dataclass(frozen=True)
class Section(Generic[Row]):
    """Rows under one line of headings, with a line above them that says what they mean."""

    rows: Sequence[Row]
    columns: Columns[Row]
    note: str = ""


class Table(Sequence[Row], Generic[Row]):
    """A sequence of dataclass rows with a heading.

    As text it is at most 100 columns wide: what is longer is shortened in its middle. The rows,
    `to_dict`, `to_pandas` and the HTML of notebooks hold everything whole.

    Args:
        rows: the rows.
        columns: heading → how the cell is found.
        title: a line above the table.
    """

    def __init__(self, rows: Sequence[Row], columns: Columns[Row], title: str = "") -> None:
        self.rows = tuple(rows)
        self.columns = columns
        self.title = title

    @overload
    def __getitem__(self, i: int) -> Row: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Row]: ...
    def __getitem__(self, i: int | slice) -> Row | Sequence[Row]:
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

    def sections(self) -> list[Section[Row]]:
        """The rows as they are printed, under one line of headings or several."""
        return [Section(self.rows, self.columns)]

    def __str__(self) -> str:
        parts = ["\n".join(_lines(section)) for section in self.sections()]
        title = [elide(_one_line(self.title))] if self.title else []
        return "\n".join([*title, "\n\n".join(parts)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The same for notebooks, nothing shortened."""
        title = f"<p>{escape(self.title)}</p>\n" if self.title else ""
        return title + "\n".join(_html(section) for section in self.sections())


def _cells(section: Section[Row]) -> list[list[Any]]:
    return [[find(row) for find in section.columns.values()] for row in section.rows]


def _lines(section: Section[Row]) -> list[str]:
    """Headings, a rule and the rows, with the longest form of the cells that fits."""
    heads, cells = list(section.columns), _cells(section)
    deepest = max((len(c.texts) for row in cells for c in row if isinstance(c, Forms)), default=1)
    for level in range(deepest):
        lines = [heads, *([_one_line(_form(cell, level)) for cell in row] for row in cells)]
        natural = [max(map(width_of, column)) for column in zip(*lines, strict=True)]
        widths = fit(natural, list(map(width_of, heads)))
        if widths == natural:
            break
    if len(widths) < len(heads):  # not even the headings of all have room
        lines = [[*line[: len(widths) - 1], "…"] for line in lines]
    narrow = [
        apart(list(c), width) for c, width in zip(zip(*lines, strict=True), widths, strict=True)
    ]
    text = ["  ".join(map(padded, line, widths)).rstrip() for line in zip(*narrow, strict=True)]
    rule = "  ".join("-" * width for width in widths)
    note = [elide(section.note)] if section.note else []
    return [*note, text[0], rule, *text[1:]]


def _form(cell: Any, level: int) -> str:
    return cell.texts[min(level, len(cell.texts) - 1)] if isinstance(cell, Forms) else shown(cell)


def _one_line(text: str) -> str:
    return " ".join(text.split()) if any(c.isspace() and c != " " for c in text) else text


def _html(section: Section[Row]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in section.columns)
    body = "\n".join(
        f"<tr>{''.join(f'<td>{escape(shown(cell))}</td>' for cell in row)}</tr>"
        for row in _cells(section)
    )
    note = f"<p>{escape(section.note)}</p>\n" if section.note else ""
    return f"{note}<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def html_list(heading: str, lines: Sequence[str]) -> str:
    """Lines below a table in a notebook."""
    items = "\n".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<p>{escape(heading)}:</p>\n<ul>\n{items}\n</ul>"


def counted(n: int, noun: str) -> str:
    """``1 site``, ``2 sites``."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def shown(value: Any) -> str:
    """A cell: ``-`` for None, four digits of a float, ``14x14`` or ``7..14x7..14`` for a size."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return "x".join(f"{v[0]}..{v[1]}" if isinstance(v, tuple) else str(v) for v in value)
    return str(value)
