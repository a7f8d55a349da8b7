"""``dropblock-hooks check SPEC``."""

import argparse
from dataclasses import dataclass
from typing import Any

from ..attachment.report import shortened
from ..regularizers.base import Regularizer
from ..spec.draft import Draft, Entry
from ..tables import Forms, Table
from .result import Commands, Result, all_problems


def add_check(commands: Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "check",
        parents=[shared],
        help="say what is wrong with a spec file, without a model",
        description="Read a spec file and list its entries, or all that is wrong with it.",
    )
    command.add_argument("spec", metavar="SPEC", help="a YAML or JSON file")
    command.set_defaults(run=_run)


@dataclass(frozen=True)
class EntryRow:
    """One regularizer of one entry; None clears what earlier entries put there."""

    selector: str
    regularizer: str | None
    acts_on: str | None


def _run(options: argparse.Namespace) -> Result:
    draft = Draft.load(options.spec)
    placed = [
        (e, r)
        for e in draft.entries
        for r in ((None,) if e.regularizers is None else e.regularizers)
    ]
    table = _entries(placed)
    data = {"entries": table.to_dict(), "problems": draft.problems}
    if draft.problems:
        return Result(lambda width: "", data, all_problems(draft.error(draft.problems)))
    return Result(table.to_text, data)


def _entries(placed: list[tuple[Entry, Regularizer | None]]) -> Table[EntryRow]:
    rows = [
        EntryRow(str(entry.selector), repr(r) if r else None, r.acts_on if r else None)
        for entry, r in placed
    ]
    forms = {repr(r): Forms(shortened(r).texts[:2]) for _, r in placed if r}
    columns: dict[str, Any] = {
        "selector": lambda row: row.selector,
        "regularizer": lambda row: forms.get(row.regularizer, "clears earlier entries"),
        "acts on": lambda row: row.acts_on,
    }
    return Table(rows, columns)
