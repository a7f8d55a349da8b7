"""``dropblock-hooks regularizers [NAME]``: what can stand in a spec file."""

import argparse
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields
from textwrap import fill, indent
from typing import Any, Literal, Union, get_args, get_origin

from ..checks import closest
from ..observers.base import Observer
from ..quoting import quote
from ..registry import registered
from ..regularizers.rates import hints_of, is_optional, ranges_of
from ..schedules import Schedule
from ..tables import Forms, Section, Table
from .docstrings import meanings, paper, summary
from .result import CommandError, Commands, Result, of_table

_OR_SCHEDULE = " or a schedule"


def add_regularizers(commands: Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "regularizers",
        parents=[shared],
        help="list what can stand in a spec: regularizers and schedules, their fields and papers",
        description="List the registered regularizers and schedules: their fields, what these "
        "take, their defaults, and the papers. Yours are among them with --import.",
    )
    command.add_argument("name", nargs="?", metavar="NAME", help="all about this one")
    command.set_defaults(run=_run)


@dataclass(frozen=True)
class FieldRow:
    """One field: what it takes, its default (None: it must be given), its meaning."""

    name: str
    takes: str
    default: str | None
    meaning: str


@dataclass(frozen=True)
class KindRow:
    """One class that can stand in a spec.

    Attributes:
        name: as files write it.
        kind: ``"regularizer"``, ``"observer"`` or ``"schedule"``.
        acts_on: ``"activation"`` or ``"gradient"``; None of a schedule or an observer.
        summary: a sentence.
        fields: its own.
        options: those that all regularizers take.
        paper: authors and year, or nothing.
        reference: the same with its address.
    """

    name: str
    kind: str
    acts_on: str | None
    summary: str
    fields: tuple[FieldRow, ...]
    options: tuple[FieldRow, ...]
    paper: str
    reference: str


def _run(options: argparse.Namespace) -> Result:
    known = registered(object)
    if not options.name:
        return of_table(Kinds([_row(name, cls) for name, cls in known.items()]))
    if options.name not in known:
        raise CommandError(
            f"unknown regularizer or schedule {quote(options.name)}{closest(options.name, known)}"
        )
    row = _row(options.name, known[options.name])
    return Result(lambda width: _in_full(row, width), asdict(row))


def _row(name: str, cls: Any) -> KindRow:
    said = meanings(cls)
    is_schedule, is_observer = issubclass(cls, Schedule), issubclass(cls, Observer)
    own = [_field(cls, f, said) for f in fields(cls) if f.init and not f.kw_only]
    refused = getattr(cls, "refused_options", ())
    optional = [f for f in fields(cls) if f.init and f.kw_only and f.name not in refused]
    shared = [_field(cls, f, said) for f in optional]
    return KindRow(
        name,
        "schedule" if is_schedule else "observer" if is_observer else "regularizer",
        None if is_schedule or is_observer else cls.acts_on,
        summary(cls),
        tuple(own),
        tuple(shared),
        *paper(cls),
    )


def _field(cls: Any, f: Field[Any], said: dict[str, str]) -> FieldRow:
    allowed, hint = ranges_of(cls).get(f.name), hints_of(cls).get(f.name, f.type)
    takes = _type_text(hint)
    if allowed is not None:
        takes = f"{allowed}{', None' if is_optional(cls, f.name) else ''}{_OR_SCHEDULE}"
    value: Any = f.default if f.default_factory is MISSING else f.default_factory()
    default = None if value is MISSING else value if isinstance(value, str) else repr(value)
    return FieldRow(f.name, takes, default, said.get(f.name, ""))


_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "integer",
    float: "number",
    str: "text",
    tuple: "several",
    type(None): "None",
    Schedule: "schedule",
    Callable: "function",
    Mapping: "mapping",
}


def _type_text(hint: Any) -> str:
    """A type in words: ``row or batch``, ``integer or None``."""
    origin = get_origin(hint) or hint
    if origin in (Literal, Union, types.UnionType):
        text = str if origin is Literal else _type_text
        *others, last = dict.fromkeys(map(text, get_args(hint)))
        return f"{', '.join(others)} or {last}" if others else last
    return _WORDS.get(origin) or str(getattr(origin, "__name__", origin))


@dataclass(frozen=True)
class _Line:
    """A field as the table shows it; the first one of a class has its name and paper."""

    row: KindRow
    field: FieldRow | None
    is_first: bool


class Kinds(Table[KindRow]):
    """What can stand in a spec: a line a field."""

    def __init__(self, rows: Sequence[KindRow]) -> None:
        super().__init__(rows, {})

    def sections(self) -> list[Section[Any]]:
        notes = {
            ("regularizer", "activation"): "regularizers of activations",
            ("regularizer", "gradient"): "regularizers of gradients",
            ("observer", None): "observers",
            ("schedule", None): "schedules",
        }
        found = []
        for group, note in notes.items():
            rows = [row for row in self.rows if (row.kind, row.acts_on) == group]
            lines = [_Line(r, f, i == 0) for r in rows for i, f in enumerate(r.fields or (None,))]
            found.append(Section(lines, _COLUMNS, note))
        return found


def _takes(line: _Line) -> Any:
    text = line.field.takes if line.field else None
    return text and Forms((text, text, text.removesuffix(_OR_SCHEDULE)))


def _paper(line: _Line) -> Any:
    row = line.row
    brief = re.sub(r"^(\w+).*, ", r"\1, ", row.paper)  # Huang, 2016
    return Forms((row.reference, row.paper, brief)) if line.is_first else ""


_COLUMNS: dict[str, Any] = {
    "name": lambda line: line.row.name if line.is_first else "",
    "field": lambda line: line.field and line.field.name,
    "takes": _takes,
    "default": lambda line: line.field and (line.field.default or "required"),
    "paper": _paper,
}


def _in_full(row: KindRow, width: int) -> str:
    """All that is known of one, as text."""
    acts_on = f", acts on the {row.acts_on}" if row.acts_on else ""
    article = "an" if row.kind[0] in "aeiou" else "a"
    parts = [f"{row.name}: {article} {row.kind}{acts_on}", fill(row.summary, width)]
    for heading, rows in (("fields", row.fields), ("options", row.options)):
        if rows:
            parts.append("\n".join([f"{heading}:", *(_definition(f, width) for f in rows)]))
    if row.reference:
        parts.append(fill(f"paper: {row.reference}", width, break_on_hyphens=False))
    return "\n\n".join(parts)


def _definition(f: FieldRow, width: int) -> str:
    default = "required" if f.default is None else f"default {f.default}"
    line = f"  {f.name}: {f.takes}; {default}"
    if not f.meaning:
        return line
    return f"{line}\n{indent(fill(f.meaning, width - 6), ' ' * 6)}"
