"""Plain data from YAML and JSON text, with the line of each key, and duplicate keys refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import yaml

Reader: TypeAlias = "Callable[[str, str], tuple[Any, Source]]"


class FileError(ValueError):
    """Text that is not the YAML or JSON that was asked for."""


class Source:
    """Where data came from: its name, and the lines of its keys."""

    def __init__(self, name: str = "", lines: dict[tuple[str, ...], int] | None = None) -> None:
        self.name = name
        self.lines = lines or {}

    def located(self, path: tuple[str, ...], message: str) -> str:
        """`message` after the key path, and the line where it is known."""
        known = path
        while known and known not in self.lines:
            known = known[:-1]
        line = f"line {self.lines[known]}: " if known else ""
        return f"{line}{' → '.join(path)}: {message}" if path else f"{line}{message}"


def read_yaml(text: str, name: str) -> tuple[Any, Source]:
    """The data, by ``yaml.safe_load``, and its lines."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[tuple[str, ...], int] = {}
        _walk(root, (), lines, set())
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "it is not YAML"
        where = f"line {mark.line + 1}: " if mark else ""
        hint = " (a selector that begins with * needs quotes)" if "alias" in str(error) else ""
        raise FileError(f"{where}{problem}{hint}") from error
    except RecursionError:
        raise FileError("it is nested too deeply") from None
    except FileError:
        raise
    except Exception as error:  # what int(), date() and their like raise on a scalar, as they are
        raise FileError(f"a value can't be read: {error}") from error
    if data is None:
        raise FileError("it is empty")
    return data, Source(name, lines)


def _walk(
    node: yaml.Node | None,
    path: tuple[str, ...],
    lines: dict[tuple[str, ...], int],
    seen: set[int],
) -> None:
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        children = [(str(i), item, item) for i, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value]
    else:
        return
    keys: dict[str, int] = {}
    for key, key_node, value in children:
        line = key_node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode) and key != "<<":
            value_of_key = _value(key_node)
            if value_of_key in keys:
                problem = f"the key {key!r} stands twice (first in line {keys[value_of_key]})"
                raise FileError(f"line {line}: {problem}")
            keys[value_of_key] = line
        lines[(*path, key)] = line
        _walk(value, (*path, key), lines, seen)


def _value(key: yaml.Node) -> str:
    """A key as it will be compared: numbers by value."""
    if key.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
        return repr(float(yaml.safe_load(key.value)))
    return f"{key.tag} {key.value}"


def read_json(text: str, name: str) -> tuple[Any, Source]:
    """The data; JSON's reader knows no lines."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise FileError(f"the key {key!r} stands twice")
            found[key] = value
        return found

    if not text.strip():
        raise FileError("it is empty")
    try:
        return json.loads(text, object_pairs_hook=unique), Source(name)
    except json.JSONDecodeError as error:
        raise FileError(f"line {error.lineno}: {error.msg}") from error
    except FileError:
        raise
    except ValueError as error:  # an integer of too many digits
        raise FileError(f"a value can't be read: {error}") from error
    except RecursionError:
        raise FileError("it is nested too deeply") from None
