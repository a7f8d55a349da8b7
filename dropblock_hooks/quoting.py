"""Values as messages quote them: short, and of what holds others only the beginning is made.

A value can be huge (a list of lists of lists), hold itself, or raise when it is shown. None of this
may hide the message about it.
"""

import contextlib
import enum
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from .registry import text

LIMIT = 200
"""Most characters of one value in a message."""
_DEEP = 5
_CUT = "..."
_BRACKETS: dict[type, str] = {dict: "{}", list: "[]", tuple: "()", set: "{}"}
_LARGE = 256  # bits of an integer that is written out


def shorten(line: str, limit: int = LIMIT) -> str:
    """`line` without its middle where it is longer than `limit`."""
    if len(line) <= limit:
        return line
    tail = limit // 3
    return f"{line[: limit - tail - len(_CUT)]}{_CUT}{line[len(line) - tail :]}"


def label(name: str, limit: int = 100) -> str:
    """A name (of a key, a layer, a file) as messages hold it: in one line, and not too long."""
    short = shorten(name, limit)
    return short if short.isprintable() else shorten(repr(short)[1:-1], limit)


def listed(names: Iterable[str], most: int) -> str:
    """Names without repetition, up to so many, and how many more; the root is a dot."""
    different = list(dict.fromkeys(names))
    more = f" and {len(different) - most} more" if len(different) > most else ""
    return ", ".join(label(name) or "." for name in different[:most]) + more


def kind_of(value: Any) -> str:
    """The name of the class of a value."""
    return class_name(type(value))


def kind_with_keys(value: Any) -> str:
    """The same, and the keys of a mapping."""
    return f"{kind_of(value)}{f' with {quote(list(value))}' if isinstance(value, Mapping) else ''}"


def class_name(cls: type) -> str:
    """The name of a class, in a length that a message can hold."""
    return label(cls.__name__, 60)


def described(error: BaseException) -> str:
    """An exception in one line."""
    message = " ".join(_said(error)[: 2 * LIMIT].split())
    return f"{kind_of(error)}: {shorten(message)}" if message else kind_of(error)


def message_of(error: BaseException) -> str:
    """What an exception says, in a length that a message can hold; else its kind."""
    return shorten(_said(error), 3 * LIMIT) or kind_of(error)


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # its __str__ is somebody's code
        return ""


def shown(value: Any) -> str:
    """`value` and its type, cut short, for error messages."""
    hint = ""
    if isinstance(value, str) and len(value) < 40:
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)
            if math.isfinite(number):  # others are taken nowhere
                written = int(number) if value.strip().isdigit() else number
                hint = f"; that is text, write {written!r}"
    return f"{quote(value, 60 if isinstance(value, str) else 120)} ({kind_of(value)}{hint})"


def quote(value: Any, limit: int = LIMIT) -> str:
    """The repr of a value in at most `limit` characters; ``<Name>`` of the class where it fails."""
    return shorten(_written(value, limit, 0), limit)


def _written(value: Any, room: int, depth: int) -> str:
    """The beginning of a repr, of about `room` characters; the rest is not made."""
    try:
        if isinstance(value, enum.Enum):
            return f"{kind_of(value)}.{label(value.name, room)}"
        if isinstance(value, str):
            return repr(shorten(value, max(room - 2, 10)))
        if isinstance(value, int) and value.bit_length() > _LARGE:
            digits = int(value.bit_length() * math.log10(2)) + 1
            return f"<{'-' if value < 0 else ''}integer of about {digits} digits>"
        if isinstance(value, Mapping | Sequence | Set) and not isinstance(
            value, range | bytes | bytearray | memoryview
        ):
            return _container(value, room, depth)
        return " ".join(text(value).split())
    except Exception:  # whatever somebody's __repr__, __iter__ or __eq__ raises
        return f"<{kind_of(value)}>"


def _container(value: Any, room: int, depth: int) -> str:
    """What holds other things: its first ones, until there is no room."""
    kind, is_mapping = type(value), isinstance(value, Mapping)
    parts: list[str] = []
    for item in value.items() if is_mapping else value:
        if room <= 0 or depth == _DEEP:
            parts.append(_CUT)
            break
        pair = item if is_mapping else [item]
        parts.append(": ".join(_written(part, room, depth + 1) for part in pair))
        room -= len(parts[-1]) + 2
    ends = _BRACKETS.get(kind, "{}" if is_mapping else "[]")
    comma = "," if kind is tuple and len(parts) == 1 else ""
    body = f"{ends[0]}{', '.join(parts)}{comma}{ends[1]}"
    return body if kind in _BRACKETS else f"{kind_of(value)}({body})"
