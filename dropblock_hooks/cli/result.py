"""What a command returns: text for people, data for programs, and why it failed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..tables import Table


class CommandError(Exception):
    """An error that is printed in one line, without a traceback."""


@dataclass(frozen=True)
class Result:
    """What a command returns.

    Attributes:
        text: a function from the width of the terminal, and whether ``--wide`` was given, to the
            printed text.
        data: the same for ``--json``.
        failure: why the exit code is 1; empty for exit code 0.
    """

    text: Callable[[int, bool], str]
    data: Any
    failure: str = ""


def of_table(table: Table[Any]) -> Result:
    """The result of a command that prints a table."""
    return Result(table.to_text, table.to_dict())
