"""Short one-line texts of values, names and exceptions for messages."""

import contextlib
from collections.abc import Iterable
from typing import Any

from .registry import text


def shorten(line: str, limit: int = 200) -> str:
    """`line`, without its middle if it is longer than `limit`: ``layer…conv2``."""
    if len(line) <= limit:
        return line
    return f"{line[: limit // 2]}…{line[len(line) - (limit - 1) // 2 :]}"


def quote(value: Any, limit: int = 200) -> str:
    """The repr of a value in at most `limit` characters."""
    return shorten(" ".join(text(value).split()), limit)


def shown(value: Any) -> str:
    """A value with its type; of a text like a number also this number: ``'7' (str; ...)``."""
    hint = ""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            number = float(value)
            if number - number == 0.0:  # it is finite
                hint = f"; that is text, write {int(number) if value.strip().isdigit() else number}"
    return f"{quote(value, 100)} ({kind_of(value)}{hint})"


def label(name: str, limit: int = 100) -> str:
    short = shorten(name, limit)
    return short if short.isprintable() else repr(short)[1:-1]


def listed(names: Iterable[str], most: int) -> str:
    """The first different names and the number of others; the root is a dot."""
    different = list(dict.fromkeys(names))
    more = f" and {len(different) - most} more" if len(different) > most else ""
    return ", ".join(label(name) or "." for name in different[:most]) + more


def kind_of(value: Any) -> str:
    return type(value).__name__


def add_note(error: Exception, note: object) -> None:
    """Put a text below the message of an error, once."""
    if str(note) not in getattr(error, "__notes__", ()):
        error.add_note(str(note))


def described(error: BaseException) -> str:
    told = "; ".join(filter(None, [str(error), *getattr(error, "__notes__", [])]))
    message = shorten(" ".join(told.split()))
    return f"{kind_of(error)}: {message}" if message else kind_of(error)


class ComposedError(Exception):
    """An error whose text is made of its arguments.

    Trainers replace ``args`` by a longer text, to add where it was. Then it prints that text.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._parts = parts

    def _text(self) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        return self._text() if self.args == self._parts else super().__str__()

    def __reduce__(self) -> Any:
        return type(self), self._parts, {**vars(self), "args": self.args}
