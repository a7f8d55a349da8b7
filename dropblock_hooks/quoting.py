"""Values as messages quote them: short, whatever their size, and without building the whole repr.

A value can be huge (a list of lists of lists), hold itself, or raise when it is shown. None of this
may hide the message about it.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, MappingView, Sequence, Set
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from .registry import name_of, stated_fields

LIMIT = 200
"""Most characters of one value in a message."""
_DEEP = 5
_CUT = "..."
_PACKAGE = __name__.partition(".")[0]
_BRACKETS: dict[type, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}")}
_LARGE = 256  # bits of an integer that is written out


def shorten(text: str, limit: int = LIMIT) -> str:
    """`text` without its middle where it is longer than `limit`."""
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail - len(_CUT)]}{_CUT}{text[len(text) - tail :]}"


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


def class_name(cls: type) -> str:
    """The name of a class, which its metaclass can't hide."""
    return label(type.__dict__["__name__"].__get__(cls), 60)


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
        return _plain(value, room) or _container(value, room, depth) or _other(value, room, depth)
    except Exception:  # whatever somebody's __repr__, __iter__ or __eq__ raises
        return f"<{kind_of(value)}>"


def _plain(value: Any, room: int) -> str:
    if isinstance(value, enum.Enum):
        return f"{kind_of(value)}.{label(value.name, room)}"
    if isinstance(value, str):
        text = str.__str__(value)
        return repr(text if len(text) <= room else shorten(text, max(room - 2, 10)))
    if isinstance(value, bytes | bytearray):
        return repr(bytes(value[:room]))
    if isinstance(value, int) and value.bit_length() > _LARGE:
        digits = int(value.bit_length() * math.log10(2)) + 1
        return f"<{'-' if value < 0 else ''}integer of about {digits} digits>"
    return ""


def _container(value: Any, room: int, depth: int) -> str:
    """Text of what holds other things."""
    kind = type(value)
    if isinstance(value, Mapping):
        ours = kind.__module__.partition(".")[0] == _PACKAGE  # they are written as dicts
        name = "" if kind is dict or ours else kind_of(value)
        if depth == _DEEP:
            return f"{name}{{{_CUT}}}"
        body = _joined(value.items(), room, lambda pair, left: _pair(pair, left, depth))
        return f"{name}({{{body}}})" if name else f"{{{body}}}"
    if isinstance(value, Sequence | Set) and not isinstance(value, range | memoryview):
        left, right = _BRACKETS.get(kind, ("[", "]"))
        name = "" if kind in (list, tuple, set) else kind_of(value)
        if depth == _DEEP:
            return f"{name}{left}{_CUT}{right}"
        body = _joined(value, room, lambda item, space: _written(item, space, depth + 1))
        comma = "," if kind is tuple and len(value) == 1 else ""
        body = f"{left}{body}{comma}{right}" if body or kind is not set else "set()"
        return f"{name}({body})" if name else body
    return ""


def _pair(pair: Any, room: int, depth: int) -> str:
    key = _written(pair[0], room, depth + 1)
    return f"{key}: {_written(pair[1], max(room - len(key), 0), depth + 1)}"


def _joined(items: Iterable[Any], room: int, write: Callable[[Any, int], str]) -> str:
    parts: list[str] = []
    for item in items:
        if room <= 0:
            parts.append(_CUT)
            break
        parts.append(write(item, room))
        room -= len(parts[-1]) + 2
    return ", ".join(parts)


def _other(value: Any, room: int, depth: int) -> str:
    if inspect.isroutine(value) or inspect.isclass(value):
        return label(value.__qualname__, room)
    if isinstance(value, MappingView | BaseException):
        return f"<{kind_of(value)}>"
    if isinstance(value, SimpleNamespace):
        return _fields(kind_of(value), vars(value), room, depth)
    if is_dataclass(value):
        return _dataclass(value, room, depth)
    return " ".join(str(repr(value)).split())


def _dataclass(value: Any, room: int, depth: int) -> str:
    """Of ours the fields that are stated, of others all, unless they have a repr of their own."""
    writer = type(value).__repr__
    if getattr(writer, "__module__", "").partition(".")[0] == _PACKAGE:
        return _fields(name_of(type(value)), stated_fields(value), room, depth)
    if not hasattr(writer, "__wrapped__"):  # not the one that @dataclass made
        return " ".join(str(repr(value)).split())
    given = {f.name: getattr(value, f.name) for f in fields(value) if f.repr}
    return _fields(kind_of(value), given, room, depth)


def _fields(name: str, given: Mapping[str, Any], room: int, depth: int) -> str:
    if depth == _DEEP:
        return f"{name}({_CUT})"

    def write(item: tuple[str, Any], left: int) -> str:
        key, value = item
        return f"{key}={_written(value, left, depth + 1)}" if key else str(value)

    return f"{name}({_joined(given.items(), room - len(name), write)})"
