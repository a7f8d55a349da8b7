"""Plain data from YAML and JSON text, with the line of each YAML key.

An alias counts as many values as it stands for: nine lines of YAML can mean a billion values.
"""

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import yaml
from yaml.constructor import SafeConstructor

from ..quoting import label, quote, shorten

Reader: TypeAlias = "Callable[[str | bytes, str], tuple[Any, Source]]"
Path: TypeAlias = tuple[str, ...]

MOST_BYTES = 1_000_000
MOST_NODES = 100_000
MOST_LEVELS = 100
_TOO_MANY = f"it has more than {MOST_NODES:,} values; an alias counts as what it stands for"
_TOO_DEEP = f"it is nested too deeply, more than {MOST_LEVELS} levels, or an alias names itself"
_TAG = "tag:yaml.org,2002:"
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
    builder = _Builder()
    try:
        root = yaml.compose(text, Loader=_Loader)
        data = None if root is None else builder.build(root, ())
    except yaml.YAMLError as error:
        raise FileError(_yaml_problem(error, text.count("\n") + 1)) from None
    except RecursionError:
        raise FileError(_TOO_DEEP) from None
    if data is None:
        raise FileError("it is empty")
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
    """Builds plain data from YAML nodes, counting them, and notes the lines of the keys."""

    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self._nodes = 0
        self._constructor = SafeConstructor()

    def build(self, node: yaml.Node, path: Path) -> Any:
        """The data of a node."""
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise FileError(_TOO_MANY)  # the line of an alias is that of its anchor
        if len(path) > MOST_LEVELS:
            raise FileError(f"{_line(node)}{_TOO_DEEP}")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            raise FileError(f"{_line(node)}the tag {label(node.tag)} is not allowed")
        if isinstance(node, yaml.SequenceNode):
            items = [((*path, str(i)), item) for i, item in enumerate(node.value)]
            self.lines.update((below, item.start_mark.line + 1) for below, item in items)
            return [self.build(item, below) for below, item in items]
        return self._mapping(node.value, path)

    def _mapping(self, pairs: Any, path: Path) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        first: dict[Any, str] = {}
        for key_node, value in pairs:
            line = _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise FileError(f"{line}a key must be text, not a list or a mapping")
            if key_node.tag == f"{_TAG}merge":
                raise FileError(f"{line}<< is not supported: write the merged keys out")
            key = self._scalar(key_node)
            if key in found:
                where = f"(first in {first[key][:-2]})"
                raise FileError(f"{line}the key '{label(key_node.value)}' stands twice {where}")
            first[key] = line
            below = (*path, key_node.value)
            self.lines[below] = key_node.start_mark.line + 1
            found[key] = self.build(value, below)
        return found

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            value = self._constructor.construct_object(node)
            if isinstance(value, int):
                str(value)  # a ValueError for thousands of digits, which no message could show
        except (ValueError, LookupError, AttributeError) as error:
            raise FileError(f"{_line(node)}a value can't be read: {error}") from None
        return value


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}: "


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
