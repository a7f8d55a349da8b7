"""Reads plain data from YAML and JSON text, with the line of each YAML key.

`Draft.of_text` calls `read_yaml` and `read_json`.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import yaml
from yaml.constructor import SafeConstructor

from ..quoting import label, quote

Keys: TypeAlias = tuple[str, ...]
"""The keys from the root of the data down to a value."""
Lines: TypeAlias = dict[Keys, int]
"""The line of each key, by the keys down to it."""

MOST_BYTES = 1_000_000
_MOST_NODES = 100_000
_MOST_LEVELS = 100
_TOO_MANY = f"it has more than {_MOST_NODES:,} values, counted at each use of an anchor"
_TOO_DEEP = f"it is nested too deeply, more than {_MOST_LEVELS} levels, or contains itself"
_HINTS = {
    "alias": " (a selector that begins with * needs quotes)",
    "mapping values are not allowed": " (a regularizer in a text, such as Dropout(p=0.1), can't "
    "contain a mapping: write its schedule as a text, too, or write {Dropout: {p: ...}})",
}
"""Hints for errors of YAML that contain these words."""
# libyaml reads 20 times faster, but not every build of PyYAML has it
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str | bytes) -> tuple[Any, Lines]:
    """Return the data as ``yaml.safe_load`` reads it, and the lines of its keys.

    An empty text is an empty mapping.

    Raises:
        ValueError: if the text is too large, too deep or no YAML.
    """
    decoded = _decoded(text)
    lines: Lines = {}
    try:
        root = yaml.compose(decoded, Loader=_Loader)  # nodes, because the data has no lines
        if root is None:
            return {}, {}
        _note_lines(root, (), lines, itertools.count())
        return SafeConstructor().construct_document(root), lines
    except yaml.YAMLError as error:
        raise ValueError(_text_of(error)) from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except (ValueError, LookupError, AttributeError) as error:  # PyYAML raises all of these
        raise ValueError(f"a value can't be read: {error}") from None


def read_json(text: str | bytes) -> tuple[Any, Lines]:
    """Return the data, and no lines, because Python's reader of JSON does not give them.

    Raises:
        ValueError: if the text is too large, too deep or no JSON.
    """
    decoded = _decoded(text)
    try:
        data = json.loads(decoded, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    return data, {}


def _decoded(text: str | bytes) -> str:
    """Decode the bytes of a file; ValueError if there are too many."""
    if len(text) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES:,} bytes")
    if isinstance(text, str):
        return text
    return text.decode("utf-8-sig")


def _text_of(error: yaml.YAMLError) -> str:
    """Write the line number, the problem and a hint of a YAML error in one line."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    problem = getattr(error, "problem", None) or error
    hint = next((hint for words, hint in _HINTS.items() if words in str(error)), "")
    return f"{where}{label(str(problem), 300)}{hint}"


class _Child(NamedTuple):
    """A node below another node."""

    marked: yaml.Node  # the node on the line of the key
    key: Any
    node: yaml.Node


def _note_lines(node: yaml.Node, path: Keys, lines: Lines, count: Iterator[int]) -> None:
    """Note the line of each key below a node; refuse duplicate keys and too many values."""
    if next(count) >= _MOST_NODES:
        raise _error_at(node, _TOO_MANY)
    if len(path) > _MOST_LEVELS:
        raise _error_at(node, _TOO_DEEP)

    for marked, key, child in _children(node):
        if not isinstance(key, str):
            raise _error_at(marked, "a key must be text, not a list or a mapping")

        below = (*path, key)
        if below in lines:
            first = lines[below]
            raise _error_at(marked, f"the key {quote(key)} stands twice (first in line {first})")

        lines[below] = marked.start_mark.line + 1
        _note_lines(child, below, lines, count)


def _children(node: yaml.Node) -> list[_Child]:
    """Return the nodes below a list or a mapping; the keys of a list are its indices as text."""
    if isinstance(node, yaml.SequenceNode):
        return [_Child(item, str(i), item) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        return [_Child(key, key.value, item) for key, item in node.value]
    return []


def _error_at(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    """Make an error with the line of a node."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; ValueError if a key stands twice."""
    counts = Counter(key for key, _ in pairs)
    for key, count in counts.most_common(1):  # at most one
        if count > 1:
            raise ValueError(f"the key {quote(key)} stands twice")
    return dict(pairs)
