"""Makes regularizers, schedules and selectors from the plain data of files, and the other way.

A `Draft` reads a spec with these functions, and `Spec.to_plain` writes one.

A regularizer or schedule is ``{Name: {field: value}}``, ``Name``, or the text of its repr,
``"DropBlock2d(p=0.1, block_size=3)"``. The text is parsed and never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

from ..checks import PROBABILITY, closest, own_name
from ..quoting import listed, quote, shown
from ..registry import is_number, name_of, registered, stated_fields
from ..regularizers.base import Regularizer, hints_of
from ..regularizers.foreign import Foreign
from ..schedules import Schedule
from .files import Keys

_USUAL = ("Dropout", "DropBlock2d", "LinearSchedule")  # examples for arguments without a class
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
    # a class or a schedule is callable, too, but it is a mistake, which `_built` reports
    is_mistake = isinstance(value, type | Schedule)
    if callable(value) and not is_mistake:
        return Foreign(value)
    return _built(Regularizer, value, path)


def _built(base: type[Any], value: Any, path: Keys) -> Any:
    """Make an object of a registered class, from ``{Name: fields}`` or the text of a call."""
    kind = base.__name__.lower()
    meant = with_name_first(value, base)
    if meant:
        raise PlainError((path, f"the name of the class comes first: write {meant}"))

    missing = without_name(value, base)
    if missing:
        raise PlainError((path, f"the name of the class is missing: write {missing}"))

    stated: Any
    if isinstance(value, str):
        name, stated = _parsed(value, path)
    elif isinstance(value, Mapping) and len(value) == 1:
        ((name, stated),) = value.items()
        path = (*path, str(name))
    else:
        expected = f"expected a {kind} object or {{Name: {{field: value}}}}"
        raise PlainError((path, f"{expected}, got {shown(value)}{_meant_object(value)}"))

    known = registered(base)
    if name not in known:
        hint = _known_names(name, known)
        raise PlainError((path, f"unknown {kind} {quote(name)}{hint}"))
    if stated is None:
        stated = {}
    if not isinstance(stated, Mapping):
        raise PlainError((path, f"write {{{name}: {{field: value}}}}, got {shown(stated)}"))
    return construct(known[name], stated, path)


def _meant_object(value: Any) -> str:
    """Return what to write in place of a class, a number or a schedule."""
    if isinstance(value, type):
        return f": write {value.__name__}(...)"
    if isinstance(value, Schedule) or (is_number(value) and value in PROBABILITY):
        return f": write the class of the rate, such as Dropout(p={quote(value)})"
    return ": write a class with its arguments, such as Dropout(p=0.1)"


def _known_names(name: Any, known: Iterable[str]) -> str:
    """Return the names that resemble an unknown name, or else what to do and some names."""
    _, _, last_word = str(name).rpartition(".")
    if last_word in known:
        return f" (write {last_word})"
    near = closest(str(name), known)
    if near:
        return near
    names = listed(known, 5)
    return f": import the module of a class of your own first, which registers it (known: {names})"


def with_name_first(value: Any, base: type[Any] = Regularizer) -> str:
    """Return what to write for ``{type: Name, field: value}``; "" if this is not the mistake."""
    known = registered(base)
    if not isinstance(value, Mapping) or any(key in known for key in value):
        return ""

    for key, name in value.items():
        if isinstance(name, str) and name in known:
            stated = {field: item for field, item in value.items() if field != key}
            return quote({name: stated})
    return ""


def without_name(value: Any, base: type[Any] = Regularizer) -> str:
    """Return what to write for ``{field: value}``; "" if the class is not what is missing."""
    known = registered(base)
    if not isinstance(value, Mapping) or not value or any(key in known for key in value):
        return ""

    usual = [name for name in _USUAL if name in known]
    for name in (*usual, *known):
        if value.keys() <= _arguments_of(known[name]):
            arguments = ", ".join(f"{field}={quote(item)}" for field, item in value.items())
            return f"{name}({arguments})"
    return ""


def _arguments_of(cls: Any) -> set[str]:
    """Return the names of the arguments of a registered class."""
    return {field.name for field in fields(cls) if field.init}


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
            meant = own_name(str(key), names)
            near = f" (closest: {meant})" if meant else closest(str(key), names)
            hint = near or f" (fields: {known})"
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
        # the class misses an argument whose value is already one of the faults
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
        short_call = _without_module(text)
        word = _without_quotes(text)
        if short_call:
            problem += f"; write {short_call}"
        elif word:
            problem += f"; inside it, the word {word} needs quotes of its own, as in {word!r}"
        raise PlainError((path, problem)) from None
    return name, stated


def _nodes_of(text: str) -> list[ast.AST]:
    """Return the parts of an expression, from the outside in; [] if it can't be parsed."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return list(ast.walk(tree))


def _without_module(text: str) -> str:
    """Return what to write for ``module.Name(...)`` of a registered class; "" if there is none."""
    for node in _nodes_of(text):
        function = node.func if isinstance(node, ast.Call) else node
        if isinstance(function, ast.Attribute) and function.attr in registered(object):
            module = f"{ast.unparse(function.value)}."
            short_call = ast.unparse(node).removeprefix(module)
            return f"{short_call}, without {module}"
    return ""


def _without_quotes(text: str) -> str:
    """Find the first word in a call that needs quotes; "" without such a word."""
    nodes = _nodes_of(text)
    names: list[ast.expr] = []  # of functions and modules, which need no quotes
    for node in nodes:
        if isinstance(node, ast.Call):
            names.append(node.func)
        elif isinstance(node, ast.Attribute):
            names.append(node.value)
    for node in nodes:
        if isinstance(node, ast.Name) and node.id not in _NUMBERS and node not in names:
            return node.id
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
        field = keyword.arg or "**"  # for ``**mapping``, which `construct` refuses as a field
        stated[field] = _literal(keyword.value)

    number = len(call.args) + len(call.keywords)
    if cls and len(stated) < number:  # an unknown class is reported later
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
