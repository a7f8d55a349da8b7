"""``dropblock-hooks regularizers [NAME]``."""

import argparse
import inspect
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

from ..checks import closest
from ..observers.base import Observer
from ..quoting import quote
from ..registry import registered
from ..schedules.base import Schedule
from ..tables import Table
from .result import CommandError, Result, of_table


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", nargs="?", metavar="NAME", help="a name from this list")


def run(options: argparse.Namespace) -> Result:
    """List the regularizers, observers and schedules that a spec can name.

    With a name, print its signature and docstring. --import adds the classes of your module.
    """
    known = registered(object)
    rows = {name: _row(name, cls) for name, cls in known.items()}
    if not options.name:
        return of_table(Table(list(rows.values()), _COLUMNS))
    if options.name not in known:
        hint = closest(options.name, known)
        raise CommandError(f"unknown regularizer or schedule {quote(options.name)}{hint}")
    row = rows[options.name]
    return Result(lambda width: f"{fill(row.signature, width)}\n\n{row.doc}", asdict(row))


@dataclass(frozen=True)
class KindRow:
    """One registered class; `kind` is ``"regularizer"``, ``"observer"`` or ``"schedule"``."""

    name: str
    kind: str
    acts_on: str | None
    signature: str
    doc: str


def _row(name: str, cls: Any) -> KindRow:
    bases = {"schedule": Schedule, "observer": Observer}
    kind = next((kind for kind, base in bases.items() if issubclass(cls, base)), "regularizer")
    takes = inspect.signature(cls)
    bare = [p.replace(annotation=p.empty) for p in takes.parameters.values()]
    return KindRow(
        name=name,
        kind=kind,
        acts_on=cls.acts_on if kind == "regularizer" else None,
        signature=f"{name}{takes.replace(parameters=bare, return_annotation=takes.empty)}",
        doc=inspect.getdoc(cls) or "",
    )


_COLUMNS: dict[str, Any] = {
    "name": lambda row: row.name,
    "kind": lambda row: row.acts_on or row.kind,
    "summary": lambda row: row.doc.partition("\n")[0].partition("; see")[0].rstrip("."),
}
