"""``dropblock-hooks check SPEC``."""

import argparse
from dataclasses import dataclass

from ..attachment.report import shortened
from ..spec.draft import Draft
from ..tables import Forms, Table
from .result import Commands, Result, all_problems


def add_check(commands: Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "check",
        parents=[shared],
        help="check a spec file without a model",
        description="Read a spec file and list its entries, or all that is wrong with it.",
    )
    command.add_argument("spec", metavar="SPEC", help="a YAML or JSON file")
    command.set_defaults(run=_run)


@dataclass(frozen=True)
class EntryRow:
    """One regularizer of one entry; None removes what earlier entries put there."""

    selector: str
    regularizer: str | None
    acts_on: str | None


def _run(options: argparse.Namespace) -> Result:
    draft = Draft.load(options.spec)
    rows: list[EntryRow] = []
    forms: dict[str | None, Forms] = {}
    for entry in draft.entries:
        if entry.regularizers is None:
            rows.append(EntryRow(str(entry.selector), None, None))
        for regularizer in entry.regularizers or ():
            text = repr(regularizer)
            rows.append(EntryRow(str(entry.selector), text, regularizer.acts_on))
            forms[text] = Forms(shortened(regularizer).texts[:2])
    table = Table(
        rows,
        {
            "selector": lambda row: row.selector,
            "regularizer": lambda row: forms.get(row.regularizer, "removes earlier entries"),
            "acts on": lambda row: row.acts_on,
        },
    )
    failure = all_problems(draft.error(draft.problems)) if draft.problems else ""
    data = {"entries": table.to_dict(), "problems": draft.problems}
    return Result(lambda width: "" if failure else table.to_text(width), data, failure)
