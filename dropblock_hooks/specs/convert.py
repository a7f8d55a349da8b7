"""Regularizers, schedules and selectors from plain data as files hold it, and back.

A regularizer or schedule is ``{Name: {field: value}}``, ``Name``, or the text of its repr,
``"DropBlock2d(p=0.1, block_size=3)"``. The text is parsed and never run.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

from ..checks import closest
from ..quoting import quote, shown
from ..registry import name_of, registered, stated_fields
from ..regularizers.base import Regularizer, hints_of
from ..regularizers.foreign import Foreign
from ..schedules import Schedule
from .files import Keys


class PlainError(ValueError):
    """Plain data with faults; each argument is a path of keys and a message."""


def is_list(value: Any) -> bool:
    """Whether a value is a list, a tuple, or a sequence of a configuration library."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def regularizer_from(value: Any, path: Keys) -> Any:
    """A regularizer from a regularizer, a module of another library, or plain data."""
    if isinstance(value, Regularizer):
        return value
    if callable(value) and not isinstance(value, type | Schedule):
        return Foreign(value)
    return _built(Regularizer, value, path)


def _built(base: type[Any], value: Any, path: Keys) -> Any:
    """An object of a registered class, from ``{Name: fields}`` or the text of a call."""
    kind = base.__name__.lower()
    known = registered(base)
    if isinstance(value, str) and value.isidentifier():
        name, stated = value, None
    elif isinstance(value, str):
        name, stated = _parsed(value, path)
    elif isinstance(value, Mapping) and len(value) == 1:
        ((name, stated),) = value.items()
        path = (*path, str(name))
    else:
        expected = f"expected a {kind} object or {{Name: {{field: value}}}}"
        hint = f": write {value.__name__}(...)" if isinstance(value, type) else ""
        raise PlainError((path, f"{expected}, got {shown(value)}{hint}"))

    if name not in known:
        own = "; import the module of a class of your own first, which registers it"
        hint = closest(str(name), known) or f" (known: {', '.join(known)}){own}"
        raise PlainError((path, f"unknown {kind} {quote(name)}{hint}"))
    if stated is not None and not isinstance(stated, Mapping):
        raise PlainError((path, f"write {{{name}: {{field: value}}}}, got {shown(stated)}"))
    return construct(known[name], stated or {}, path)


def construct(cls: Any, stated: Mapping[Any, Any], path: Keys) -> Any:
    """An instance of a class from its fields as plain data; a PlainError has all faults."""
    names = [field.name for field in fields(cls) if field.init]
    hints = hints_of(cls)
    arguments: dict[str, Any] = {}
    faults: list[tuple[Keys, str]] = []

    for key, value in stated.items():
        below = (*path, str(key))
        if key not in names:
            hint = closest(str(key), names) or f" (fields: {', '.join(names)})"
            faults.append((below, f"{cls.__name__} has no field {quote(key)}{hint}"))
            continue

        try:
            arguments[key] = _argument(value, hints.get(key), below)
        except PlainError as error:
            faults += error.args

    try:
        instance = cls(**arguments)
    except (TypeError, ValueError, OverflowError) as error:
        message = str(error).removeprefix(f"{cls.__name__}.__init__() ")
        # an argument that is missing may be one of the faults
        if not faults or "missing" not in message:
            faults.append((_path_of(message, stated, path), message))

    if faults:
        raise PlainError(*faults)
    return instance


def _argument(value: Any, hint: Any, path: Keys) -> Any:
    """The value of a field; a schedule is made of plain data, if the field takes one."""
    is_call = isinstance(value, str) and ("(" in value or value in registered(Schedule))
    if (is_call or isinstance(value, Mapping)) and _takes_schedule(hint):
        value = _built(Schedule, value, path)
    return tuple(value) if is_list(value) else value


def _takes_schedule(hint: Any) -> bool:
    return hint is Schedule or any(map(_takes_schedule, get_args(hint)))


def _path_of(message: str, stated: Mapping[Any, Any], path: Keys) -> Keys:
    """The path of the field with whose name a message begins, or of the whole object."""
    first_word = message.split(" ", 1)[0]
    return (*path, first_word) if first_word in stated else path


def _parsed(text: str, path: Keys) -> tuple[str, Mapping[str, Any]]:
    """The name and the fields of the text ``Name(1, field=2)``; the text is not run."""
    try:
        call = _literal(ast.parse(text.strip(), mode="eval").body)
        ((name, stated),) = call.items()
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        problem = f"can't read {shown(text)}: expected Name(field=value, ...), in quotes"
        word = _without_quotes(text)
        if word:
            problem += f"; inside it, the word {word} needs quotes of its own, as in {word!r}"
        raise PlainError((path, problem)) from None
    return name, stated


def _without_quotes(text: str) -> str:
    """The first word in a call that is no value without quotes; "" if there is none."""
    try:
        nodes = list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    words = [node for node in nodes if isinstance(node, ast.Name) and id(node) not in called]
    return next((word.id for word in words if word.id not in ("inf", "nan")), "")


def _literal(node: ast.expr) -> Any:
    """The value of a literal; of a call, ``{Name: {field: value}}``."""
    if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return float(node.id)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return ast.literal_eval(node)

    name = node.func.id
    cls: Any = registered(object).get(name)
    stated = dict(zip(_positional_fields(cls), map(_literal, node.args), strict=False))
    for keyword in node.keywords:
        stated[keyword.arg or "**"] = _literal(keyword.value)

    if cls and len(stated) < len(node.args) + len(node.keywords):
        raise ValueError("too many arguments, or one of them twice")
    return {name: stated}


def _positional_fields(cls: Any) -> list[str]:
    """The fields of a registered class that a call may give by position; none of another name."""
    if cls is None:
        return []
    return [field.name for field in fields(cls) if field.init and not field.kw_only]


def to_plain(value: Any) -> Any:
    """A value as files hold it; of a regularizer or schedule ``{Name: fields}``."""
    if isinstance(value, Regularizer | Schedule):
        if type(value) not in registered(object).values():
            raise ValueError(
                f"{quote(value)} can't be written to a file: it holds code, or is not registered"
            )
        return {name_of(type(value)): plain_fields(value)}

    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if is_list(value):
        return [to_plain(item) for item in value]
    if isinstance(value, type):
        return value.__name__
    if callable(value):
        raise ValueError(f"{quote(value)} is a function, which can't be written to a file")
    return value


def _plain_mapping(mapping: Mapping[Any, Any]) -> Any:
    """A mapping as files hold it; a list of pairs if a key is no text, which JSON needs."""
    if all(isinstance(key, str) for key in mapping):
        return {key: to_plain(item) for key, item in mapping.items()}
    return [[key, to_plain(item)] for key, item in mapping.items()]


def plain_fields(obj: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, as plain data."""
    return {name: to_plain(value) for name, value in stated_fields(obj).items()}
