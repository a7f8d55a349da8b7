"""A study and its runs, read back from their directories."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from experiments.config import Config, make_config
from experiments.contrasts import Asked, read_contrasts
from experiments.files import record_digest
from experiments.results import Result
from experiments.running.directories import read_environment
from experiments.running.outcomes import Status, look


@dataclass(frozen=True)
class StudyRecord:
    """A study as its directory records it.

    Args:
        name: of its file, without the suffix.
        question: that it asks.
        command: that launched it last.
        baseline: the condition that the others are compared to.
        seeds: of every condition.
        conditions: name -> its factors (factor -> name of its level), in the file's order.
        contrasts: families of what is compared besides; older records have none.
    """

    name: str
    question: str
    command: str
    baseline: str
    seeds: tuple[int, ...]
    conditions: dict[str, dict[str, str]]
    contrasts: tuple[Asked, ...] = ()


@dataclass(frozen=True)
class Run:
    """One run of a study, whatever came of it.

    Args:
        condition: its name.
        factors: factor -> name of its level; {} for a condition of its own.
        seed: of the run.
        config: all that decides its result.
        status: finished, diverged, failed or missing (not run, or not to the end).
        result: of a finished or diverged run.
        environment: versions, commit, host and attempts; {} if it was never begun.
        error: of a failed run, in words.
        directory: of the run; None where it is known by a report alone.
    """

    condition: str
    factors: dict[str, str]
    seed: int
    config: Config
    status: Status
    result: Result | None
    environment: dict[str, Any]
    error: str | None
    directory: Path | None = None


def read_runs(directory: Path) -> tuple[StudyRecord, list[Run]]:
    """A study and its runs, seed by seed.

    Raises:
        ValueError: if the directory holds no study that can be read.
    """
    path = directory / "study.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        factors = {name: condition["factors"] for name, condition in data["conditions"].items()}
        record = StudyRecord(
            data["name"],
            data["question"],
            data["command"],
            data["baseline"],
            tuple(data["seeds"]),
            factors,
        )
        _check(record)
        contrasts, problems = read_contrasts(data.get("contrasts"), factors, record.baseline)
        if problems:
            raise ValueError("; ".join(problems))
        record = replace(record, contrasts=contrasts)
        planned = [
            (
                directory / condition["runs"][str(seed)],
                name,
                replace(make_config(condition["config"]), seed=seed),
            )
            for seed in record.seeds
            for name, condition in data["conditions"].items()
        ]
        _check_unchanged(data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path} is not the record of a study: {reason}") from error
    return record, [_read_run(*plan, record.conditions[plan[1]]) for plan in planned]


def _check(record: StudyRecord) -> None:
    """Raise ValueError if a field is of another type than a study's."""
    for name in ("name", "question", "command", "baseline"):
        value = getattr(record, name)
        if not isinstance(value, str):
            raise ValueError(f"{name} must be text, got {value!r}")
    if any(type(seed) is not int for seed in record.seeds):
        raise ValueError(f"seeds must be whole numbers, got {list(record.seeds)}")
    for name, factors in record.conditions.items():
        if not isinstance(factors, dict) or any(type(f) is not str for f in factors.values()):
            raise ValueError(f"conditions.{name}.factors must map names to names, got {factors!r}")


def _check_unchanged(data: dict[str, Any]) -> None:
    """Raise ValueError if the record is not as it was written; those without a digest are older."""
    names = [field.name for field in fields(StudyRecord)]
    unknown = [name for name in data if name not in (*names, "sha256")]
    digest = record_digest(data)
    if unknown or data.get("sha256", digest) != digest:
        raise ValueError("it was changed since it was written; scripts/ablate.py writes it again")


def _read_run(directory: Path, name: str, config: Config, factors: dict[str, str]) -> Run:
    found, environment = look(directory), read_environment(directory)
    parts = (found.status, found.result, environment, found.error)
    return Run(name, factors, config.seed, config, *parts, directory=directory)
