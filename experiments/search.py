"""The search of a study: the same number of runs for each condition, ranked over seeds.

If a space of lists has few combinations, all are tried. Otherwise the candidates are drawn at
random, with a seed of their own. All candidates run with two seeds, the best third with three more,
and the best two with five more (as far as `seeds` allows). A condition that has fewer candidates
runs them with more seeds, so that it has as many runs. Only the validation set is scored. The run
folders are the only store: after an interruption the same candidates are made again, and
finished runs are read.

A list in the space is a choice. `{low: 0.01, high: 1, log: true}` is a range, of whole numbers if
both ends are. A name is a parameter of the condition (`${name}`) or a field of a run, such as `lr`.
A condition without a parameter is searched over the fields alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from experiments.config import Run
from experiments.data import load_data
from experiments.runs import RunFolder
from experiments.seeds import own_generator
from experiments.stats import at_chance, interval
from experiments.study import Search, Study, StudyError
from experiments.train import Result

FIRST_SEED = 1001  # above the seeds of studies

Values = dict[str, Any]
RunAll = Callable[[Sequence[RunFolder], Sequence[str]], None]
"""Trains runs until all are settled; the texts name the runs."""


@dataclass(frozen=True)
class Found:
    """The result of a search for one condition.

    Attributes:
        condition: the name of the condition.
        table: one row for each candidate: its values, n, mean and sd of the validation metric.
        best: the values of the best candidate.
        sentence: how far the best candidate leads.
        runs: the number of runs of the search.
    """

    condition: str
    table: pd.DataFrame
    best: Values
    sentence: str
    runs: int


def search(study: Study, pool: Path, run_all: RunAll) -> list[Found]:
    """Search each condition, and return the results.

    Args:
        study: a study with the field `search`.
        pool: folder of the runs.
        run_all: trains runs until all are settled.

    Raises:
        StudyError: if the study has no search, a space is wrong, or there is no validation set.
    """
    settings = check(study)
    results = []
    for name in study.conditions:
        condition = _Condition(study, settings, name, pool, run_all)
        results.append(condition.search())
    return results


def rounds_of(settings: Search) -> tuple[int, int, int]:
    """Return the runs of a condition in each of the three rounds."""
    candidates = settings.candidates
    seeds_of_first = min(2, settings.seeds)
    seeds_of_second = min(5, settings.seeds)

    first = candidates * seeds_of_first
    second = _kept(candidates) * (seeds_of_second - seeds_of_first)
    third = min(2, candidates) * (settings.seeds - seeds_of_second)
    return first, second, third


def _kept(candidates: int) -> int:
    """Return the best third of the candidates, but at least two."""
    third = math.ceil(candidates / 3)
    return min(candidates, max(2, third))


def check(study: Study) -> Search:
    """Refuse a search that can't be made.

    Raises:
        StudyError: with all faults.
    """
    settings = study.file.search
    if settings is None:
        raise StudyError(study.name, ["it has no search: add search: {space: {lr: [0.05, 0.1]}}"])

    problems = [
        *_space_problems(settings),
        *_unknown_names(study, settings),
        *_taken_seeds(study, settings),
        *_missing_validation(study),
    ]
    if problems:
        raise StudyError(study.name, problems)
    return settings


def _space_problems(settings: Search) -> list[str]:
    """Return the faults of the lists and ranges of a space."""
    problems = (_level_problem(name, levels) for name, levels in settings.space.items())
    return [problem for problem in problems if problem is not None]


def _level_problem(name: str, levels: Any) -> str | None:
    """Return the fault of a list or range."""
    where = f"search.space.{name}"
    if isinstance(levels, list):
        repeated = [value for index, value in enumerate(levels) if value in levels[:index]]
        return f"{where}: the values of a list must differ, got {levels}" if repeated else None
    if {*levels} | {"log"} != {"low", "high", "log"}:
        return f"{where} must be a list or {{low, high, log}}, got {levels}"

    low = levels["low"]
    high = levels["high"]
    are_numbers = isinstance(low, int | float) and isinstance(high, int | float)
    if not are_numbers or not low < high:
        return f"{where}: low must be a number below high, got {low!r} and {high!r}"
    if levels.get("log") and low <= 0:
        return f"{where}: a log range must begin above 0, got {low}"
    return None


def _unknown_names(study: Study, settings: Search) -> list[str]:
    """Return the names of a space that no parameter and no field of a run has."""
    parameters: set[str] = set()
    for condition in study.conditions:
        parameters |= set(study.fields[condition]["params"])

    problems = []
    for name in settings.space:
        field = name.partition(".")[0]
        if name not in parameters and field not in Run.model_fields:
            problems.append(
                f"search.space.{name}: no condition has params: {{{name}: ...}}, and a run has no "
                f"field {field!r}"
            )
    return problems


def _taken_seeds(study: Study, settings: Search) -> list[str]:
    """Return the seeds of the study that a search may use as well."""
    largest_count = sum(rounds_of(settings))  # if one candidate has all runs
    of_search = range(FIRST_SEED, FIRST_SEED + largest_count)
    taken = sorted(set(study.seeds) & set(of_search))
    return [f"seeds: searches use {taken}: choose others"] if taken else []


def _missing_validation(study: Study) -> list[str]:
    """Return the first condition whose data have no validation set."""
    for name, run in study.conditions.items():
        if load_data(run).validation is None:
            return [
                f"conditions.{name}: {run.data} has no validation set to choose by: for the data "
                "sets here, add data_args: {validation: 0.2}"
            ]
    return []


class _Condition:
    """The search of a condition: its candidates, and their scores by seed."""

    def __init__(
        self, study: Study, settings: Search, name: str, pool: Path, run_all: RunAll
    ) -> None:
        self.study = study
        self.settings = settings
        self.name = name
        self.pool = pool
        self.run_all = run_all
        self.sign = 1 if study.file.higher_is_better else -1
        self.space = _space_of(study, settings, name)
        self.candidates: list[Values] = []
        self.left: list[int] = []
        self.scores: dict[int, dict[int, float]] = {}
        self.chance = math.nan

    def search(self) -> Found:
        """Run the candidates in all rounds, and return the result."""
        if not self.space:
            return Found(self.name, pd.DataFrame(), {}, "there is nothing to search", 0)

        first, second, third = rounds_of(self.settings)
        self.candidates = candidates_of(self.space, self.settings.candidates, self.name)
        self._spend(range(len(self.candidates)), first)
        self._spend(self._best(_kept(self.settings.candidates)), second)
        self._spend(self._best(2), third)

        best = self._best(2)
        values = self.candidates[best[0]]
        sentence = self._lead(best)
        if self._mean(best[0]) == -math.inf:
            values = {}
            sentence = "all candidates failed or diverged"

        runs = sum(len(scores) for scores in self.scores.values())
        return Found(self.name, self._table(), values, sentence, runs)

    def _spend(self, numbers: Sequence[int], runs: int) -> None:
        """Share more runs among candidates, with the next seeds, and read the scores."""
        for_each, remainder = divmod(runs, len(numbers))
        folders: dict[tuple[int, int], RunFolder] = {}
        for place, number in enumerate(numbers):
            used = len(self.scores.setdefault(number, {}))
            count = for_each + (place < remainder)
            for seed in range(FIRST_SEED + used, FIRST_SEED + used + count):
                run = self.study.with_values(self.name, self.candidates[number], seed)
                folders[number, seed] = RunFolder(self.pool, run)

        names = [f"search of {self.name}, {self.candidates[number]}" for number, _ in folders]
        self.run_all(list(folders.values()), names)

        for (number, seed), folder in folders.items():
            result = folder.result() or Result("failed")
            self.scores[number][seed] = result.scores.get("validation", math.nan)
            if result.chance is not None:
                self.chance = result.chance

    def _mean(self, number: int) -> float:
        """Return the mean score, negative if less is better; -inf for a failed candidate."""
        mean = float(np.mean(list(self.scores[number].values())))
        return -math.inf if math.isnan(mean) else self.sign * mean

    def _best(self, count: int) -> list[int]:
        """Return the best of the remaining candidates, and drop the others."""
        remaining = self.left or self.scores
        self.left = sorted(remaining, key=self._mean, reverse=True)[:count]
        return self.left

    def _table(self) -> pd.DataFrame:
        """Return the remaining candidates, and then the others by runs and mean."""

        def runs_and_mean(number: int) -> tuple[int, float]:
            return len(self.scores[number]), self._mean(number)

        out = [number for number in self.scores if number not in self.left]
        out.sort(key=runs_and_mean, reverse=True)
        rows = [self._row(number) for number in self.left + out]
        return pd.DataFrame(rows)

    def _row(self, number: int) -> dict[str, Any]:
        """Return the values of a candidate, and n, mean and standard deviation of its scores."""
        scores = list(self.scores[number].values())
        deviation = float(np.std(scores, ddof=1)) if len(scores) > 1 else None
        return {
            **self.candidates[number],
            "n": len(scores),
            "mean": self.sign * self._mean(number),
            "sd": deviation,
        }

    def _lead(self, best: Sequence[int]) -> str:
        """Return how far the winner leads the second, in units of the metric, paired by seed."""
        best_mean = self.sign * self._mean(best[0])
        if at_chance(best_mean, self.chance, self.sign):
            return "all candidates are at chance level: they are not ranked"
        if len(best) < 2:
            return "there was one candidate"

        winner = self.scores[best[0]]
        second = self.scores[best[1]]
        shared = [seed for seed in winner if seed in second]
        differences = np.array([winner[seed] - second[seed] for seed in shared])
        leads = self.sign * differences[~np.isnan(differences)]
        if len(leads) < 2:
            return "the best two can't be compared"

        low, high = interval(leads, 0.95)
        text = f"the best leads the second by {leads.mean():.4f} [{low:.4f}, {high:.4f}]"
        if low > 0:
            return text
        return f"{text}: they are not ranked, the interval holds 0"


def _space_of(study: Study, settings: Search, name: str) -> dict[str, Any]:
    """Return the space without the parameters that only other conditions have."""
    params = set(study.fields[name]["params"])
    of_others: set[str] = set()
    for condition in study.conditions:
        of_others |= set(study.fields[condition]["params"]) - params
    return {key: levels for key, levels in settings.space.items() if key not in of_others}


def candidates_of(space: dict[str, Any], count: int, name: str) -> list[Values]:
    """Return all combinations of a space if there are at most `count`, otherwise random draws.

    Args:
        space: name -> list or range.
        count: largest number of candidates.
        name: the name of the condition, from which the draws follow.

    Example:
        >>> candidates_of({"lr": [0.1, 0.2]}, 8, "none")
        [{'lr': 0.1}, {'lr': 0.2}]
        >>> space = {"lr": {"low": 0.01, "high": 1.0, "log": True}}
        >>> len(candidates_of(space, 8, "none"))
        8
    """
    choices = [_choices_in(levels) for levels in space.values()]
    finite = [values for values in choices if values is not None]
    is_finite = len(finite) == len(space)
    if is_finite and math.prod(map(len, finite)) <= count:
        combinations = itertools.product(*finite)
        return [dict(zip(space, values, strict=True)) for values in combinations]

    generator = own_generator(0, f"search/{name}")
    candidates: list[Values] = []
    while len(candidates) < count:
        drawn = {key: _draw(levels, generator) for key, levels in space.items()}
        if drawn not in candidates:
            candidates.append(drawn)
    return candidates


def _choices_in(levels: Any) -> Sequence[Any] | None:
    """Return the values of a list or of a range of whole numbers; None for real numbers."""
    if isinstance(levels, list):
        return levels
    if _is_whole(levels):
        return range(levels["low"], levels["high"] + 1)
    return None


def _is_whole(levels: dict[str, Any]) -> bool:
    """Return whether a range has whole numbers only."""
    return isinstance(levels["low"], int) and isinstance(levels["high"], int)


def _draw(levels: Any, generator: torch.Generator) -> Any:
    """Return a value of a list or range: uniform, or uniform in its logarithm."""
    share = torch.rand((), generator=generator, dtype=torch.float64).item()
    if isinstance(levels, list):
        return levels[int(share * len(levels))]

    # each whole number stands for all numbers that are rounded to it
    margin = 0.5 if _is_whole(levels) else 0.0
    begin = levels["low"] - margin
    end = levels["high"] + margin
    drawn = begin + (end - begin) * share
    if levels.get("log"):
        drawn = begin * (end / begin) ** share

    value = round(drawn) if _is_whole(levels) else drawn
    return min(max(value, levels["low"]), levels["high"])
