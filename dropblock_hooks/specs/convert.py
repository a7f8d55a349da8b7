"""Makes regularizers, schedules and selectors from the plain data of files, and the other way.

A regularizer or schedule is ``{Name: {field: value}}``, ``Name``, or the text of its repr,
``"DropBlock2d(p=0.1, block_size=3)"``. The text is parsed and never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

from ..checks import closest
from ..quoting import quote, shown
from ..registry import name_of, registered, stated_fields
from ..regularizers.base import Regularizer, hints_of
from ..regularizers.foreign import Foreign
from ..schedules import Schedule
from .files import Keys

_NUMBERS = ("inf", "nan")  # words that are values without quotes


class PlainError(ValueError):
    """Plain data with faults. Each argument is a path of keys and a message."""


def is_list(value: Any) -> bool:
    """Return whether a value is a list, a tuple, or a sequence of a configuration library."""
    is_text = isinstance(value, str | bytes | bytearray)
    return isinstance(value, Sequence) and not is_text


def regularizer_from(value: Any, path: Keys) -> Any:
    """Make a regularizer from a regularizer, a module of another library, or plain data."""
    if isinstance(value, Regularizer):
        return value
    is_description = isinstance(value, type | Schedule)
    if callable(value) and not is_description:
        return Foreign(value)
    return _built(Regularizer, value, path)


def _built(base: type[Any], value: Any, path: Keys) -> Any:
    """Make an object of a registered class, from ``{Name: fields}`` or the text of a call."""
    kind = base.__name__.lower()
    stated: Any
    if isinstance(value, str):
        name, stated = _parsed(value, path)
    elif isinstance(value, Mapping) and len(value) == 1:
        ((name, stated),) = value.items()
        path = (*path, str(name))
    else:
        expected = f"expected a {kind} object or {{Name: {{field: value}}}}"
        hint = f": write {value.__name__}(...)" if isinstance(value, type) else ""
        raise PlainError((path, f"{expected}, got {shown(value)}{hint}"))

    known = registered(base)
    if name not in known:
        hint = _known_names(name, known)
        raise PlainError((path, f"unknown {kind} {quote(name)}{hint}"))
    if stated is None:
        stated = {}
    if not isinstance(stated, Mapping):
        raise PlainError((path, f"write {{{name}: {{field: value}}}}, got {shown(stated)}"))
    return construct(known[name], stated, path)


def _known_names(name: Any, known: Iterable[str]) -> str:
    """Return the names that resemble an unknown name, or else all names and what to do."""
    near = closest(str(name), known)
    if near:
        return near
    names = ", ".join(known)
    return f" (known: {names}); import the module of a class of your own first, which registers it"


def construct(cls: Any, stated: Mapping[Any, Any], path: Keys) -> Any:
    """Make an instance of a class from its fields as plain data.

    Raises:
        PlainError: with all faults.
    """
    names = [field.name for field in fields(cls) if field.init]
    hints = hints_of(cls)
    arguments: dict[str, Any] = {}
    faults: list[tuple[Keys, str]] = []

    for key, value in stated.items():
        below = (*path, str(key))
        if key not in names:
            known = ", ".join(names)
            hint = closest(str(key), names) or f" (fields: {known})"
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
            where = _path_of(message, stated, path)
            faults.append((where, message))

    if faults:
        raise PlainError(*faults)
    return instance


def _argument(value: Any, hint: Any, path: Keys) -> Any:
    """Make the value of a field from plain data: a schedule, if the field takes schedules."""
    if _takes_schedule(hint) and _is_schedule(value):
        return _built(Schedule, value, path)
    if is_list(value):
        return tuple(value)
    return value


def _takes_schedule(hint: Any) -> bool:
    """Return whether a schedule is among the types of an annotation."""
    if hint is Schedule:
        return True
    return any(map(_takes_schedule, get_args(hint)))


def _is_schedule(value: Any) -> bool:
    """Return whether plain data describes a schedule: a mapping, a call or a name."""
    if not isinstance(value, str):
        return isinstance(value, Mapping)
    return "(" in value or value in registered(Schedule)


def _path_of(message: str, stated: Mapping[Any, Any], path: Keys) -> Keys:
    """Return the path of the field that a message names first, or of the whole object."""
    first_word, _, _ = message.partition(" ")
    if first_word not in stated:
        return path
    return (*path, first_word)


def _parsed(text: str, path: Keys) -> tuple[str, Mapping[str, Any]]:
    """Read the name and the fields of ``Name(1, field=2)`` or ``Name``. The text is not run."""
    if text.isidentifier():
        return text, {}
    try:
        tree = ast.parse(text.strip(), mode="eval")
        call = _literal(tree.body)
        ((name, stated),) = call.items()
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        problem = f"can't read {shown(text)}: expected Name(field=value, ...), in quotes"
        word = _without_quotes(text)
        if word:
            problem += f"; inside it, the word {word} needs quotes of its own, as in {word!r}"
        raise PlainError((path, problem)) from None
    return name, stated


def _without_quotes(text: str) -> str:
    """Find the first word in a call that needs quotes; "" without such a word."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""

    nodes = list(ast.walk(tree))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    words = [node for node in nodes if isinstance(node, ast.Name)]
    for word in words:
        is_called = id(word) in called
        if not is_called and word.id not in _NUMBERS:
            return word.id
    return ""


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, or ``{Name: {field: value}}`` for a call."""
    if isinstance(node, ast.Name) and node.id in _NUMBERS:
        return float(node.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = node.func.id
        return {name: _arguments(node, name)}
    return ast.literal_eval(node)


def _arguments(call: ast.Call, name: str) -> dict[str, Any]:
    """Return the arguments of a call of a registered class, by field."""
    cls: Any = registered(object).get(name)
    values = map(_literal, call.args)
    stated = dict(zip(_positional_fields(cls), values, strict=False))
    for keyword in call.keywords:
        field = keyword.arg or "**"
        stated[field] = _literal(keyword.value)

    number = len(call.args) + len(call.keywords)
    if cls and len(stated) < number:
        raise ValueError("too many arguments, or one of them twice")
    return stated


def _positional_fields(cls: Any) -> list[str]:
    """Return the fields that a call may set by position; [] for an unknown class."""
    if cls is None:
        return []
    return [field.name for field in fields(cls) if field.init and not field.kw_only]


def to_plain(value: Any) -> Any:
    """Return a value as plain data for files. A regularizer or schedule is ``{Name: fields}``.

    Raises:
        ValueError: if the value holds code.
    """
    if isinstance(value, Regularizer | Schedule):
        cls = type(value)
        if cls not in registered(object).values():
            raise ValueError(
                f"{quote(value)} can't be written to a file: it holds code, or is not registered"
            )
        return {name_of(cls): plain_fields(value)}

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
    """Return a mapping as plain data; as a list of pairs if a key is no text, for JSON."""
    if all(isinstance(key, str) for key in mapping):
        return {key: to_plain(item) for key, item in mapping.items()}
    return [[key, to_plain(item)] for key, item in mapping.items()]


def plain_fields(obj: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, as plain data."""
    return {name: to_plain(value) for name, value in stated_fields(obj).items()}
