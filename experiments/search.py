"""A search: what each arm of a comparison takes, chosen on validation images alone.

A search file is YAML:

    question: Which learning rate, decay, length and rate does each arm take?
    base: {data: canvas, validation: 0.25}     # fields of Config that all arms share
    space:                                     # what is drawn for every arm, the same for all
      lr: [0.05, 0.1, 0.2]
      epochs: [10, 20, 40]
    arms:                                      # name -> what it draws besides, and its fields
      none: {}
      DropBlock2d:
        space: {rate: [0.1, 0.3]}
        fields: {spec: {layer4.0: {DropBlock2d: {p: "${rate}"}}}}
    draws: 12                                  # of each arm: the same budget for all
    seeds: [101, 102]                          # each draw is trained with each

Every draw of every arm is a condition of a `Study`, so it is run, resumed and shared as studies
are. Its test images are not looked at. The draw whose validation accuracy after the last epoch is
best, as the mean over the seeds, is the arm's.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from scipy.stats import qmc

from experiments.config import Config, Runtime
from experiments.grid import fill_numbers, name_problems, texts, unknown
from experiments.protocol import seed_problems
from experiments.running.records import Run
from experiments.seeds import derive_seed
from experiments.study import Study, StudyError, make_study, read_plain

_FIELDS = ["question", "base", "space", "arms", "draws", "seeds"]
Drawn = dict[str, float]


@dataclass(frozen=True)
class Search:
    """A study of draws.

    Args:
        study: whose conditions are the draws.
        draws: condition -> its arm, and the numbers drawn.
    """

    study: Study
    draws: dict[str, tuple[str, Drawn]]


@dataclass(frozen=True)
class Tried:
    """What came of one draw.

    Args:
        arm: whose it is.
        condition: its name in the study.
        drawn: name -> number.
        validation: seed -> validation accuracy after the last epoch; of a run that diverged 0.
    """

    arm: str
    condition: str
    drawn: Drawn
    validation: dict[int, float]

    @property
    def mean(self) -> float:
        """Of the validation accuracies."""
        return statistics.fmean(self.validation.values())


def read_search(path: str | Path, runtime: Runtime | None = None) -> Search:
    """Read and check a search file; each draw's spec is tried on its model.

    Raises:
        StudyError: listing all that is wrong.
        OSError: if the file cannot be read.
    """
    plain = read_plain(path)
    problems = _problems(plain)
    if not problems:
        problems = seed_problems(Path(path), plain["seeds"], searching=True)
    if problems:
        raise StudyError(path, problems)
    conditions, draws = _conditions(plain)
    strays = sorted({text for each in conditions.values() for text in texts(each) if "${" in text})
    if strays:
        raise StudyError(path, [f"arms: {text!r} names nothing that is drawn" for text in strays])
    study = make_study(
        path,
        {
            "question": plain.get("question", ""),
            "base": {**(plain.get("base") or {}), "test": False},
            "conditions": conditions,
            "baseline": next(iter(conditions)),
            "seeds": plain["seeds"],
        },
        runtime,
    )
    blind = [name for name, config in study.conditions.items() if not config.validation]
    if blind:
        raise StudyError(path, ["base: validation must be above 0: a search chooses by it"])
    return Search(study, draws)


def draw(levels: Mapping[str, Sequence[float]], count: int, purpose: str) -> list[dict[str, float]]:
    """Draws from a space in which each level stands equally often, up to one (a Latin hypercube).

    Example:
        >>> drawn = draw({"lr": [0.1, 0.2], "epochs": [10, 20, 40]}, 6, "an example")
        >>> sorted(each["epochs"] for each in drawn)
        [10, 10, 20, 20, 40, 40]
    """
    if not levels:
        return [{} for _ in range(count)]
    points = qmc.LatinHypercube(len(levels), rng=derive_seed(0, f"search/{purpose}")).random(count)
    return [
        {
            name: values[math.floor(place * len(values))]
            for place, (name, values) in zip(point, levels.items(), strict=True)
        }
        for point in points.tolist()
    ]


def tried(search: Search, runs: Sequence[Run]) -> list[Tried]:
    """What came of each draw, arm by arm, of the runs that ended.

    Raises:
        ValueError: if runs are missing, or failed.
    """
    lacking = [run for run in runs if run.result is None]
    if lacking:
        first = lacking[0]
        raise ValueError(
            f"{len(lacking)} of {len(runs)} runs of the search are missing or failed, such as "
            f"{first.condition}, seed {first.seed}: nothing is chosen before all have ended"
        )
    scores: dict[str, dict[int, float]] = {name: {} for name in search.draws}
    for run in runs:
        ended = run.status == "finished" and run.result is not None
        last = run.result.epochs[-1].validation if ended and run.result else 0.0
        scores[run.condition][run.seed] = last or 0.0
    return [Tried(arm, name, drawn, scores[name]) for name, (arm, drawn) in search.draws.items()]


def best(all_tried: Sequence[Tried]) -> dict[str, Tried]:
    """The draw of each arm whose mean is highest; of equal ones the first."""
    arms = dict.fromkeys(each.arm for each in all_tried)
    return {
        arm: max((each for each in all_tried if each.arm == arm), key=lambda each: each.mean)
        for arm in arms
    }


def chosen_text(chosen: Mapping[str, Tried]) -> str:
    """What `chosen:` of a study file reads: arm -> what was drawn for it."""
    plain = {arm: each.drawn for arm, each in chosen.items()}
    return str(yaml.safe_dump(plain, sort_keys=False))


def table_text(all_tried: Sequence[Tried]) -> str:
    """A CSV with one line for each draw and seed."""
    names = list(dict.fromkeys(name for each in all_tried for name in each.drawn))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["arm", "draw", *names, "seed", "validation"])
    for each in all_tried:
        numbers = [each.drawn.get(name, "") for name in names]
        for seed, score in each.validation.items():
            writer.writerow([each.arm, each.condition, *numbers, seed, score])
    return file.getvalue()


def _conditions(plain: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str, Drawn]]]:
    """The fields of each draw, and what was drawn."""
    count, known = plain["draws"], {each.name for each in fields(Config)}
    base = {n: v for n, v in (plain.get("base") or {}).items() if type(v) in (int, float)}
    shared = draw(plain.get("space") or {}, count, "shared")
    conditions: dict[str, Any] = {}
    draws: dict[str, tuple[str, Drawn]] = {}
    for arm, given in plain["arms"].items():
        parts = given or {}
        own = draw(parts.get("space") or {}, count, arm)
        for number, both in enumerate(zip(shared, own, strict=True), 1):
            drawn = {**both[0], **both[1]}
            filled = fill_numbers(parts.get("fields") or {}, {**base, **drawn})
            set_by_draw = {name: value for name, value in drawn.items() if name in known}
            conditions[f"{arm} {number}"] = {**set_by_draw, **filled}
            draws[f"{arm} {number}"] = (arm, drawn)
    return conditions, draws


def _problems(plain: object) -> list[str]:
    if not isinstance(plain, dict):
        return [f"it must be a mapping of arms, space, draws and seeds, got {plain!r}"]
    problems = unknown(plain, _FIELDS, "field")
    count, arms, base = plain.get("draws"), plain.get("arms"), plain.get("base") or {}
    if type(count) is not int or count < 1:
        problems.append(f"draws must be a whole number, at least 1, got {count!r}")
    if not isinstance(base, dict) or "test" in base:
        problems.append(f"base must map fields of Config to values, without test, got {base!r}")
    seeds = plain.get("seeds")
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds):
        problems.append(f"seeds must be a list of whole numbers, got {seeds!r}")
    problems += _space_problems(plain.get("space"), "space")
    if not isinstance(arms, dict) or not arms:
        return [*problems, f"arms must name at least one, got {arms!r}"]
    for arm, given in arms.items():
        problems += name_problems(arm, "arms: a name")
        if not isinstance(given, dict | None):
            problems.append(f"arms.{arm} must have space and fields, or neither, got {given!r}")
            continue
        parts = given or {}
        problems += unknown(parts, ["space", "fields"], f"arms.{arm}: field")
        problems += _space_problems(parts.get("space"), f"arms.{arm}.space")
        own = parts.get("fields") or {}
        if not isinstance(own, dict) or "test" in own:
            problems.append(f"arms.{arm}.fields must map fields of Config, but test, got {own!r}")
    return problems


def _space_problems(space: object, where: str) -> list[str]:
    if space is None:
        return []
    if not isinstance(space, dict):
        return [f"{where} must map names to lists of numbers, got {space!r}"]
    return [
        f"{where}.{name} must be a list of numbers, at least one, got {levels!r}"
        for name, levels in space.items()
        if not isinstance(levels, list)
        or not levels
        or any(type(level) not in (int, float) for level in levels)
    ]
