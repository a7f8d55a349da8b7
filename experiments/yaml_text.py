"""YAML of studies and protocols: as PyYAML reads it, but a mapping may not repeat a key."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[Any, int] = {}
        for key, _ in node.value:
            line, name = key.start_mark.line + 1, (key.tag, str(key.value))
            if name in first:
                problem = f"the key {key.value!r} stands twice (first in line {first[name]})"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            first[name] = line
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    r"""The plain data of a text.

    Example:
        >>> read_yaml("a: 1\na: 2")
        Traceback (most recent call last):
        ValueError: line 2: the key 'a' stands twice (first in line 1)

    Raises:
        ValueError: if it is not YAML, is empty, or repeats a key.
    """
    try:
        data = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise ValueError(f"{f'line {mark.line + 1}: ' if mark else ''}{error.problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if data is None:
        raise ValueError("it is empty")
    return data
