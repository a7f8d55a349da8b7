"""Rows that print as a table of at most 100 columns, and convert to HTML, dicts and pandas."""

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Generic, TypeVar, overload

Row = TypeVar("Row")
Columns = dict[str, Callable[[Row], Any]]
WIDTH = 100
"""How wide what is printed may be, in characters."""
UNLIMITED = sys.maxsize
"""A width at which nothing is shortened."""
_GAP = 2
_NARROW = 8  # a column is not made narrower than this as long as another one can be
_NARROWEST = 3


@dataclass(frozen=True)
class Forms:
    """One cell in several lengths, the longest first: a table takes the longest that fits.

    A column in which nothing stands any more is left out.
    """

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

    As text it is at most 100 columns wide, or as `to_text` is told: what is longer is shortened in
    its middle. The rows, `to_dict`, `to_pandas` and the HTML of notebooks hold everything whole.

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

    def to_text(self, width: int = WIDTH) -> str:
        """The table as text of at most so many columns; `UNLIMITED` shortens nothing."""
        parts = ["\n".join(_lines(section, width)) for section in self.sections()]
        title = [elide(_one_line(self.title), width)] if self.title else []
        return "\n".join([*title, "\n\n".join(parts)])

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The same for notebooks, nothing shortened."""
        title = f"<p>{escape(self.title)}</p>\n" if self.title else ""
        return title + "\n".join(_html(section) for section in self.sections())


def _cells(section: Section[Row]) -> list[list[Any]]:
    return [[find(row) for find in section.columns.values()] for row in section.rows]


def _lines(section: Section[Row], width: int) -> list[str]:
    """Headings, a rule and the rows, with the longest form of the cells that fits."""
    heads, cells = list(section.columns), _cells(section)
    deepest = max((len(c.texts) for row in cells for c in row if isinstance(c, Forms)), default=1)
    for level in range(deepest):
        texts = [[_one_line(_form(cell, level)) for cell in row] for row in cells]
        kept = [any(column) for column in zip(*texts, strict=True)] or [True] * len(heads)
        lines = [list(itertools.compress(line, kept)) for line in (heads, *texts)]
        natural = [max(map(len, column)) for column in zip(*lines, strict=True)]
        widths = fit(natural, list(map(len, lines[0])), width)
        if widths == natural:
            break
    if len(widths) < len(natural):  # not even the headings of all have room
        lines = [[*line[: len(widths) - 1], "…"] for line in lines]
    columns = zip(zip(*lines, strict=True), widths, strict=True)
    narrow = [[text.ljust(n) for text in apart(c, n)] for c, n in columns]
    text = ["  ".join(line).rstrip() for line in zip(*narrow, strict=True)]
    rule = "  ".join("-" * n for n in widths)
    note = [elide(section.note, width)] if section.note else []
    return [*note, text[0], rule, *text[1:]]


def fit(natural: Sequence[int], heads: Sequence[int], width: int = WIDTH) -> list[int]:
    """The widths of columns side by side, the widest made narrower until all have room.

    Where they can't have it, the last ones are left out, and the last width is that of a column
    which says so.

    Args:
        natural: what each column would take.
        heads: what its heading takes.
        width: what there is.
    """
    room = width - _GAP * (len(natural) - 1)
    if sum(min(n, _NARROWEST) for n in natural) > room:
        most = (width - 1) // (_NARROWEST + _GAP)
        return [*fit(natural[:most], heads[:most], width - _GAP - 1), 1]
    widths = [min(n, room) for n in natural]
    for lowest in ([max(_NARROW, head) for head in heads], [_NARROWEST] * len(heads)):
        while sum(widths) > room and (can := [i for i, w in enumerate(widths) if w > lowest[i]]):
            widths[max(can, key=lambda i: (widths[i], i))] -= 1
    return widths


def elide(text: str, width: int = WIDTH) -> str:
    """The text, with its middle left out where it is wider: ``layer…conv2``."""
    if len(text) <= width:
        return text
    return f"{text[: width // 2]}…{text[len(text) - (width - 1) // 2 :]}"


def apart(texts: Sequence[str], width: int) -> list[str]:
    """The texts elided to a width; where that makes different ones equal, what differs is kept.

    Example:
        >>> apart(["encoder.blocks.0.attention", "encoder.blocks.1.attention"], 16)
        ['…0.attention', '…1.attention']
    """
    short = [elide(text, width) for text in texts]
    if len(set(short)) == len(set(texts)):
        return short
    wide = [text for text in texts if len(text) > width]
    pairs = zip(min(wide), max(wide), strict=False)  # what these two share, all share
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
    kept = [f"…{text[shared:]}" if len(text) > width else text for text in texts]
    kept = [text if len(text) <= width else f"{text[: width - 1]}…" for text in kept]
    return kept if len(set(kept)) > len(set(short)) else short


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


def named(name: str, aliases: Sequence[str]) -> str:
    """``layer (= alias, alias)``: a layer that stands at several places."""
    return f"{name} (= {', '.join(aliases)})" if aliases else name


def ranged(value: float | tuple[float, float] | None) -> str:
    """A cell of a number or of two: ``0 to 0.1``."""
    return " to ".join(map(shown, value)) if isinstance(value, tuple) else shown(value)
