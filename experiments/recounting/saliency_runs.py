"""A saliency.csv, and the comparisons that follow from it."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from experiments.recounting.numbers import Study, plain
from experiments.recounting.paired import Test, Values, compare, holm

DUST = 1e-9  # what rounding may do to a difference


@dataclass(frozen=True)
class Looked:
    """The runs of a saliency.csv.

    Args:
        lines: of the file.
        conditions: the baseline first, if it is one of them, then as they stand in the file.
        absent: runs of these conditions that the study's runs.csv has not finished, in words.
    """

    lines: list[dict[str, str]]
    conditions: list[str]
    absent: list[str]

    def values(self, condition: str, measure: str) -> Values:
        """Seed -> entropy or share."""
        return {
            int(line["seed"]): float(line[measure])
            for line in self.lines
            if line["condition"] == condition and line[measure]
        }

    def tests(self, measure: str) -> dict[str, Test | None]:
        """Each other condition minus the first; None where there is no test."""
        first, *others = self.conditions
        pairs = {name: (self.values(name, measure), self.values(first, measure)) for name in others}
        return _corrected(pairs)


def read_saliency(study: Study) -> Looked | None:
    """What a study's saliency.csv has; None without it, or without a run.

    Conditions that are looked at without a finished run have no line: they are those that the text
    says are absent, of which the study's runs.csv decides.
    """
    path = study.folder / "saliency" / "saliency.csv"
    if not path.is_file():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    if not lines:
        return None
    named = dict.fromkeys(line["condition"] for line in lines)
    text = path.with_suffix(".md")
    said = text.read_text(encoding="utf-8") if text.is_file() else ""
    rows = [plain(row) for row in re.findall(r"^\| (.+?) \| 0 \|", said, re.MULTILINE)]
    named |= dict.fromkeys(row for row in rows if row in study.conditions)
    conditions = sorted(named, key=lambda name: name != study.baseline)
    absent = [
        f"{line['condition']}, seed {line['seed']}: {line['status']}"
        for name in conditions
        for line in study.lines
        if line["condition"] == name and line["status"] != "finished"
    ]
    return Looked(lines, conditions, absent)


def of_saliency(study: Study, measure: str, left: str, right: str, alone: bool) -> Test | None:
    """A comparison of a study's saliency, whichever way round it stands; None without it.

    Args:
        study: whose it is.
        measure: entropy or share.
        left: a condition.
        right: another.
        alone: whether its p is not corrected: any pair, else one of the table.
    """
    looked = read_saliency(study)
    if looked is None or left == right or not {left, right} <= set(looked.conditions):
        return None
    if alone:
        sides = looked.values(left, measure), looked.values(right, measure)
        return _corrected({left: sides})[left]
    tests = looked.tests(measure)
    if right == looked.conditions[0]:
        return tests[left]
    test = tests.get(right) if left == looked.conditions[0] else None
    return test and replace(test, mean=-test.mean, low=-test.high, high=-test.low)


def _corrected(pairs: Mapping[str, tuple[Values, Values]]) -> dict[str, Test | None]:
    """Name -> test, corrected over all of them: those without a test count, and show nothing."""
    tested = {}
    for name, (one, other) in pairs.items():
        differences = [one[seed] - other[seed] for seed in one.keys() & other.keys()]
        if len(differences) >= 3 and np.ptp(differences) > DUST:
            tested[name] = compare([(one, other)])[0]
    corrected = holm([tested[name].p if name in tested else 1.0 for name in pairs])
    for name, p in zip(pairs, corrected, strict=True):
        if name in tested:
            tested[name] = replace(tested[name], holm=p, family=len(pairs))
    return {name: tested.get(name) for name in pairs}
