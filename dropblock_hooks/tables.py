"""Rows that print as a table of at most 100 columns, and convert to HTML, dicts and pandas."""

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from textwrap import TextWrapper
from typing import Any, Generic, TypeVar, overload

Row = TypeVar("Row")
Columns = dict[str, Callable[[Row], Any]]
WIDTH = 100
"""The default width of printed tables, in characters."""
UNLIMITED = sys.maxsize
"""A width at which nothing is shortened."""
_GAP = 2
_NARROW = 8  # other columns are narrowed before one becomes narrower than this
_NARROWEST = 3


@dataclass(frozen=True)
class Forms:
    """One cell in several lengths, the longest first: a table takes the longest that fits.

    A column whose cells are all empty is left out.
    """

    texts: tuple[str, ...]

    def __str__(self) -> str:
        return self.texts[0]


@dataclass(frozen=True)
class Section(Generic[Row]):
    """Rows under one line of headings, with a note above them."""

    rows: Sequence[Row]
    columns: Columns[Row]
    note: str = ""


class Table(Sequence[Row], Generic[Row]):
    """A sequence of dataclass rows with a heading.

    The text is at most as wide as `to_text` is told, for up to 20 columns; longer cells are
    shortened in the middle. Rows, `to_dict`, `to_pandas` and the HTML of notebooks are complete.

    Args:
        rows: the rows.
        columns: for each heading, a function from the row to the cell.
        title: a line above the table.
        sections: the rows as they are printed, if under several lines of headings.
        notes: lists below the table, by heading; lines without a heading are never wrapped.
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
        self._sections = [each for each in sections if each.rows] or [Section(self.rows, columns)]
        self._notes = {heading: lines for heading, lines in (notes or {}).items() if lines}

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

    def to_text(self, width: int = WIDTH) -> str:
        """The table as text of this width; `UNLIMITED` shortens nothing."""
        parts = ["\n".join(_lines(section, width)) for section in self._sections]
        item = TextWrapper(
            width, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False
        )
        for heading, lines in self._notes.items():
            items = [f"{heading}:", *map(item.fill, lines)] if heading else lines
            parts.append("\n".join(items))
        title = [elide(_one_line(self.title), width)] if self.title else []
        return "\n".join([*title, "\n\n".join(parts)])

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """One table of all rows with the columns of all sections, for notebooks."""
        sections = self._sections
        heads = list(dict.fromkeys(head for section in sections for head in section.columns))
        cells: dict[int, dict[str, str]] = {id(row): {} for row in self.rows}
        for section in sections:
            for row, found in zip(section.rows, _cells(section), strict=True):
                cells[id(row)].update(zip(section.columns, map(shown, found), strict=True))
        lines = [[row.get(head, "") for head in heads] for row in cells.values()]
        title = f"<p>{escape(self.title)}</p>\n" if self.title else ""
        head = f"<thead>{_html_row(heads, 'th')}</thead>"
        body = "\n".join(_html_row(line, "td") for line in lines)
        table = f"{title}<table>\n{head}\n<tbody>\n{body}\n</tbody>\n</table>"
        return "\n".join([table, *map(_html_list, self._notes, self._notes.values())])


def _html_row(texts: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(text)}</{tag}>' for text in texts)}</tr>"


def _html_list(heading: str, lines: Sequence[str]) -> str:
    items = "\n".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"{f'<p>{escape(heading)}:</p>' if heading else ''}\n<ul>\n{items}\n</ul>"


def _cells(section: Section[Row]) -> list[list[Any]]:
    return [[find(row) for find in section.columns.values()] for row in section.rows]


def _lines(section: Section[Row], width: int) -> list[str]:
    """Note, headings, a rule and the rows, with the longest forms of the cells that fit."""
    cells = _cells(section)
    deepest = max((len(c.texts) for row in cells for c in row if isinstance(c, Forms)), default=1)
    for level in range(deepest):
        texts = [[_one_line(_form(cell, level)) for cell in row] for row in cells]
        kept = [any(column) for column in zip(*texts, strict=True)] or [True] * len(section.columns)
        lines = [list(itertools.compress(line, kept)) for line in (section.columns, *texts)]
        natural = [max(map(len, column)) for column in zip(*lines, strict=True)]
        widths = fit(natural, list(map(len, lines[0])), width)
        if widths == natural:
            break
    columns = zip(zip(*lines, strict=True), widths, strict=True)
    narrow = [[text.ljust(n) for text in apart(c, n)] for c, n in columns]
    text = ["  ".join(line).rstrip() for line in zip(*narrow, strict=True)]
    rule = "  ".join("-" * n for n in widths)
    note = [elide(section.note, width)] if section.note else []
    return [*note, text[0], rule, *text[1:]]


def fit(natural: Sequence[int], heads: Sequence[int], width: int = WIDTH) -> list[int]:
    """The widths of columns side by side: the widest is narrowed until all have room.

    Args:
        natural: the width that each column needs.
        heads: the width of its heading.
        width: the room for all.
    """
    room = width - _GAP * (len(natural) - 1)
    widths = list(natural)
    for lowest in ([max(_NARROW, head) for head in heads], [_NARROWEST] * len(heads)):
        while sum(widths) > room and (can := [i for i, w in enumerate(widths) if w > lowest[i]]):
            i = max(can, key=lambda i: (widths[i], i))
            widths[i] = max(lowest[i], min(widths[i] - 1, room))
    return widths


def elide(text: str, width: int = WIDTH) -> str:
    """The text, without its middle where it is wider: ``layer…conv2``."""
    if len(text) <= width:
        return text
    return f"{text[: width // 2]}…{text[len(text) - (width - 1) // 2 :]}"


def apart(texts: Sequence[str], width: int) -> list[str]:
    """The texts elided to a width; where that makes different texts equal, their ends are kept.

    Example:
        >>> apart(["encoder.blocks.0.attention", "encoder.blocks.1.attention"], 16)
        ['…0.attention', '…1.attention']
    """
    short = [elide(text, width) for text in texts]
    if len(set(short)) == len(set(texts)):
        return short
    wide = [text for text in texts if len(text) > width]
    pairs = zip(min(wide), max(wide), strict=False)  # all share what these two share
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
    kept = [f"…{text[shared:]}" if len(text) > width else text for text in texts]
    kept = [text if len(text) <= width else f"{text[: width - 1]}…" for text in kept]
    return kept if len(set(kept)) > len(set(short)) else short


def _form(cell: Any, level: int) -> str:
    return cell.texts[min(level, len(cell.texts) - 1)] if isinstance(cell, Forms) else shown(cell)


def _one_line(text: str) -> str:
    return " ".join(text.split()) if any(c.isspace() and c != " " for c in text) else text


def counted(n: int, noun: str) -> str:
    """``1 site``, ``2 sites``."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def shown(value: Any) -> str:
    """A cell: ``-`` for None, four digits of a float, ``14x14`` for a size."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value)


def named(name: str, aliases: Sequence[str]) -> str:
    """``layer (= alias, alias)``: a layer with several names."""
    return f"{name} (= {', '.join(aliases)})" if aliases else name


def ranged(value: float | tuple[float, float] | None) -> str:
    """A cell with one number, or with a range: ``0 to 0.1``."""
    return " to ".join(map(shown, value)) if isinstance(value, tuple) else shown(value)
