"""Plain data from YAML and JSON text, with the line of each YAML key.

Text that is too large is refused while it is read. An alias counts as many values as it stands for:
nine lines of YAML can mean a billion values.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from ..quoting import label, quote, shorten

Reader: TypeAlias = "Callable[[str | bytes, str], tuple[Any, Source]]"
Path: TypeAlias = tuple[str, ...]

MOST_BYTES = 1_000_000
MOST_NODES = 100_000
MOST_LEVELS = 100
_TOO_MANY = f"it has more than {MOST_NODES:,} values; an alias counts as what it stands for"
_TOO_DEEP = f"it is nested too deeply, more than {MOST_LEVELS} levels"
_NULL, _MERGE = "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge"
_COLLECTIONS = (None, "!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
# libyaml reads 20 times faster, but not every build of PyYAML has it
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class FileError(ValueError):
    """Text that is not valid YAML or JSON, or exceeds a limit."""


class Source:
    """Where data came from: its name, and the lines of its keys."""

    def __init__(self, name: str = "", lines: dict[Path, int] | None = None) -> None:
        self.name = name
        self.lines = lines or {}

    def located(self, path: Path, message: str) -> str:
        """`message` after the key path, and the line where it is known."""
        known = path
        while known and known not in self.lines:
            known = known[:-1]
        line = f"line {self.lines[known]}: " if known else ""
        keys = shorten(" → ".join(map(label, path)))
        return f"{line}{keys}: {message}" if path else f"{line}{message}"


def _decoded(text: str | bytes) -> str:
    """The text of a file: UTF-8, with or without a byte order mark."""
    if not isinstance(text, str | bytes):
        raise FileError(f"it must be text, got {quote(text, 100)}")
    try:
        data = text.encode() if isinstance(text, str) else text
        if len(data) > MOST_BYTES:
            raise FileError(f"it is larger than {MOST_BYTES:,} bytes")
        return data.decode("utf-8-sig")
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        raise FileError(f"it is not UTF-8: {error.reason} at {error.start}") from None


def read_yaml(text: str | bytes, name: str) -> tuple[Any, Source]:
    """The data as ``yaml.safe_load`` reads it, and the lines of its keys.

    Raises:
        FileError: for invalid YAML, a key that stands twice, ``<<``, and text over the limits.
    """
    text = _decoded(text)
    builder = _Builder(yaml.parse(text, Loader=_Loader))
    try:
        data = builder.document()
    except yaml.YAMLError as error:
        raise FileError(_yaml_problem(error, text.count("\n") + 1)) from None
    return data, Source(name, builder.lines)


def _yaml_problem(error: yaml.YAMLError, last: int) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None)
    if "maximum nesting" in str(problem):  # libyaml has a limit of its own
        problem = _TOO_DEEP
    where = f"line {min(mark.line + 1, last)}: " if mark else ""
    hint = " (a selector that begins with * needs quotes)" if "alias" in str(error) else ""
    return f"{where}{label(str(problem or 'it is not YAML'), 200)}{hint}"


class _Builder:
    """Builds plain data from YAML events, and counts the values while it reads them."""

    def __init__(self, events: Iterator[Any]) -> None:
        self.lines: dict[Path, int] = {}
        self._events = events
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._constructor = SafeConstructor()
        self._resolve: Any = Resolver().resolve
        self._nodes = 0

    def document(self) -> Any:
        """The only document of the text."""
        next(self._events)  # the start of the stream
        if isinstance(next(self._events), yaml.StreamEndEvent):
            raise FileError("it is empty")
        data = self._value(next(self._events), ())
        next(self._events)  # the end of the document
        if isinstance(event := next(self._events), yaml.DocumentStartEvent):
            raise FileError(f"{_line(event)}a second document begins; a spec is one document")
        if data is None:
            raise FileError("it is empty")
        return data

    def _value(self, event: Any, path: Path) -> Any:
        if len(path) >= MOST_LEVELS and isinstance(event, yaml.CollectionStartEvent):
            raise FileError(f"{_line(event)}{_TOO_DEEP}")
        before = self._nodes
        self._count(1, event)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                problem = f"the alias *{event.anchor} has no anchor before it"
                raise FileError(f"{_line(event)}{problem} (text that begins with * needs quotes)")
            value, size = self._anchors[event.anchor]
            self._count(size - 1, event)
        elif isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)[1]
        elif event.tag not in _COLLECTIONS:
            raise FileError(f"{_line(event)}the tag {label(event.tag)} is not allowed")
        else:
            is_list = isinstance(event, yaml.SequenceStartEvent)
            value = self._list(path) if is_list else self._mapping(path)
        if event.anchor is not None:
            self._anchors[event.anchor] = value, self._nodes - before
        return value

    def _count(self, n: int, event: Any) -> None:
        self._nodes += n
        if self._nodes > MOST_NODES:
            raise FileError(f"{_line(event)}{_TOO_MANY}")

    def _list(self, path: Path) -> list[Any]:
        found: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            below = (*path, str(len(found)))
            self.lines[below] = event.start_mark.line + 1
            found.append(self._value(event, below))
        return found

    def _mapping(self, path: Path) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        first: dict[Any, int] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            line = event.start_mark.line + 1
            if not isinstance(event, yaml.ScalarEvent):
                raise FileError(f"line {line}: a key must be text, not an alias or a collection")
            tag, key = self._scalar(event)
            if tag == _MERGE:
                raise FileError(f"line {line}: << is not supported: write the merged keys out")
            if key in found:
                name = label(event.value)
                problem = f"the key '{name}' stands twice (first in line {first[key]})"
                raise FileError(f"line {line}: {problem}")
            first[key] = self.lines[(*path, event.value)] = line
            found[key] = self._value(next(self._events), (*path, event.value))
        return found

    def _scalar(self, event: Any) -> tuple[str, Any]:
        """The tag and the value of a scalar."""
        tag = event.tag
        if tag is None or tag == "!":
            tag = self._resolve(yaml.ScalarNode, event.value, event.implicit)
        node = yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark)
        if tag == _MERGE:
            return tag, None
        try:
            value = self._constructor.construct_object(node)
            if isinstance(value, int):
                str(value)  # raises ValueError for thousands of digits, which no message can show
        except (ValueError, LookupError, AttributeError) as error:
            raise FileError(f"{_line(event)}a value can't be read: {error}") from None
        return tag, value


def _line(event: Any) -> str:
    return f"line {event.start_mark.line + 1}: "


def read_json(text: str | bytes, name: str) -> tuple[Any, Source]:
    """The data; the lines of JSON's keys are not known.

    Raises:
        FileError: for invalid JSON, a key that stands twice, and text over the limits.
    """
    text = _decoded(text)
    if not text.strip():
        raise FileError("it is empty")
    try:
        return json.loads(text, object_pairs_hook=_unique), Source(name)
    except json.JSONDecodeError as error:
        raise FileError(f"line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise FileError(_TOO_DEEP) from None
    except FileError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise FileError(f"a value can't be read: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise FileError(f"the key {quote(key)} stands twice")
        found[key] = value
    return found
