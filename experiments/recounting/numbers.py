"""A runs.csv and what follows from it, by formulas that `experiments.reporting` has no part in."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import yaml
from scipy import stats

SPLITS = ("clean", "occluded", "noisy")
Values = dict[int, float]  # seed -> a score


@dataclass(frozen=True)
class Fault:
    """A line that says something else than the runs do."""

    path: Path
    line: int
    said: str
    recounted: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: said {self.said!r}, recounted {self.recounted!r}"


@dataclass(frozen=True)
class Test:
    """A paired t-test: mean, interval, p and corrected p, as shares."""

    n: int
    mean: float
    low: float
    high: float
    p: float
    holm: float

    @property
    def hidden(self) -> float:
        """How large a difference may be."""
        return max(abs(self.low), abs(self.high))

    @property
    def points(self) -> str:
        """Mean and interval in percentage points."""
        return f"{100 * self.mean:+.2f} [{100 * self.low:+.2f}, {100 * self.high:+.2f}]"


@dataclass(frozen=True)
class Family:
    """Comparisons that are corrected together: (left, right) -> test.

    Args:
        tests: in the order of the report.
        single: whether each side is one condition, and no mean over some.
    """

    tests: dict[tuple[str, str], Test]
    single: bool


@dataclass(frozen=True, eq=False)
class Study:
    """The runs of a study.

    Args:
        folder: of its report.
        lines: of its runs.csv.
        repeats: condition -> the one that it repeats, with another `replica`.
        baseline: that the others are compared to.
        epochs: of each condition.
        titles: of the families of comparisons that the report has tables of.
    """

    folder: Path
    lines: list[dict[str, str]]
    repeats: dict[str, str]
    baseline: str
    epochs: dict[str, int]
    titles: tuple[str, ...]

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


def tests(pairs: Sequence[tuple[Values, Values]]) -> list[Test]:
    """The first of each pair minus the second, p corrected after Holm over all of the pairs."""
    found = []
    for one, other in pairs:
        seeds = sorted(one.keys() & other.keys())
        result = stats.ttest_rel([one[s] for s in seeds], [other[s] for s in seeds])
        interval = result.confidence_interval(0.95)
        mean = np.mean([one[s] - other[s] for s in seeds])
        found.append((len(seeds), mean, interval.low, interval.high, result.pvalue))
    p = np.array([one[-1] for one in found])
    order = np.argsort(p)
    corrected = np.empty(len(p))
    factors = np.arange(len(p), 0, -1)
    corrected[order] = np.minimum(1, np.maximum.accumulate(p[order] * factors))
    return [Test(*one, holm) for one, holm in zip(found, corrected, strict=True)]


def p_says(p: float) -> str:
    """A p of two digits; of four where two would hide on which side of .05 it is."""
    if p < 0.0001:
        return "<.0001"
    text = f"{p:.2g}"
    if (float(text) < 0.05) != (p < 0.05):
        text = f"{p:.4f}".rstrip("0")
        text = "<.05" if float(text) == 0.05 else text
    return text[1:] if text.startswith("0") else text


def family(study: Study, title: str, split: str = "clean") -> Family | None:
    """The comparisons under a title, such as "Pairs of rate, within regularizer"; None if unknown.

    Between levels that several conditions have, their means are compared, seed by seed.
    """
    if title.startswith("Pairs among "):
        names = title.removeprefix("Pairs among ").split("; ")
        groups = [{name: [name] for name in names}]
        if not set(names) <= set(study.heads):
            return None
    else:
        form = re.fullmatch(r"Pairs of (.+?)(?:, within (.+?))?(?:, mean over (.+))?", title)
        if not form or not {form[1], form[2] or form[1]} <= study.factors.keys():
            return None
        rest = [name for name in study.factors if name not in (form[1], form[2])]
        if (form[3] or "") != " and ".join(rest):
            return None
        groups = _groups(study, form[1], form[2])
    pairs = {
        (later, earlier): (
            mean_of_cells(study, group[later], split),
            mean_of_cells(study, group[earlier], split),
        )
        for group in groups
        for earlier, later in combinations(group, 2)
    }
    found = dict(zip(pairs, tests(list(pairs.values())), strict=True))
    return Family(found, all(len(cells) == 1 for group in groups for cells in group.values()))


def mean_of_cells(study: Study, conditions: Iterable[str], split: str = "clean") -> Values:
    """The mean over conditions, of the seeds that all of them have."""
    cells = [study.values(condition, split) for condition in conditions]
    return {s: float(np.mean([c[s] for c in cells])) for s in set.intersection(*map(set, cells))}


def _groups(study: Study, factor: str, within: str | None) -> list[dict[str, list[str]]]:
    levels = study.factors[factor]
    places = study.factors[within] if within else dict.fromkeys(levels, "")
    groups: dict[str, dict[str, list[str]]] = {}
    for condition in levels:
        group = groups.setdefault(places[condition], {})
        group.setdefault(levels[condition], []).append(condition)
    return [
        {
            ones[0] if len(ones) == 1 else f"{level} ({place})" if within else level: ones
            for level, ones in group.items()
        }
        for place, group in groups.items()
    ]


def read_study(folder: Path) -> Study:
    """A study from the folder of its report: runs.csv, and what its report says was run.

    Raises:
        ValueError: if there are no runs, or the report does not say what the baseline is.
    """
    with (folder / "runs.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    if not lines:
        raise ValueError(f"{folder / 'runs.csv'} has no runs")
    text = plain((folder / "report.md").read_text(encoding="utf-8"))
    named = re.search(r"The baseline, \*(.+?)\*, has these settings", text)
    if named is None:
        raise ValueError(f"{folder / 'report.md'} does not say what the baseline is")
    changes = dict(re.findall(r"^- \*\*(.+?)\*\*: (`.+`|nothing)$", text, re.MULTILINE))
    epochs = re.search(r"^epochs: (\d+)$", text, re.MULTILINE)
    asked = {
        name: yaml.safe_load(f"{{{change.strip('`')}}}").get("epochs")
        for name, change in changes.items()
    }
    base = int(epochs[1]) if epochs else 0
    return Study(
        folder,
        lines,
        {name: named[1] for name, change in changes.items() if change == "`replica: 1`"},
        named[1],
        {
            name: asked.get(name) or base
            for name in dict.fromkeys(line["condition"] for line in lines)
        },
        tuple(dict.fromkeys(re.findall(r"^### (Pairs .+)$", text, re.MULTILINE))),
    )


def plain(text: str) -> str:
    """Markdown without the backslashes that names need."""
    return re.sub(r"\\([\\`*_\[|<#~$&])", r"\1", text)
