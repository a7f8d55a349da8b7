"""A runs.csv and what follows from it, by formulas that `experiments.reporting` has no part in."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from experiments.config import Config
from experiments.recounting.paired import Values


@dataclass(frozen=True)
class Fault:
    """A line that says something else than the runs do."""

    path: Path
    line: int
    said: str
    recounted: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: said {self.said!r}, recounted {self.recounted!r}"


@dataclass(frozen=True, eq=False)
class Study:
    """The runs of a study.

    Args:
        folder: of its report.
        lines: of its runs.csv.
        repeats: condition -> the one that it repeats, with another `replica`.
        baseline: that the others are compared to.
        epochs: of each condition.
        asked: families of comparisons that the report says it was asked for, by name.
    """

    folder: Path
    lines: list[dict[str, str]]
    repeats: dict[str, str]
    baseline: str
    epochs: dict[str, int]
    asked: dict[str, Any]

    @property
    def name(self) -> str:
        """That of its folder."""
        return self.folder.name

    @property
    def conditions(self) -> list[str]:
        """All of them, in the order of the file."""
        return list(dict.fromkeys(line["condition"] for line in self.lines))

    @property
    def heads(self) -> list[str]:
        """Those that repeat no other."""
        return [name for name in self.conditions if name not in self.repeats]

    @property
    def splits(self) -> list[str]:
        """Those that were tested on, clean first."""
        columns = list(self.lines[0])
        found = columns[columns.index("status") + 1 : columns.index("test_loss")]
        return sorted(found, key=lambda split: split != "clean")

    @property
    def seeds(self) -> list[int]:
        """All of them, in the order of the file."""
        return list(dict.fromkeys(int(line["seed"]) for line in self.lines))

    @property
    def factors(self) -> dict[str, dict[str, str]]:
        """Factor -> condition -> level, without those that have none."""
        names = [name for name in self.lines[0] if name.startswith("factor_")]
        return {
            name.removeprefix("factor_"): {
                line["condition"]: line[name] for line in self.lines if line[name]
            }
            for name in names
        }

    def own(self, condition: str, column: str) -> Values:
        """Seed -> a number of the runs of one condition."""
        return _own(self, condition, column)

    def values(self, condition: str, split: str = "clean") -> Values:
        """Seed -> score, averaged over what repeats the condition."""
        names = [condition, *(name for name, first in self.repeats.items() if first == condition)]
        return mean_of([self.own(name, split) for name in names])

    @property
    def has_best(self) -> bool:
        """Whether any run has a best epoch by validation."""
        return any(line.get("best_epoch") for line in self.lines)

    @property
    def epochs_factor(self) -> str | None:
        """The factor whose levels are the numbers of epochs."""
        for name, levels in self.factors.items():
            said = {re.sub(r" epochs?$", "", level) for level in levels.values()}
            same = all(str(self.epochs[one]) == each.split(" ")[0] for one, each in levels.items())
            if same and len(said) > 1 and all(map(str.isdigit, said)):
                return name
        return None

    def pooled(self, condition: str, column: str) -> float:
        """The mean over all runs of the condition, and of what repeats it."""
        names = [condition, *(name for name, first in self.repeats.items() if first == condition)]
        return float(np.mean([x for name in names for x in self.own(name, column).values()]))

    def mean(self, condition: str, column: str) -> float | None:
        """Over the seeds."""
        numbers = list(self.own(condition, column).values())
        return float(np.mean(numbers)) if numbers else None


@cache
def _own(study: Study, condition: str, column: str) -> Values:
    return {
        int(line["seed"]): float(line[column])
        for line in study.lines
        if line["condition"] == condition and line.get(column)
    }


def mean_of(replicas: Sequence[Values]) -> Values:
    """The mean, seed by seed."""
    seeds = sorted(set().union(*replicas))
    return {s: float(np.mean([one[s] for one in replicas if s in one])) for s in seeds}


def mean_of_cells(study: Study, conditions: Iterable[str], split: str = "clean") -> Values:
    """The mean over conditions, of the seeds that all of them have."""
    cells = [study.values(condition, split) for condition in conditions]
    return {s: float(np.mean([c[s] for c in cells])) for s in set.intersection(*map(set, cells))}


def read_study(folder: Path) -> Study:
    """A study from the folder of its report: runs.csv, and what its report says was run.

    Raises:
        ValueError: if there are no runs, the report does not say what the baseline is, or it
            compares on test images that the runs were not tested on.
    """
    with (folder / "runs.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    if not lines:
        raise ValueError(f"{folder / 'runs.csv'} has no runs")
    raw = (folder / "report.md").read_text(encoding="utf-8")
    named = re.search(r"The baseline, \*(.+?)\*, has these settings", plain(raw))
    if named is None:
        raise ValueError(f"{folder / 'report.md'} does not say what the baseline is")
    changes = {
        plain(name): yaml.safe_load(f"{{{change}}}")
        for name, change in re.findall(r"^- \*\*(.+?)\*\*: `(.+)`$", raw, re.MULTILINE)
    }
    epochs = re.search(r"^epochs: (\d+)$", raw, re.MULTILINE)
    base = int(epochs[1]) if epochs else Config.epochs  # defaults are left out of reports
    names = dict.fromkeys([named[1], *(line["condition"] for line in lines)])
    asked = re.findall(
        r"^## (?:\w+ c|C)ontrasts\n\n.+\n\n```yaml\n((?s:.+?))\n```", raw, re.MULTILINE
    )
    study = Study(
        folder,
        lines,
        _repeats({name: changes.get(name, {}) for name in names}),
        named[1],
        {name: changes.get(name, {}).get("epochs", base) for name in names},
        {name: one for text in asked for name, one in yaml.safe_load(text).items()},
    )
    for name, one in study.asked.items():
        test = one.get("test", "clean") if isinstance(one, dict) else "clean"
        if test not in study.splits:
            raise ValueError(
                f"{folder / 'report.md'} compares {name!r} on {test} test images, of which "
                f"runs.csv says nothing: it has {', '.join(study.splits) or 'no tests'}"
            )
    return study


def _repeats(changes: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Condition -> the first one that differs from it in its `replica` alone."""
    first: dict[str, str] = {}
    repeats = {}
    for name, change in changes.items():
        key = repr({field: value for field, value in change.items() if field != "replica"})
        if first.setdefault(key, name) != name:
            repeats[name] = first[key]
    return repeats


def cells_of(line: str) -> list[str]:
    """The cells of a line of a table, plain; none of the line below its head."""
    cells = [plain(cell).strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    return [] if set(cells[0]) == {"-"} else cells


def plain(text: str) -> str:
    """Markdown without the backslashes that names need."""
    return re.sub(r"\\([\\`*_\[|<#~$&])", r"\1", text)
