"""``dropblock-hooks regularizers [NAME]``: the classes that a spec file can name."""

import argparse
import inspect
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

from ..checks import closest
from ..observers.base import Observer
from ..quoting import quote
from ..registry import registered
from ..schedules import Schedule
from ..tables import Table
from .result import CommandError, Commands, Result, of_table


def add_regularizers(commands: Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "regularizers",
        parents=[shared],
        help="list the regularizers, observers and schedules that a spec can name",
        description="List the registered regularizers, observers and schedules. With a name, "
        "print the signature and the docstring of one. --import adds yours.",
    )
    command.add_argument("name", nargs="?", metavar="NAME", help="print the docstring of this one")
    command.set_defaults(run=_run)


@dataclass(frozen=True)
class KindRow:
    """One class that a spec file can name.

    Attributes:
        name: as files write it.
        kind: ``"regularizer"``, ``"observer"`` or ``"schedule"``.
        acts_on: ``"activation"`` or ``"gradient"``; None of a schedule or an observer.
        signature: its arguments and their defaults.
        doc: its docstring.
    """

    name: str
    kind: str
    acts_on: str | None
    signature: str
    doc: str


def _run(options: argparse.Namespace) -> Result:
    known = registered(object)
    if not options.name:
        return of_table(Table([_row(name, cls) for name, cls in known.items()], _COLUMNS))
    if options.name not in known:
        raise CommandError(
            f"unknown regularizer or schedule {quote(options.name)}{closest(options.name, known)}"
        )
    row = _row(options.name, known[options.name])
    return Result(lambda width: f"{fill(row.signature, width)}\n\n{row.doc}", asdict(row))


def _row(name: str, cls: Any) -> KindRow:
    takes = inspect.signature(cls)
    bare = [p.replace(annotation=p.empty) for p in takes.parameters.values()]
    signature = f"{name}{takes.replace(parameters=bare, return_annotation=takes.empty)}"
    kind = next((k for k in (Schedule, Observer) if issubclass(cls, k)), None)
    if kind is None:
        return KindRow(name, "regularizer", cls.acts_on, signature, inspect.getdoc(cls) or "")
    return KindRow(name, kind.__name__.lower(), None, signature, inspect.getdoc(cls) or "")


_COLUMNS: dict[str, Any] = {
    "name": lambda row: row.name,
    "kind": lambda row: row.acts_on or row.kind,
    "summary": lambda row: row.doc.partition("\n")[0].partition("; see")[0].rstrip("."),
}
