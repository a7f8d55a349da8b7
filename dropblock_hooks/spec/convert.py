"""Regularizers, schedules and selectors as plain data, which YAML and JSON hold; both ways.

A regularizer or schedule is ``{Name: {field: value}}``, ``Name``, or the text of its repr,
``"DropBlock2d(p=0.1, block_size=3)"``, which is parsed and never run.
"""

import ast
import contextlib
import functools
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_args

from torch import nn

from ..checks import as_float, closest
from ..quoting import class_name, message_of, quote, shown
from ..registry import name_of, registered, stated_fields
from ..regularizers.base import Regularizer
from ..regularizers.foreign import Foreign, is_foreign
from ..regularizers.rates import hints_of
from ..schedules import Schedule
from .copying import Path, PlainError, Problems, is_list, key_text

_T = TypeVar("_T", Regularizer, Schedule)
_LONGEST_CALL = 10_000


def regularizer_from(value: Any, path: Path = ()) -> Regularizer:
    """A regularizer from an object of ours or somebody else's, or from plain data."""
    if isinstance(value, Regularizer):
        return value
    if isinstance(value, Schedule):
        raise PlainError(path, f"{quote(value)} is a schedule, not a regularizer")
    if isinstance(value, type):
        name = class_name(value)
        call = f"Foreign({name}, ...)" if issubclass(value, nn.Module) else f"{name}(...)"
        raise PlainError(path, f"got the class {name}: write {call}")
    if is_foreign(value):
        try:
            return Foreign(value)
        except (TypeError, ValueError) as error:
            raise PlainError(path, message_of(error)) from error
    return _build(Regularizer, value, path)


def schedule_from(value: Any, path: Path = ()) -> Schedule:
    """A schedule from plain data, as it stands in a file."""
    return _build(Schedule, value, path)


def _build(base: type[_T], value: Any, path: Path) -> _T:
    """An object of a registered class, from ``{Name: fields}`` or the text of a call."""
    kind = base.__name__.lower()
    if isinstance(value, str):
        name, given = _parse_call(value, path)
    elif isinstance(value, Mapping) and len(value) == 1:
        name, given = next(iter(value.items()))
        path = (*path, key_text(name))
    else:
        raise PlainError(path, f"a {kind} is {{Name: {{field: value}}}}, got {shown(value)}")
    known = registered(base)
    if name not in known:
        raise PlainError(path, _unknown(kind, key_text(name), known))
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        problem = f"the fields of {name} are a mapping, got {shown(given)}"
        raise PlainError(path, problem + _as_fields(known[name], name, given))
    built: _T = construct(known[name], given, path)
    return built


def _as_fields(cls: Any, name: str, value: Any) -> str:
    """How a bare number is written as the first field."""
    names = _positional(cls)
    if not names or isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return f": write {{{name}: {{{names[0]}: {quote(value)}}}}}"


def _positional(cls: Any) -> list[str]:
    return [f.name for f in fields(cls) if f.init and not f.kw_only]


def _unknown(kind: str, name: str, known: Mapping[str, type]) -> str:
    if name == "Foreign":
        return "Foreign holds code, which a file can't: attach it from Python"
    if name in registered(object):  # as the other kind
        actual = "regularizer" if kind == "schedule" else "schedule"
        return f"{name} is a {actual}, not a {kind}"
    hint = closest(name, known) or f" (known: {', '.join(known)})"
    return f"unknown {kind} {quote(name)}{hint}"


def construct(cls: Any, given: Mapping[Any, Any], path: Path) -> Any:
    """An instance of a class from its fields as plain data."""
    names = [f.name for f in fields(cls) if f.init]
    with_schedules = _schedule_fields(cls)
    arguments: dict[Any, Any] = {}
    faults = Problems[PlainError]()
    for key, value in faults.limited(given.items()):
        try:
            if key not in names:
                word = key_text(key)
                hint = closest(word, names) or f" (fields: {', '.join(names)})"
                problem = f"{cls.__name__} has no field {quote(word)}{hint}"
                raise PlainError((*path, word), problem)
            arguments[key] = _field(value, (*path, key), key in with_schedules)
        except PlainError as error:
            faults.append(error)
    try:
        built = cls(**arguments)
    except (TypeError, ValueError) as error:
        message = message_of(error)
        if not faults or "missing" not in message:
            first = message.split(" ", 1)[0]
            where = (*path, first) if first in given else path
            faults.append(PlainError(where, message.removeprefix(f"{cls.__name__}.__init__() ")))
    if faults:
        raise PlainError.of(faults)
    return built


@functools.cache
def _schedule_fields(cls: Any) -> frozenset[str]:
    """The fields that may hold a schedule."""
    return frozenset(name for name, hint in hints_of(cls).items() if _mentions_schedule(hint))


def _mentions_schedule(hint: Any) -> bool:
    return hint is Schedule or any(_mentions_schedule(part) for part in get_args(hint))


def _field(value: Any, path: Path, may_be_schedule: bool) -> Any:
    if may_be_schedule and (
        isinstance(value, Mapping)
        or (isinstance(value, str) and ("(" in value or value in registered(Schedule)))
    ):
        return _build(Schedule, value, path)
    if isinstance(value, Mapping) and value:
        with contextlib.suppress(TypeError, ValueError):  # JSON's keys are text
            return [(as_float(key), item) for key, item in value.items()]
    return tuple(value) if is_list(value) else value


def _parse_call(text: str, path: Path) -> tuple[str, dict[str, Any]]:
    """Name and fields of ``Name(1, field=2)``; the text is only read."""
    if text.isidentifier():
        return text, {}
    try:
        if len(text) > _LONGEST_CALL:
            raise ValueError
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of an unknown escape in quotes
            call = ast.parse(text.strip(), mode="eval").body
        name, given = _call(call)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, Warning):
        hint = "; inside { } it needs quotes" if text.count("(") > text.count(")") else ""
        problem = f"can't read {shown(text)}: expected Name(field=value, ...){hint}"
        raise PlainError(path, problem) from None
    return name, given


def _call(node: ast.AST) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError
    name = node.func.id
    cls = registered(object).get(name)
    names = _positional(cls) if cls else []
    if len(node.args) > len(names) and cls:
        raise ValueError
    given = {names[i] if cls else str(i): _literal(a) for i, a in enumerate(node.args)}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in given:
            raise ValueError
        given[keyword.arg] = _literal(keyword.value)
    return name, given


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        name, given = _call(node)
        return {name: given}
    if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return float(node.id)
    return ast.literal_eval(node)


def to_plain(obj: Any) -> Any:
    """``{Name: fields}`` of a regularizer or schedule.

    Raises:
        ValueError: for what holds code: a function, a `Foreign`, a class that is not registered.
    """
    if type(obj) not in registered(object).values():
        raise ValueError(
            f"{quote(obj)} can't be written to a file: it holds code, or is not registered"
        )
    return {name_of(type(obj)): plain_fields(obj)}


def plain_fields(obj: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, as plain data."""
    return {name: _plain(value, name, obj) for name, value in stated_fields(obj).items()}


def _plain(value: Any, name: str, owner: Any) -> Any:
    if isinstance(value, Schedule):
        return to_plain(value)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(item, name, owner) for key, item in value.items()}
        return [[key, item] for key, item in value.items()]
    if is_list(value):
        return [_plain(item, name, owner) for item in value]
    if isinstance(value, type):
        return value.__name__
    if callable(value):
        raise ValueError(
            f"{name} of {quote(owner)} is a function, which can't be written to a file"
        )
    return value
