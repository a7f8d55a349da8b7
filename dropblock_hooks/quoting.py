"""Short one-line texts of values, names and exceptions for messages."""

import math
from collections.abc import Iterable
from typing import Any

from .registry import text


def shorten(line: str, limit: int = 200) -> str:
    """`line`, without its middle if it is longer than `limit`: ``layer…conv2``."""
    if len(line) <= limit:
        return line
    start = line[: limit // 2]
    end = line[len(line) - (limit - 1) // 2 :]
    return f"{start}…{end}"


def quote(value: Any, limit: int = 200) -> str:
    """The repr of a value in at most `limit` characters."""
    return shorten(" ".join(text(value).split()), limit)


def shown(value: Any) -> str:
    """A value with its type; of a text like a number also this number: ``'7' (str; ...)``."""
    hint = _number_hint(value) if isinstance(value, str) else ""
    return f"{quote(value, 100)} ({kind_of(value)}{hint})"


def _number_hint(value: str) -> str:
    """The advice to write a number instead of a text that looks like one."""
    try:
        number = float(value)
    except ValueError:
        return ""

    if not math.isfinite(number):
        return ""
    is_integer = value.strip().isdigit()
    return f"; that is text, write {int(number) if is_integer else number}"


def label(name: str, limit: int = 100) -> str:
    """A name, shortened to `limit` characters, with escapes for those that do not print."""
    short = shorten(name, limit)
    if short.isprintable():
        return short
    return repr(short)[1:-1]  # without its quotation marks


def listed(names: Iterable[str], most: int) -> str:
    """The first different names and the number of others; the root is a dot."""
    different = list(dict.fromkeys(names))
    first = ", ".join(label(name) or "." for name in different[:most])
    others = len(different) - most
    return f"{first} and {others} more" if others > 0 else first


def kind_of(value: Any) -> str:
    """The name of the value's class."""
    return type(value).__name__


def add_note(error: Exception, note: object) -> None:
    """Put a text below the message of an error, once."""
    if str(note) not in getattr(error, "__notes__", ()):
        error.add_note(str(note))


def described(error: BaseException) -> str:
    """The class, the message and the notes of an error, in one line."""
    parts = [str(error), *getattr(error, "__notes__", [])]
    message = "; ".join(part for part in parts if part)
    line = shorten(" ".join(message.split()))
    return f"{kind_of(error)}: {line}" if line else kind_of(error)


class ComposedError(Exception):
    """An error whose text is made of its arguments.

    Trainers replace ``args`` by a longer text that says where it was raised. Then the error prints
    that text.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._parts = parts

    def _text(self) -> str:
        """The text made of the arguments."""
        raise NotImplementedError

    def __str__(self) -> str:
        if self.args != self._parts:
            return super().__str__()
        return self._text()

    def __reduce__(self) -> Any:
        attributes = {**vars(self), "args": self.args}
        return type(self), self._parts, attributes
