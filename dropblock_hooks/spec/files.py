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
Keys: TypeAlias = tuple[str, ...]

MOST_BYTES = 1_000_000
MOST_NODES = 100_000
MOST_LEVELS = 100
_TOO_MANY = f"it has more than {MOST_NODES:,} values; an alias counts as what it stands for"
_TOO_DEEP = f"it is nested too deeply, more than {MOST_LEVELS} levels, or an alias names itself"
_TAG = "tag:yaml.org,2002:"
# libyaml reads 20 times faster, but not every build of PyYAML has it
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Source:
    """Where data came from: its name, and the lines of its keys."""

    def __init__(self, name: str = "", lines: dict[Keys, int] | None = None) -> None:
        self.name = name
        self.lines = lines or {}

    def located(self, path: Keys, message: str) -> str:
        """`message` after the key path, and the line where it is known."""
        known = path
        while known and known not in self.lines:
            known = known[:-1]
        line = f"line {self.lines[known]}: " if known else ""
        keys = shorten(" → ".join(map(label, path)))
        return f"{line}{keys}: {message}" if path else f"{line}{message}"


def _decoded(text: str | bytes) -> str:
    """The text of a file: UTF-8, with or without a byte order mark."""
    data = text.encode() if isinstance(text, str) else text
    if len(data) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES:,} bytes")
    decoded = data.decode("utf-8-sig")
    if not decoded.strip():
        raise ValueError("it is empty")
    return decoded


def read_yaml(text: str | bytes, name: str) -> tuple[Any, Source]:
    """The data as ``yaml.safe_load`` reads it, and the lines of its keys.

    Raises:
        ValueError: for invalid YAML, a key that stands twice, ``<<``, and text over the limits.
    """
    decoded = _decoded(text)
    builder = _Builder()
    try:
        root = yaml.compose(decoded, Loader=_Loader)
        data = None if root is None else builder.build(root, ())
    except yaml.YAMLError as error:
        raise ValueError(_yaml_problem(error, decoded.count("\n") + 1)) from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if data is None:
        raise ValueError("it is empty")
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
        self.lines: dict[Keys, int] = {}
        self._nodes = 0
        self._constructor = SafeConstructor()

    def build(self, node: yaml.Node, path: Keys) -> Any:
        """The data of a node."""
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise ValueError(_TOO_MANY)  # the line of an alias is that of its anchor
        if len(path) > MOST_LEVELS:
            raise ValueError(f"{_line(node)}{_TOO_DEEP}")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            raise ValueError(f"{_line(node)}the tag {label(node.tag)} is not allowed")
        if isinstance(node, yaml.SequenceNode):
            items = [((*path, str(i)), item) for i, item in enumerate(node.value)]
            self.lines.update((below, item.start_mark.line + 1) for below, item in items)
            return [self.build(item, below) for below, item in items]
        return self._mapping(node.value, path)

    def _mapping(self, pairs: Any, path: Keys) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        first: dict[Any, str] = {}
        for key_node, value in pairs:
            line = _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ValueError(f"{line}a key must be text, not a list or a mapping")
            if key_node.tag == f"{_TAG}merge":
                raise ValueError(f"{line}<< is not supported: write the merged keys out")
            key = self._scalar(key_node)
            if key in found:
                where = f"(first in {first[key][:-2]})"
                raise ValueError(f"{line}the key '{label(key_node.value)}' stands twice {where}")
            first[key] = line
            below = (*path, key_node.value)
            self.lines[below] = key_node.start_mark.line + 1
            found[key] = self.build(value, below)
        return found

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            return self._constructor.construct_object(node)
        except (ValueError, LookupError, AttributeError) as error:
            raise ValueError(f"{_line(node)}a value can't be read: {error}") from None


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}: "


def read_json(text: str | bytes, name: str) -> tuple[Any, Source]:
    """The data; the lines of JSON's keys are not known.

    Raises:
        ValueError: for invalid JSON, a key that stands twice, and text over the limits.
    """
    try:
        return json.loads(_decoded(text), object_pairs_hook=_unique), Source(name)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {quote(twice)} stands twice")
    return found
