"""Values, names and exceptions as messages quote them: in one line, and not too long."""

import contextlib
from collections.abc import Iterable
from typing import Any

from .registry import text

LIMIT = 200
"""Most characters of one value in a message."""


def shorten(line: str, limit: int = LIMIT) -> str:
    """`line`, without its middle where it is longer than `limit`: ``layer…conv2``."""
    if len(line) <= limit:
        return line
    return f"{line[: limit // 2]}…{line[len(line) - (limit - 1) // 2 :]}"


def quote(value: Any, limit: int = LIMIT) -> str:
    """The repr of a value in at most `limit` characters."""
    return shorten(" ".join(text(value).split()), limit)


def shown(value: Any) -> str:
    """A value with its type, and with the number that a text looks like: ``'7' (str; ...)``."""
    hint = ""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            number = int(value) if value.strip().isdigit() else float(value)
            if abs(number) < float("inf"):
                hint = f"; that is text, write {number!r}"
    return f"{quote(value, 100)} ({kind_of(value)}{hint})"


def label(name: str, limit: int = 100) -> str:
    """A name of a key, a layer or a file."""
    short = shorten(name, limit)
    return short if short.isprintable() else repr(short)[1:-1]


def listed(names: Iterable[str], most: int) -> str:
    """The first names without repetition, and how many more there are; the root is a dot."""
    different = list(dict.fromkeys(names))
    more = f" and {len(different) - most} more" if len(different) > most else ""
    return ", ".join(label(name) or "." for name in different[:most]) + more


def kind_of(value: Any) -> str:
    """The name of the class of a value."""
    return type(value).__name__


def described(error: BaseException) -> str:
    """The class and the message of an exception."""
    message = shorten(" ".join(str(error).split()))
    return f"{kind_of(error)}: {message}" if message else kind_of(error)
