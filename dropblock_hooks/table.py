"""Rows that print as a table, and convert to dicts and to pandas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar, overload

Row = TypeVar("Row")


class Table(Sequence[Row], Generic[Row]):
    """A sequence of dataclass rows with a heading.

    Args:
        rows: the rows.
        columns: heading → how the cell is found.
        title: a line above the table.
    """

    def __init__(
        self, rows: Sequence[Row], columns: dict[str, Callable[[Row], Any]], title: str = ""
    ) -> None:
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

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def to_dict(self) -> list[dict[str, Any]]:
        """The rows as dicts."""
        return [asdict(row) for row in self.rows]  # type: ignore[call-overload]  # rows are dataclasses

    def to_pandas(self) -> Any:
        """The rows as a ``pandas.DataFrame``; needs pandas."""
        import pandas

        return pandas.DataFrame(self.to_dict())

    def __str__(self) -> str:
        cells = [[shown(find(row)) for find in self.columns.values()] for row in self.rows]
        lines = [list(self.columns), *cells]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join([*([self.title] if self.title else []), text[0], rule, *text[1:]])

    __repr__ = __str__


def shown(value: Any) -> str:
    """A cell: ``-`` for None, four digits of a float, ``14x14`` or ``7..14x7..14`` for a size."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return "x".join(f"{v[0]}..{v[1]}" if isinstance(v, tuple) else str(v) for v in value)
    return str(value)
