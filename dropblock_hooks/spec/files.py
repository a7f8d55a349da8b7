"""Plain data from YAML and JSON text, with the line of each key, and duplicate keys refused.

YAML that is too large is refused before anything is built from it. An alias counts as what it
stands for: nine lines of YAML can mean a billion values.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import yaml
from yaml.constructor import SafeConstructor

from ..quoting import described, label, quote, shorten

Reader: TypeAlias = "Callable[[str | bytes, str], tuple[Any, Source]]"
Key: TypeAlias = tuple[str, ...]

MOST_BYTES = 1_000_000
MOST_NODES = 100_000
MOST_LEVELS = 100
_MOST_DIGITS = 1_000
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_NULL, _MERGE = "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge"
_VALUES = (*_NUMBERS, _NULL, "tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp")
_CONSTRUCTOR = SafeConstructor()
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
    if not isinstance(data, str | bytes | bytearray):
        raise FileError(f"it must be text, got {quote(data, 100)}")
    try:
        given = data.encode() if isinstance(data, str) else data
        if len(given) > MOST_BYTES:
            raise FileError(f"it is larger than {MOST_BYTES:,} bytes")
        return given.decode("utf-8-sig")
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        raise FileError(f"it is not UTF-8: {error.reason} at {error.start}") from None


def read_yaml(text: str | bytes, name: str) -> tuple[Any, Source]:
    """The data, as ``yaml.safe_load`` has it but for merges and keys that stand twice; lines."""
    text = decoded(text)
    try:
        _check_events(text)
        root = yaml.compose(text, _Loader)
        if root is None or root.tag == _NULL:
            raise FileError("it is empty")
        walk = _Walk()
        walk.visit(root, ())
        return SafeConstructor().construct_document(root), Source(name, walk.lines)
    except yaml.YAMLError as error:
        raise FileError(_yaml_problem(error, text.count("\n") + 1)) from None
    except FileError:
        raise
    except Exception as error:  # what int(), date() and their like raise on a scalar, as they are
        raise FileError(f"a value can't be read: {described(error)}") from error


def _yaml_problem(error: yaml.YAMLError, last: int) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None)
    if "maximum nesting" in str(problem):  # a limit of libyaml's own, met before ours in one line
        problem = _TOO_DEEP
    where = f"line {min(mark.line + 1, last)}: " if mark else ""  # it may be behind the end
    hint = " (a selector that begins with * needs quotes)" if "alias" in str(error) else ""
    return f"{where}{label(str(problem or 'it is not YAML'), 200)}{hint}"


def _check_events(text: str) -> None:
    """Refuse too many or too deep values, as they stand in the text."""
    nodes = level = 0
    for event in yaml.parse(text, Loader=_Loader):
        nodes += isinstance(event, yaml.NodeEvent)
        level += isinstance(event, yaml.CollectionStartEvent)
        level -= isinstance(event, yaml.CollectionEndEvent)
        if nodes > MOST_NODES or level > MOST_LEVELS:
            raise FileError(f"{_line(event)}{_TOO_MANY if nodes > MOST_NODES else _TOO_DEEP}")


class _Walk:
    """The lines of all keys, and the checks that need them."""

    def __init__(self) -> None:
        self.lines: dict[Key, int] = {}
        self._sizes: dict[int, int] = {}

    def visit(self, node: yaml.Node, path: Key) -> int:
        """How many values are here and below, keys apart; aliases spelled out, as a merge does."""
        if id(node) not in self._sizes:
            self._sizes[id(node)] = 0  # until all below is visited
            self._sizes[id(node)] = self._measured(node, path)
        elif not self._sizes[id(node)]:
            raise FileError(Source("", self.lines).located(path, "an alias stands for itself"))
        return self._sizes[id(node)]

    def _measured(self, node: yaml.Node, path: Key) -> int:
        if isinstance(node, yaml.ScalarNode):
            if node.tag in _NUMBERS:
                _digits(node.value, _line(node))
            return 1
        size = 1
        for key, line, child in _children(node):
            self.lines[(*path, key)] = line
            size = _bounded(size + self.visit(child, (*path, key)), node)
        if isinstance(node, yaml.MappingNode):
            size = _bounded(size + _merge(node), node)
        return size


def _children(node: yaml.Node) -> Iterator[tuple[str, int, yaml.Node]]:
    """Key, line and value of what a collection holds; a key that stands twice is refused."""
    if isinstance(node, yaml.SequenceNode):
        yield from ((str(i), at.start_mark.line + 1, at) for i, at in enumerate(node.value))
        return
    first: dict[Any, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise FileError(f"line {line}: a key must be text, not a list or a mapping")
        same = _value(key)
        if same in first:
            problem = f"the key '{label(key.value)}' stands twice (first in line {first[same]})"
            raise FileError(f"line {line}: {problem}")
        first[same] = line
        yield key.value, line, value


def _bounded(size: int, node: yaml.Node) -> int:
    if size > MOST_NODES:
        raise FileError(f"{_line(node)}{_TOO_MANY}")
    return size


def _merge(node: yaml.MappingNode) -> int:
    """Put the keys that ``<<`` names in its place: own keys first, then the earlier mapping's.

    Releases of PyYAML differ in which of several mappings they prefer. Returns how many were
    copied.
    """
    merged = [value for key, value in node.value if key.tag == _MERGE]
    if not merged:
        return 0
    if isinstance(merged[0], yaml.SequenceNode):
        merged = merged[0].value[::-1]
    if not all(isinstance(mapping, yaml.MappingNode) for mapping in merged):
        return 0  # PyYAML says what is wrong
    own = [pair for pair in node.value if pair[0].tag != _MERGE]
    copied = [pair for mapping in merged for pair in mapping.value]
    node.value = list({_value(pair[0]): pair for pair in (*copied, *own)}.values())
    return len(copied)


def _line(node: Any) -> str:
    return f"line {node.start_mark.line + 1}: "


def _value(key: yaml.ScalarNode) -> Any:
    """A key as it will be compared: numbers, dates and the like by value, all merges as one."""
    if key.tag == _MERGE:
        return _MERGE
    if key.tag not in _VALUES:
        return key.tag, key.value
    if key.tag in _NUMBERS:
        _digits(key.value, _line(key))
    return _CONSTRUCTOR.yaml_constructors[key.tag](_CONSTRUCTOR, key)


def _digits(number: str, line: str = "") -> str:
    """A number as it is written, unless that is so long that reading it takes time."""
    if len(number) > _MOST_DIGITS:
        n = len(number)
        raise FileError(f"{line}a value can't be read: a number of {n} characters")
    return number


def read_json(text: str | bytes, name: str) -> tuple[Any, Source]:
    """The data; JSON's reader knows no lines."""
    text = decoded(text)
    if not text.strip():
        raise FileError("it is empty")
    try:
        data = json.loads(
            text, object_pairs_hook=_unique, parse_int=lambda number: int(_digits(number))
        )
        return data, Source(name)
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
