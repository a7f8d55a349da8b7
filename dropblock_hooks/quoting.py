"""Short one-line texts of values, names and exceptions for messages."""

import math
from collections.abc import Iterable
from typing import Any

from .registry import text

_VOWELS = (*"AEIOaeio", "Unf", "Up", "unf", "up")  # a U is often spoken as in "a UNet"


def shorten(line: str, limit: int = 200) -> str:
    """Leave out the middle of a line that is longer than `limit`: ``layer…conv2``."""
    if len(line) <= limit:
        return line

    length_of_end = (limit - 1) // 2
    start = line[: limit // 2]
    end = line[len(line) - length_of_end :]
    return f"{start}…{end}"


def quote(value: Any, limit: int = 200) -> str:
    """Return the repr of a value in one line of at most `limit` characters."""
    words = text(value).split()
    return shorten(" ".join(words), limit)


def shown(value: Any) -> str:
    """Return a value with its type, and with the number that a text looks like."""
    hint = _number_hint(value) if isinstance(value, str) else ""
    quoted = quote(value, 100)
    return f"{quoted} ({kind_of(value)}{hint})"


def _number_hint(value: str) -> str:
    """Return the advice to write a number instead of a text that looks like one."""
    try:
        number = float(value)
    except ValueError:
        return ""

    if not math.isfinite(number):
        return ""
    if value.strip().isdigit():
        number = int(number)
    return f"; that is text, write {number}"


def label(name: str, limit: int = 100) -> str:
    """Shorten a name to `limit` characters, with escapes for those that do not print."""
    short = shorten(name, limit)
    if short.isprintable():
        return short
    return repr(short)[1:-1]  # without its quotation marks


def listed(names: Iterable[str], most: int) -> str:
    """List the first different names and the number of others; "" (the model) is a dot."""
    different = list(dict.fromkeys(names))
    labels = [label(name) or "." for name in different[:most]]
    first = ", ".join(labels)

    others = len(different) - most
    if others <= 0:
        return first
    return f"{first} and {others} more"


def with_article(name: str) -> str:
    """Return the name of a class with the article of its sound: ``a Linear``, ``an LSTM``."""
    begins_with_vowel = name.startswith(_VOWELS)
    is_spelled = name[:2].isupper() and name[0] in "FHLMNRSX"  # the name of the letter is spoken
    article = "an" if begins_with_vowel or is_spelled else "a"
    return f"{article} {name}"


def kind_of(value: Any) -> str:
    """Return the name of the class of a value."""
    return type(value).__name__


def add_note(error: Exception, note: object) -> None:
    """Put a text below the message of an error, once."""
    line = str(note)
    notes = getattr(error, "__notes__", ())
    if line not in notes:
        error.add_note(line)


def described(error: BaseException) -> str:
    """Return the class, the message and the notes of an error, in one line."""
    notes = getattr(error, "__notes__", [])
    parts = [part for part in (str(error), *notes) if part]
    words = "; ".join(parts).split()
    if not words:
        return kind_of(error)

    line = shorten(" ".join(words))
    return f"{kind_of(error)}: {line}"


class ComposedError(Exception):
    """An error whose text is made of its arguments.

    Trainers replace ``args`` by a longer text that names the place of the error. Then the error
    prints the longer text.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._parts = parts

    def _text(self) -> str:
        """Return the text made of the arguments."""
        raise NotImplementedError

    def __str__(self) -> str:
        if self.args != self._parts:
            return super().__str__()
        return self._text()

    def __reduce__(self) -> Any:
        # the constructor takes the parts, and `args` may be a longer text
        attributes = {**vars(self), "args": self.args}
        return type(self), self._parts, attributes
