"""What a protocol fixes: the seeds that are kept apart, and what a search has chosen.

Seeds stand in `seeds.yaml` beside the study files:

    report: [7001, 7002]
    search: [101, 102]

A search that takes a seed of the reports is refused, and a study that takes one of the search.
What was chosen stands where a study file says, and is put in as ``${ARM.name}``:

    none: {lr: 0.1, epochs: 20}
    DropBlock2d: {lr: 0.05, epochs: 40, rate: 0.3}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.grid import fill_numbers
from experiments.yaml_text import read_yaml

_SEEDS = "seeds.yaml"
_KINDS = ("report", "search")


def seed_problems(path: Path, seeds: Sequence[int], *, searching: bool) -> list[str]:
    """What is wrong with the seeds of a study file, or of a search file.

    Args:
        path: of the file; `seeds.yaml` may stand beside it.
        seeds: that it takes.
        searching: whether it is a search.
    """
    kept = path.parent / _SEEDS
    if not kept.is_file():
        return []
    try:
        plain = _read(kept)
    except ValueError as error:
        return [str(error)]
    lists = plain.values() if isinstance(plain, dict) else [None]
    if any(not isinstance(each, list) or any(type(s) is not int for s in each) for each in lists):
        return [f"{kept} must map report and search to lists of whole numbers, got {plain!r}"]
    if strange := [kind for kind in plain if kind not in _KINDS]:
        return [f"{kept}: unknown kind {strange[0]!r}; known: {', '.join(_KINDS)}"]
    other = "report" if searching else "search"
    taken = [seed for seed in seeds if seed in plain.get(other, [])]
    if not taken:
        return []
    rule = "a search can't take them" if searching else "they were searched with"
    return [f"seeds: {taken} stand in {kept} under {other}: {rule}"]


def with_chosen(path: Path, plain: Mapping[str, Any]) -> dict[str, Any]:
    """A study's plain data with what a search chose, ``${ARM.name}``, put in.

    Args:
        path: of the study file; `chosen` is relative to it.
        plain: what it holds.

    Raises:
        ValueError: if `chosen` is not what a search has written.
    """
    name = plain.get("chosen")
    if name is None:
        return dict(plain)
    if not isinstance(name, str):
        raise ValueError(f"chosen must be the path of what a search has written, got {name!r}")
    source = path.parent / name
    arms = _read(source, "chosen: ")
    if not isinstance(arms, dict) or not all(isinstance(one, dict) for one in arms.values()):
        raise ValueError(f"chosen: {source} must map arms to what was drawn for them, got {arms!r}")
    numbers = {f"{arm}.{key}": n for arm, drawn in arms.items() for key, n in drawn.items()}
    odd = [f"{key}: {n!r}" for key, n in numbers.items() if type(n) not in (int, float)]
    if odd:
        raise ValueError(f"chosen: {source}: {odd[0]} is no number")
    parts = {part: plain[part] for part in ("base", "grid", "conditions") if part in plain}
    return {**plain, **fill_numbers(parts, numbers)}


def _read(path: Path, what: str = "") -> Any:
    try:
        return read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{what}{path}: {error}") from error
