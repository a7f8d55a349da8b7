"""A grid of factors: every combination of their levels is a condition.

    factors:
      placement: {stage 2: layer2.0, all: "layer[234].0"}
      rate: [0.1, 0.3]
    fields:
      spec: {"${placement}": {DropBlock2d: {p: "${rate}", block_size: 3}}}

gives the conditions "stage 2, 0.1", "stage 2, 0.3", "all, 0.1" and "all, 0.3". A level that is a
mapping can set several fields, and take other factors' levels:

    factors:
      arm: {none: {lr: 0.1, spec: null}, Dropout: {lr: 0.2, spec: {layer4.0: Dropout(0.5)}}}
      epochs: [10, 20]
    fields: {lr: "${arm.lr}", spec: "${arm.spec}", epochs: "${epochs}"}
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.field_checks import closest

_PLACEHOLDER = re.compile(r"\$\{([^{}]*)\}")
_LEVEL = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Cell:
    """One combination: its name, factor -> level's name, and the fields of Config."""

    name: str
    factors: dict[str, str]
    fields: dict[str, Any]


def expand(grid: object) -> tuple[list[Cell], list[str]]:
    """The cells of a grid, and what is wrong with it.

    Example:
        >>> grid = {"factors": {"rate": [0.1, 0.3]}, "fields": {"lr": "${rate}"}}
        >>> [(cell.name, cell.fields) for cell in expand(grid)[0]]
        [('0.1', {'lr': 0.1}), ('0.3', {'lr': 0.3})]
    """
    if not isinstance(grid, dict):
        return [], [f"grid must have factors and fields, got {grid!r}"]
    problems = unknown(grid, ["factors", "fields"], "grid: field")
    factors, fields = grid.get("factors"), grid.get("fields")
    if not isinstance(fields, dict) or not fields:
        problems.append(f"grid.fields must map fields of Config to values, got {fields!r}")
    if not isinstance(factors, dict) or not factors:
        problems.append(f"grid.factors must name at least one factor, got {factors!r}")
    if problems:
        return [], problems
    levels = {name: _levels(name, values, problems) for name, values in factors.items()}
    problems += _placeholder_problems(fields, levels)
    if problems:
        return [], problems
    cells = []
    for names in itertools.product(*levels.values()):
        chosen = dict(zip(factors, names, strict=True))
        values = {factor: levels[factor][name] for factor, name in chosen.items()}
        name = ", ".join(names)
        try:
            cells.append(Cell(name, chosen, fill(fields, _in_each_other(values))))
        except ValueError as error:
            problems.append(f"grid: {name}: {error}")
    twice = _repeated(cell.name for cell in cells)
    return cells, problems + [f"grid: two conditions are named {name!r}" for name in twice]


