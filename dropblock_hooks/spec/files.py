"""Plain data from YAML and JSON text, with the line of each YAML key."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeAlias

import yaml
from yaml.constructor import SafeConstructor

from ..quoting import label, quote

Keys: TypeAlias = tuple[str, ...]
Lines: TypeAlias = dict[Keys, int]

MOST_BYTES = 1_000_000
_MOST_NODES = 100_000
_MOST_LEVELS = 100
_TOO_MANY = f"it has more than {_MOST_NODES:,} values, counted at each use of an anchor"
_TOO_DEEP = f"it is nested too deeply, more than {_MOST_LEVELS} levels, or contains itself"
# libyaml reads 20 times faster, but not every build of PyYAML has it
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str | bytes) -> tuple[Any, Lines]:
    """The data as ``yaml.safe_load`` reads it, and the lines of its keys; or a ValueError."""
    lines: Lines = {}
    decoded = _decoded(text)
    try:
        root = yaml.compose(decoded, Loader=_Loader)
        if root is None:
            return {}, {}
        _note_lines(root, (), lines, itertools.count())
        return SafeConstructor().construct_document(root), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        hint = " (a selector that begins with * needs quotes)" if "alias" in str(error) else ""
        problem = label(str(getattr(error, "problem", None) or error), 300)
        raise ValueError(f"{where}{problem}{hint}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except (ValueError, LookupError, AttributeError) as error:  # PyYAML raises all of these
        raise ValueError(f"a value can't be read: {error}") from None


def read_json(text: str | bytes) -> tuple[Any, Lines]:
    """The data; the lines of JSON's keys are not known. It raises the errors of `read_yaml`."""
    try:
        return json.loads(_decoded(text), object_pairs_hook=_unique), {}
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _decoded(text: str | bytes) -> str:
    if len(text) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES:,} bytes")
    return text if isinstance(text, str) else text.decode("utf-8-sig")


def _note_lines(node: yaml.Node, path: Keys, lines: Lines, count: Iterator[int]) -> None:
    """Note the line of each key below a node; refuse duplicate keys and too many values."""
    over = next(count) >= _MOST_NODES
    if over or len(path) > _MOST_LEVELS:
        problem = _TOO_MANY if over else _TOO_DEEP
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    pairs: Any = ()
    if isinstance(node, yaml.SequenceNode):
        pairs = [(item, str(i), item) for i, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        pairs = [(key, key.value, item) for key, item in node.value]
    for marked, key, item in pairs:
        problem, below = "", (*path, key)
        if not isinstance(key, str):
            problem = "a key must be text, not a list or a mapping"
        elif below in lines:
            problem = f"the key {quote(key)} stands twice (first in line {lines[below]})"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=marked.start_mark)
        lines[below] = marked.start_mark.line + 1
        _note_lines(item, below, lines, count)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    most = Counter(key for key, _ in pairs).most_common(1)
    if most and most[0][1] > 1:
        raise ValueError(f"the key {quote(most[0][0])} stands twice")
    return dict(pairs)
