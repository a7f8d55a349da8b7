"""What a study's file may hold: all that is wrong with its parts, before anything is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from experiments.config import Config
from experiments.grid import name_problems, texts, unknown

_FIELDS = ["question", "chosen", "base", "grid", "conditions", "baseline", "contrasts", "seeds"]


def shape_problems(data: object, filled: bool) -> list[str]:
    """What is wrong with a file's parts, whose numbers of the base are put in, if `filled`."""
    if not isinstance(data, dict):
        return [f"it must be a mapping of conditions, baseline and seeds, got {data!r}"]
    problems = unknown(data, _FIELDS, "field")
    if not isinstance(data.get("question", ""), str):
        problems.append(f"question must be text, got {data['question']!r}")
    problems += overrides_problems(data.get("base"), "base")
    conditions = data.get("conditions")
    if not isinstance(conditions, dict | None) or not (conditions or "grid" in data):
        problems.append(f"conditions must name at least one, got {conditions!r}; or have a grid")
        conditions = None
    for name, overrides in (conditions or {}).items():
        problems += name_problems(name, "conditions: a name")
        problems += overrides_problems(overrides, f"conditions.{name}", placeholders=not filled)
    if isinstance(data.get("grid"), dict):
        problems += overrides_problems(data["grid"].get("fields"), "grid.fields")
    if data.get("baseline") is None:
        problems.append("baseline must name the condition that the others are compared to")
    return problems + _seeds_problems(data.get("seeds"))


def overrides_problems(overrides: object, where: str, placeholders: bool = False) -> list[str]:
    """What is wrong with fields of Config; `placeholders` may be left in grid.fields, or if so."""
    if overrides is None:
        return []
    if not isinstance(overrides, dict):
        return [f"{where} must map fields of Config to values, got {overrides!r}"]
    if "seed" in overrides:
        return [f"{where}: seed does not belong here: all conditions share those of `seeds`"]
    problems = unknown(overrides, [field.name for field in fields(Config)], f"{where}: field")
    if where != "grid.fields" and not placeholders:
        strays = [text for text in texts(overrides) if "${" in text]
        problems += [f"{where}: {text!r}: placeholders stand in grid.fields" for text in strays]
    return problems


def data_problems(plain: Mapping[str, Any], data: str | None) -> list[str]:
    """A problem for each part whose own data --data would not replace."""
    parts = {f"conditions.{name}": part for name, part in (plain.get("conditions") or {}).items()}
    if isinstance(plain.get("grid"), dict):
        parts["grid.fields"] = plain["grid"].get("fields")
    return [
        f"{where}: data is set here, where --data {data} can't replace it"
        for where, part in parts.items()
        if data is not None and part and "data" in part
    ]


def is_recursive(data: object) -> bool:
    """Whether an alias stands within what it names, or data are too deep."""
    try:
        list(texts(data))
    except RecursionError:
        return True
    return False


def _seeds_problems(seeds: object) -> list[str]:
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds):
        return [f"seeds must be a list of whole numbers, at least one, got {seeds!r}"]
    twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    return [f"seeds must differ, got {twice} more than once"] if twice else []
