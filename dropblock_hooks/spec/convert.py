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
    kind, known = base.__name__.lower(), registered(base)
    if isinstance(value, str):
        value = {value: None} if value.isidentifier() else _parsed(value, path)
    elif isinstance(value, Mapping) and len(value) == 1:
        path = (*path, str(next(iter(value))))
    else:
        expected = f"expected a {kind} object or {{Name: {{field: value}}}}"
        hint = f": write {value.__name__}(...)" if isinstance(value, type) else ""
        raise PlainError((path, f"{expected}, got {shown(value)}{hint}"))
    ((name, given),) = value.items()
    if name not in known:
        own = "; import the module of a class of your own first, which registers it"
        hint = closest(str(name), known) or f" (known: {', '.join(known)}){own}"
        raise PlainError((path, f"unknown {kind} {quote(name)}{hint}"))
    if given is not None and not isinstance(given, Mapping):
        raise PlainError((path, f"write {{{name}: {{field: value}}}}, got {shown(given)}"))
    return construct(known[name], given or {}, path)


def construct(cls: Any, given: Mapping[Any, Any], path: Keys) -> Any:
    """An instance of a class from its fields as plain data; a PlainError has all faults."""
    names, hints = [f.name for f in fields(cls) if f.init], hints_of(cls)
    arguments: dict[str, Any] = {}
    faults: list[tuple[Keys, str]] = []
    for key, value in given.items():
        below = (*path, str(key))
        try:
            if key not in names:
                hint = closest(str(key), names) or f" (fields: {', '.join(names)})"
                raise PlainError((below, f"{cls.__name__} has no field {quote(key)}{hint}"))
            is_call = isinstance(value, str) and ("(" in value or value in registered(Schedule))
            if (is_call or isinstance(value, Mapping)) and _takes_schedule(hints.get(key)):
                value = _built(Schedule, value, below)
            arguments[key] = tuple(value) if is_list(value) else value
        except PlainError as error:
            faults += error.args
    try:
        made = cls(**arguments)
    except (TypeError, ValueError, OverflowError) as error:
        message = str(error).removeprefix(f"{cls.__name__}.__init__() ")
        if not faults or "missing" not in message:
            first = message.split(" ", 1)[0]  # messages begin with the name of the field
            faults.append(((*path, first) if first in given else path, message))
    if faults:
        raise PlainError(*faults)
    return made


def _takes_schedule(hint: Any) -> bool:
    return hint is Schedule or any(map(_takes_schedule, get_args(hint)))


def _parsed(text: str, path: Keys) -> Mapping[str, Any]:
    """``{Name: {field: value}}`` of the text ``Name(1, field=2)``; the text is not run."""
    try:
        ((name, given),) = _literal(ast.parse(text.strip(), mode="eval").body).items()
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        problem = f"can't read {shown(text)}: expected Name(field=value, ...), in quotes"
        word = _without_quotes(text)
        if word:
            problem += f"; inside it, the word {word} needs quotes of its own, as in {word!r}"
        raise PlainError((path, problem)) from None
    return {name: given}


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
    cls: Any = registered(object).get(node.func.id)
    names = [f.name for f in fields(cls) if f.init and not f.kw_only] if cls else []
    given = dict(zip(names, map(_literal, node.args), strict=False))
    given |= {each.arg or "**": _literal(each.value) for each in node.keywords}
    if cls and len(given) < len(node.args) + len(node.keywords):  # too many, or one twice
        raise ValueError
    return {node.func.id: given}


def to_plain(value: Any) -> Any:
    """A value as files hold it; of a regularizer or schedule ``{Name: fields}``."""
    if isinstance(value, Regularizer | Schedule):
        if type(value) not in registered(object).values():
            raise ValueError(
                f"{quote(value)} can't be written to a file: it holds code, or is not registered"
            )
        return {name_of(type(value)): plain_fields(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_plain(item) for key, item in value.items()}
        return [[key, to_plain(item)] for key, item in value.items()]  # JSON's keys are text
    if is_list(value):
        return [to_plain(item) for item in value]
    if callable(value) and not isinstance(value, type):
        raise ValueError(f"{quote(value)} is a function, which can't be written to a file")
    return value.__name__ if isinstance(value, type) else value


def plain_fields(obj: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, as plain data."""
    return {name: to_plain(value) for name, value in stated_fields(obj).items()}
