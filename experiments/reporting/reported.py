"""A report read back: the runs that its runs.csv tells of, and the sections of its text."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from experiments.config import Config
from experiments.results import Best, Epoch, Result
from experiments.running.outcomes import Status
from experiments.running.records import Run, StudyRecord
from experiments.study import Study

_KNOWN = "condition seed status test_loss train_loss train_accuracy nominal realized seconds memory"
_NO_SCORE = {*_KNOWN.split(), "error", "best_epoch", "validation"}


def read_reported(path: Path, study: Study) -> tuple[StudyRecord, list[Run]]:
    """The runs of a report, as far as its `runs.csv` tells: no epochs, and no machines.

    Args:
        path: of `runs.csv`.
        study: that they are of.

    Raises:
        ValueError: if a condition, seed or value is not one of the study's.
        OSError: if the file can't be read.
    """
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    columns = list(lines[0]) if lines else []
    if missing := _needed(columns, study) - {*columns}:
        raise ValueError(f"{path} is no runs.csv: it has no {', '.join(sorted(missing))}")
    found = {}
    for number, line in enumerate(lines, start=2):
        try:
            run = _run(line, study)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        if (run.condition, run.seed) in found:
            raise ValueError(f"{path}:{number}: {run.condition!r} stands twice, seed {run.seed}")
        found[run.condition, run.seed] = run
    asked = {(one.condition, one.config.seed) for one in study.runs()}
    absent = sorted(asked - found.keys())
    if absent:
        raise ValueError(f"{path} has no run of {absent[0][0]!r} with seed {absent[0][1]}")
    record = StudyRecord(
        study.name, study.question, "", study.baseline, study.seeds, study.factors, study.contrasts
    )
    order = {(one.condition, one.config.seed): place for place, one in enumerate(study.runs())}
    return record, sorted(found.values(), key=lambda run: order[run.condition, run.seed])


def _needed(columns: Sequence[str], study: Study) -> set[str]:
    """The columns of a `runs.csv` of the study that has at least these."""
    needed = {*_KNOWN.split()}
    if not needed <= {*columns}:
        return needed
    tests = columns[columns.index("status") + 1 : columns.index("test_loss")]
    if tests:  # there are none if no run is finished
        needed |= {family.test for family in study.contrasts}
    if "best_epoch" in columns:
        needed |= {"validation", *(f"best_{name}" for name in tests)}
    return needed


def _run(line: Mapping[str, str], study: Study) -> Run:
    name, seed, status = line["condition"], int(line["seed"]), line["status"]
    if name not in study.conditions or seed not in study.seeds:
        raise ValueError(f"{study.name} has no run of {name!r} with seed {seed}")
    if status not in get_args(Status):
        raise ValueError(f"status must be one of {get_args(Status)}, got {status!r}")
    config = replace(study.conditions[name], seed=seed)
    result = _result(line, config) if status == "finished" else None
    error = line["error"] or None
    return Run(name, study.factors[name], seed, config, status, result, {}, error)  # type: ignore[arg-type]


def _result(line: Mapping[str, str], config: Config) -> Result:
    """A result with one epoch that stands for all: the rates are their mean, the loss the last."""
    numbers = {
        name: float(text)
        for name, text in line.items()
        if text and name not in ("condition", "status", "error") and not name.startswith("factor_")
    }
    mean = Epoch(
        epoch=config.epochs - 1,
        loss=numbers["train_loss"],
        accuracy=numbers.get("train_accuracy"),
        lr=float("nan"),
        grad_norm=None,
        grad_norm_clipped=None,
        nominal={"all sites": numbers["nominal"]} if "nominal" in numbers else {},
        realized={"all sites": numbers["realized"]} if "realized" in numbers else {},
        seconds=numbers["seconds"] / config.epochs,
    )
    every = {name: number for name, number in numbers.items() if name not in _NO_SCORE}
    scores = {name: number for name, number in every.items() if not name.startswith("best_")}
    best = None
    if "best_epoch" in numbers:
        chosen = {name: every[f"best_{name}"] for name in scores}
        best = Best(int(numbers["best_epoch"]) - 1, numbers["validation"], chosen)
    seconds, memory = numbers["seconds"], int(numbers["memory"])
    return Result("finished", scores, numbers.get("test_loss"), [mean], seconds, memory, best)


def sections(text: str) -> dict[str, str]:
    r"""Title -> text of the second-level sections of a document, outside of code.

    Example:
        >>> sections("# A\n\n## B\n\nb\n\n### C\n\n## D\n\nd\n")
        {'B': 'b\n\n### C', 'D': 'd'}
    """
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return {title: body.strip("\n") for title, body in zip(parts[1::2], parts[2::2], strict=True)}
