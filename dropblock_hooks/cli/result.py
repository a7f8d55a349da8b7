"""What a command returns: text for people, data for programs, and why it failed."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..spec.draft import SpecError
from ..tables import Table

Commands = Any  # argparse's class of subparsers has no public name


class CommandError(Exception):
    """An error that is printed in one line, without a traceback."""


@dataclass(frozen=True)
class Result:
    """What a command returns.

    Attributes:
        text: from the width of the terminal to what is printed.
        data: the same for ``--json``.
        failure: why the exit code is 1; empty for exit code 0.
    """

    text: Callable[[int], str]
    data: Any
    failure: str = ""


def of_table(table: Table[Any]) -> Result:
    """The result of a command that lists something."""
    return Result(table.to_text, table.to_dict())


def all_problems(error: SpecError) -> str:
    """All problems of a spec, a line each, below the heading of the error."""
    heading = str(error).partition("\n")[0]
    return "\n".join([heading, *(f"  - {problem}" for problem in error.problems)])


def count(text: str) -> int:
    """The type of an option that takes an integer above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)