def _in_each_other(levels: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen levels, and the parts of those that are mappings: ``factor.part`` -> value.

    Levels that are no mappings are put into those that are.
    """
    whole = {name: level for name, level in levels.items() if not isinstance(level, dict)}
    filled = {name: fill(level, whole) for name, level in levels.items() if name not in whole}
    parts = {f"{name}.{part}": v for name, level in filled.items() for part, v in level.items()}
    return {**parts, **whole, **filled}


def _levels(factor: object, values: object, problems: list[str]) -> dict[str, Any]:
    where = f"grid.factors.{factor}"
    problems += name_problems(factor, "grid.factors: a name")
    odd = [value for value in _leaves(values) if not isinstance(value, _LEVEL)]
    if odd:
        problems.append(
            f"{where}: levels must be text, numbers, true/false or null, got {odd[0]!r}; quote it"
        )
        return {}
    if isinstance(values, list):
        for value in values:
            if isinstance(value, dict | list):
                problems.append(f"{where}: {value!r} needs a name: write name: value")
        names = [value if isinstance(value, str) else json.dumps(value) for value in values]
        values = dict(zip(names, values, strict=True)) or values
        problems += [f"{where}: the level {name} stands twice" for name in _repeated(names)]
    if not isinstance(values, dict) or not values:
        problems.append(f"{where} must have at least one level, got {values!r}")
        return {}
    for name in values:
        problems += name_problems(name, f"{where}: the name of a level")
    return values


def _leaves(data: object) -> Iterator[object]:
    """All values in plain data that are no list and no mapping."""
    if isinstance(data, dict | list):
        for value in data.values() if isinstance(data, dict) else data:
            yield from _leaves(value)
    else:
        yield data


def name_problems(name: object, what: str) -> list[str]:
    """What is wrong with a name: it stands in lines of tables.

    Example:
        >>> name_problems(" ", "a name")
        ["a name must be a line of text, not blank, got ' '"]
    """
    if not isinstance(name, str):
        return [f"{what} must be text, got {name!r}; quote it"]
    if not name.strip() or name.splitlines() != [name]:
        return [f"{what} must be a line of text, not blank, got {name!r}"]
    return []


def _placeholder_problems(
    fields: Mapping[str, Any], levels: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """What is wrong with the placeholders of the fields, and of levels that are mappings."""
    parts = {
        f"{factor}.{part}"
        for factor, values in levels.items()
        for part in _shared_parts(list(values.values()))
    }
    problems, used = _unclosed_or_unknown(fields, "grid.fields", [*levels, *sorted(parts)])
    used = {name if name in levels else name.partition(".")[0] for name in used}
    plain = [name for name, values in levels.items() if not any(map(_is_mapping, values.values()))]
    for factor, values in levels.items():
        for name, level in values.items():
            where = f"grid.factors.{factor}.{name}"
            found = _unclosed_or_unknown(level, where, plain) if _is_mapping(level) else ([], ())
            problems += found[0]
            used.update(found[1])
    idle = [name for name in levels if name not in used]
    return problems + [
        f"grid.factors: {name!r} stands nowhere in grid.fields: ${{{name}}}" for name in idle
    ]


def _unclosed_or_unknown(data: object, where: str, known: list[str]) -> tuple[list[str], set[str]]:
    """Problems of the placeholders in plain data, and the names in them."""
    problems, used = [], set()
    for text in texts(data):
        names = _PLACEHOLDER.findall(text)
        used.update(names)
        if "${" in _PLACEHOLDER.sub("", text):
            problems.append(f"{where}: the placeholder in {text!r} is not closed: ${{factor}}")
        problems += unknown(names, known, f"{where}: {text!r}: factor")
    return problems, used


def _shared_parts(levels: list[Any]) -> set[str]:
    """The names that all levels of a factor have, where they are mappings."""
    if not levels or not all(map(_is_mapping, levels)):
        return set()
    return set.intersection(*({str(name) for name in level} for level in levels))


def _is_mapping(level: object) -> bool:
    return isinstance(level, dict)


def texts(data: object) -> Iterator[str]:
    """All strings in plain data, also those that are keys."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from texts(key)
            yield from texts(value)
    elif isinstance(data, list):
        for value in data:
            yield from texts(value)


def fill(data: Any, values: Mapping[str, Any]) -> Any:
    """Plain data with the placeholders replaced; a string that is one becomes the value itself.

    Example:
        >>> fill({"layer${n}": ["${p}", "p=${p}"]}, {"n": 3, "p": 0.5})
        {'layer3': [0.5, 'p=0.5']}

    Raises:
        ValueError: if two keys become the same, a list or mapping stands inside a text, or is to
            be a key.
    """

    def value(match: re.Match[str]) -> str:
        found = values[match[1]]
        if isinstance(found, dict | list):
            raise ValueError(f"{found!r} can't stand within the text {match.string!r}")
        return found if isinstance(found, str) else json.dumps(found)

    def change(text: str) -> Any:
        whole = _PLACEHOLDER.fullmatch(text)
        return values[whole[1]] if whole else _PLACEHOLDER.sub(value, text)

    return _map_texts(data, change)


def fill_numbers(data: Any, numbers: Mapping[str, float]) -> Any:
    """Plain data with ``${name}``, ``${name * number}`` and ``${name / number}`` worked out.

    A number that is whole stays whole: the nearest one. Other placeholders are left.

    Example:
        >>> fill_numbers({"stop": "${epochs}", "half": "${epochs / 2}"}, {"epochs": 40})
        {'stop': 40, 'half': 20}
    """

    def value(match: re.Match[str]) -> float:
        number = numbers[match["name"]]
        factor = float(match["factor"] or 1)
        result = number / factor if match["sign"] == "/" else number * factor
        return round(result) if isinstance(number, int) else result

    names = "|".join(map(re.escape, numbers))
    pattern = re.compile(
        rf"\$\{{\s*(?P<name>{names})\s*(?:(?P<sign>[*/])\s*(?P<factor>\d*\.?\d+)\s*)?\}}"
    )

    def change(text: str) -> Any:
        whole = pattern.fullmatch(text)
        return value(whole) if whole else pattern.sub(lambda m: json.dumps(value(m)), text)

    return _map_texts(data, change)


def _map_texts(data: Any, change: Callable[[str], Any]) -> Any:
    """Plain data with each string changed, also those that are keys."""
    if isinstance(data, str):
        return change(data)
    if isinstance(data, list):
        return [_map_texts(value, change) for value in data]
    if not isinstance(data, dict):
        return data
    keys = [_map_texts(key, change) for key in data]
    odd = [key for key in keys if isinstance(key, dict | list)]
    if odd:
        raise ValueError(f"{odd[0]!r} can't be a key, in {list(data)}")
    if len(set(keys)) < len(keys):
        raise ValueError(f"keys of {list(data)} become the same: {list(dict.fromkeys(keys))}")
    values = (_map_texts(value, change) for value in data.values())
    return dict(zip(keys, values, strict=True))


def unknown(names: Iterable[object], known: list[str], what: str) -> list[str]:
    """A problem for each name that is not known, with the closest one that is."""
    return [
        f"{what} {name!r} is unknown{closest(str(name), known) or '; known: ' + ', '.join(known)}"
        for name in names
        if name not in known
    ]


def _repeated(names: Iterable[str]) -> list[str]:
    names = list(names)
    return sorted({name for name in names if names.count(name) > 1})
