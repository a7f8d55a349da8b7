"""Plain data from YAML and JSON text, with the line of each key, and duplicate keys refused.

YAML that is too large is refused before anything is built from it. An alias counts as what it
stands for: nine lines of YAML can mean a billion values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import yaml
from yaml.constructor import SafeConstructor

from ..quoting import described, label, quote, shorten

Reader: TypeAlias = "Callable[[str, str], tuple[Any, Source]]"
Key: TypeAlias = tuple[str, ...]

MOST_BYTES = 1_000_000
MOST_NODES = 100_000
MOST_LEVELS = 100
_MOST_DIGITS = 1_000
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MERGE = "tag:yaml.org,2002:merge"
_TOO_MANY = f"it has more than {MOST_NODES:,} values; an alias counts as what it stands for"
_TOO_DEEP = f"it is nested too deeply, more than {MOST_LEVELS} levels"
# libyaml reads 20 times faster; not every build of PyYAML has it
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class FileError(ValueError):
    """Text that is not the YAML or JSON that was asked for."""


class Source:
    """Where data came from: its name, and the lines of its keys."""

    def __init__(self, name: str = "", lines: dict[Key, int] | None = None) -> None:
        self.name = name
        self.lines = lines or {}

    def located(self, path: Key, message: str) -> str:
        """`message` after the key path, and the line where it is known."""
        known = path
        while known and known not in self.lines:
            known = known[:-1]
        line = f"line {self.lines[known]}: " if known else ""
        return f"{line}{keys(path)}: {message}" if path else f"{line}{message}"


def keys(path: Key) -> str:
    """A key path in one line."""
    return shorten(" → ".join(map(label, path)))


def decoded(data: Any) -> str:
    """The text of a file: UTF-8, with or without a byte order mark, and not too large.

    Raises:
        FileError: for other bytes, and for what is no text.
    """
    if isinstance(data, bytes | bytearray):
        _check_bytes(len(data))
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise FileError(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
    if not isinstance(data, str):
        raise FileError(f"it must be text, got {quote(data, 100)}")
    text = str.__str__(data)
    _check_bytes(len(text))
    try:
        _check_bytes(len(text.encode()))
    except UnicodeEncodeError as error:
        raise FileError(f"it is not Unicode: {error.reason} at {error.start}") from None
    return text.removeprefix("\ufeff")


def _check_bytes(n: int) -> None:
    if n > MOST_BYTES:
        raise FileError(f"it is larger than {MOST_BYTES:,} bytes")


def read_yaml(text: str, name: str) -> tuple[Any, Source]:
    """The data, as ``yaml.safe_load`` has it, and its lines."""
    text = decoded(text)
    try:
        _check_events(text)
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                raise FileError("it is empty")
            walk = _Walk()
            walk.visit(root, ())
            data = loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise FileError(_yaml_problem(error, text.count("\n") + 1)) from None
    except FileError:
        raise
    except RecursionError:
        raise FileError(_TOO_DEEP) from None
    except Exception as error:  # what int(), date() and their like raise on a scalar, as they are
        raise FileError(f"a value can't be read: {described(error)}") from error
    if data is None:
        raise FileError("it is empty")
    return data, Source(name, walk.lines)


def _yaml_problem(error: yaml.YAMLError, last: int) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None)
    where = f"line {min(mark.line + 1, last)}: " if mark else ""  # it may be behind the end
    hint = " (a selector that begins with * needs quotes)" if "alias" in str(error) else ""
    return f"{where}{label(str(problem or 'it is not YAML'), 200)}{hint}"


def _check_events(text: str) -> None:
    """Refuse too many or too deep values, as they stand in the text."""
    nodes = level = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.NodeEvent):
            nodes += 1
            if nodes > MOST_NODES:
                raise FileError(_TOO_MANY)
        if isinstance(event, yaml.CollectionStartEvent):
            level += 1
            if level > MOST_LEVELS:
                raise FileError(f"{_line(event)}{_TOO_DEEP}")
        elif isinstance(event, yaml.CollectionEndEvent):
            level -= 1


class _Walk:
    """The lines of all keys, and the checks that need them."""

    def __init__(self) -> None:
        self.lines: dict[Key, int] = {}
        self._sizes: dict[int, int] = {}
        self._open: set[int] = set()

    def visit(self, node: yaml.Node, path: Key) -> int:
        """How many values are here and below; aliases spelled out, as a merge does."""
        if id(node) in self._open:
            raise FileError(Source("", self.lines).located(path, "an alias stands for itself"))
        if id(node) not in self._sizes:
            self._open.add(id(node))
            self._sizes[id(node)] = self._measured(node, path)
            self._open.remove(id(node))
        return self._sizes[id(node)]

    def _measured(self, node: yaml.Node, path: Key) -> int:
        if isinstance(node, yaml.ScalarNode):
            if node.tag in _NUMBERS and len(node.value) > _MOST_DIGITS:
                n = len(node.value)
                raise FileError(f"{_line(node)}a value can't be read: a number of {n} characters")
            return 1
        size = 1
        for key, child in self._children(node, path):
            size += self.visit(child, (*path, key))
            if size > MOST_NODES:
                raise FileError(f"{_line(node)}{_TOO_MANY}")
        return size

    def _children(self, node: yaml.Node, path: Key) -> list[tuple[str, yaml.Node]]:
        """What a collection holds, keys before their values; keys that stand twice are refused."""
        found: list[tuple[str, yaml.Node]] = []
        if isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                self.lines[(*path, str(i))] = item.start_mark.line + 1
                found.append((str(i), item))
            return found
        first: dict[Any, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise FileError(f"line {line}: a key must be text, not a list or a mapping")
            if key.tag != _MERGE:
                same = _value(key)
                if same in first:
                    problem = f"the key '{label(key.value)}' stands twice (first in line "
                    raise FileError(f"line {line}: {problem}{first[same]})")
                first[same] = line
            self.lines[(*path, key.value)] = line
            found += [(key.value, key), (key.value, value)]
        return found


def _line(node: yaml.Node | yaml.Event) -> str:
    mark = node.start_mark
    return f"line {mark.line + 1}: " if mark else ""


def _value(key: yaml.ScalarNode) -> Any:
    """A key as it will be compared: numbers by value."""
    if key.tag not in _NUMBERS or len(key.value) > _MOST_DIGITS:
        return key.tag, key.value
    constructor = SafeConstructor()
    is_int = key.tag == _NUMBERS[0]
    return constructor.construct_yaml_int(key) if is_int else constructor.construct_yaml_float(key)


def read_json(text: str, name: str) -> tuple[Any, Source]:
    """The data; JSON's reader knows no lines."""
    text = decoded(text)
    if not text.strip():
        raise FileError("it is empty")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_int=_integer), Source(name)
    except json.JSONDecodeError as error:
        raise FileError(f"line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise FileError(_TOO_DEEP) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise FileError(f"the key {quote(key)} stands twice")
        found[key] = value
    return found


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise FileError(f"a value can't be read: a number of {len(digits)} characters")
    return int(digits)
