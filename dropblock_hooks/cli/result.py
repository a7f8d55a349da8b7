"""What a command gives back: text for people, data for programs, and what has failed."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..spec.draft import SpecError
from ..tables import Table

Commands = Any  # argparse's class of subparsers has no public name


class CommandError(Exception):
    """What the user of the command has to know; no traceback."""


@dataclass(frozen=True)
class Result:
    """What a command gives back.

    Attributes:
        text: what is printed, by the width that there is.
        data: the same for ``--json``.
        failure: why the exit code is 1; empty where all is well.
    """

    text: Callable[[int], str]
    data: Any
    failure: str = ""


def of_table(table: Table[Any]) -> Result:
    """A table, of which JSON holds the rows."""
    return Result(table.to_text, table.to_dict())


def all_problems(error: SpecError) -> str:
    """What is wrong with a spec: the heading of the error, and all problems, a line each."""
    heading = str(error).partition("\n")[0]
    return "\n".join([heading, *(f"  - {problem}" for problem in error.problems)])


def count(text: str) -> int:
    """The type of an option that takes an integer above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"must be an integer >= 1, got {text!r} (what follows it is taken for one more)"
        )
    return int(text)
