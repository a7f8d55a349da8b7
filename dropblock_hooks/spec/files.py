"""Plain data from YAML and JSON text, with the line of each YAML key.

An alias counts as many values as it stands for: nine lines of YAML can mean a billion values.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import yaml
from yaml.constructor import SafeConstructor

from ..quoting import label, quote

Keys: TypeAlias = tuple[str, ...]
Lines: TypeAlias = dict[Keys, int]

MOST_BYTES = 1_000_000
MOST_NODES = 100_000
MOST_LEVELS = 100
_TOO_DEEP = f"it is nested too deeply, more than {MOST_LEVELS} levels, or an alias names itself"
# libyaml reads 20 times faster, but not every build of PyYAML has it
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str | bytes) -> tuple[Any, Lines]:
    """The data as ``yaml.safe_load`` reads it, and the lines of its keys.

    Invalid YAML, a duplicate key, ``<<``, and text over the limits are ValueErrors.
    """
    lines: Lines = {}
    try:
        root = yaml.compose(_decoded(text), Loader=_Loader)
        if root is None:
            raise ValueError("it is empty")
        _note_lines(root, (), lines, itertools.count())
        try:
            return SafeConstructor().construct_document(root), lines
        except (ValueError, LookupError, AttributeError) as error:  # PyYAML raises all of these
            raise ValueError(f"a value can't be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        hint = " (a selector that begins with * needs quotes)" if "alias" in str(error) else ""
        problem = label(str(getattr(error, "problem", None) or error), 200)
        raise ValueError(f"{where}{problem}{hint}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def read_json(text: str | bytes) -> tuple[Any, Lines]:
    """The data; the lines of JSON's keys are not known. It raises the errors of `read_yaml`."""
    try:
        return json.loads(_decoded(text), object_pairs_hook=_unique), {}
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _decoded(text: str | bytes) -> str:
    """The text of a file in UTF-8."""
    if len(text) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES:,} bytes")
    return text if isinstance(text, str) else text.decode("utf-8-sig")


def _note_lines(node: yaml.Node, path: Keys, lines: Lines, count: Iterator[int]) -> None:
    """Note the line of each key below a node; refuse duplicate keys and too many values."""
    if next(count) >= MOST_NODES:
        raise ValueError(
            f"it has more than {MOST_NODES:,} values; an alias counts as the values it stands for"
        )
    if len(path) > MOST_LEVELS:
        raise ValueError(f"line {node.start_mark.line + 1}: {_TOO_DEEP}")
    pairs: Any = ()
    if isinstance(node, yaml.SequenceNode):
        pairs = [(item, str(i), item) for i, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        pairs = [(key, key.value, item) for key, item in node.value]
    for marked, key, item in pairs:
        line = marked.start_mark.line + 1
        if not isinstance(key, str):
            raise ValueError(f"line {line}: a key must be text, not a list or a mapping")
        if marked.tag == "tag:yaml.org,2002:merge":
            raise ValueError(f"line {line}: << is not supported: write the merged keys out")
        below = (*path, key)
        if below in lines:
            twice = f"the key {quote(key)} stands twice (first in line {lines[below]})"
            raise ValueError(f"line {line}: {twice}")
        lines[below] = line
        _note_lines(item, below, lines, count)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {quote(key)} stands twice")
        found[key] = value
    return found
