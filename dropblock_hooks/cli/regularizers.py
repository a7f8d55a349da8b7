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
from ..tables import Short, Table
from .result import CommandError, Result, of_table


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", nargs="?", metavar="NAME", help="a name from this list")


def run(options: argparse.Namespace) -> Result:
    """List the regularizers, observers and schedules that a spec can name.

    With a name, print its signature and docstring. --import adds the classes of your module.
    """
    rows = {name: _row(name, cls) for name, cls in registered(object).items()}
    if not options.name:
        ordered = sorted(rows.values(), key=lambda row: (row.kind, row.name))
        return of_table(Table(ordered, _COLUMNS))
    if options.name not in rows:
        raise CommandError(f"unknown class {quote(options.name)}{closest(options.name, rows)}")
    row = rows[options.name]
    return Result(lambda width, wide: f"{fill(row.signature, width)}\n\n{row.doc}", asdict(row))


@dataclass(frozen=True)
class KindRow:
    """One registered class.

    `kind` is ``"activation"`` or ``"gradient"``, what a regularizer acts on; ``"observer"`` or
    ``"schedule"``.
    """

    name: str
    kind: str
    signature: str
    doc: str


def _row(name: str, cls: Any) -> KindRow:
    bases = {"schedule": Schedule, "observer": Observer}
    kind = next((kind for kind, base in bases.items() if issubclass(cls, base)), None)
    takes = inspect.signature(cls)
    bare = [p.replace(annotation=p.empty) for p in takes.parameters.values()]
    signature = takes.replace(parameters=bare, return_annotation=takes.empty)
    return KindRow(name, kind or cls.acts_on, f"{name}{signature}", inspect.getdoc(cls) or "")


_COLUMNS: dict[str, Any] = {
    "name": lambda row: row.name,
    "kind": lambda row: row.kind,
    "summary": lambda row: Short(row.doc.partition("\n")[0].partition("; see")[0].rstrip(".")),
}
