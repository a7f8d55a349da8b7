"""The search of a study: the same number of runs for each condition, ranked over seeds.

Optuna proposes the candidates. All of them run with two seeds, the best third with three more, and
the best two with five more (as far as `seeds` allows). A condition that has fewer candidates runs
them with more seeds, so that it has as many runs. Only the validation set is scored. The run
folders are the only store: after an interruption the same candidates are asked for again, and
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
import optuna
import pandas as pd

from experiments.config import Run
from experiments.data import load_data
from experiments.runs import RunFolder
from experiments.seeds import derive_seed
from experiments.stats import at_chance, interval
from experiments.study import Search, Study, StudyError
from experiments.train import Result

FIRST_SEED = 1001  # so that a search has no seed of a study
BATCH = 4  # candidates that Optuna is asked for at a time

Values = dict[str, Any]
RunAll = Callable[[Sequence[RunFolder], Sequence[str]], None]
"""Trains runs until all are settled; the texts name the runs."""


@dataclass(frozen=True)
class Found:
    """The result of a search for one condition.

    Attributes:
        condition: its name.
        table: one row for each candidate: its values, n, mean and sd of the validation metric.
        best: the values of the best candidate.
        sentence: how far it leads.
        runs: how many runs were made.
    """

    condition: str
    table: pd.DataFrame
    best: Values
    sentence: str
    runs: int


def search(study: Study, pool: Path, run_all: RunAll) -> list[Found]:
    """Search each condition, and return the results.

    Args:
        study: with `search`.
        pool: folder of the runs.
        run_all: trains runs, until all are settled.

    Raises:
        StudyError: if the study has no search, a space is wrong, or there is no validation set.
    """
    asked = check(study)
    return [_Condition(study, asked, name, pool, run_all).search() for name in study.conditions]


def rounds_of(asked: Search) -> tuple[int, int, int]:
    """The runs of a condition in each of the three rounds."""
    two, five = min(2, asked.seeds), min(5, asked.seeds)
    kept, last = _kept(asked.candidates), min(2, asked.candidates)
    return two * asked.candidates, (five - two) * kept, (asked.seeds - five) * last


def _kept(candidates: int) -> int:
    """The best third of the candidates, but at least two."""
    return min(candidates, max(2, math.ceil(candidates / 3)))


def check(study: Study) -> Search:
    """Refuse a search that can't be made.

    Raises:
        StudyError: with everything that is wrong.
    """
    asked = study.file.search
    if asked is None:
        raise StudyError(study.name, ["it has no search: add search: {space: {lr: [0.05, 0.1]}}"])
    problems = [p for name, one in asked.space.items() if (p := _space_problem(name, one))]
    known = {name for condition in study.conditions for name in study.fields[condition]["params"]}
    for name in asked.space:
        field = name.partition(".")[0]
        if name not in known and field not in Run.model_fields:
            problems.append(
                f"search.space.{name}: no condition has params: {{{name}: ...}}, and a run has no "
                f"field {field!r}"
            )
    taken = sorted(set(study.seeds) & set(range(FIRST_SEED, FIRST_SEED + sum(rounds_of(asked)))))
    if taken:
        problems.append(f"seeds: searches use {taken}: choose others")
    for name, run in study.conditions.items():
        if load_data(run).validation is None:
            problems.append(
                f"conditions.{name}: {run.data} has no validation set to choose by: for the data "
                "sets here, add data_args: {validation: 0.2}"
            )
            break
    if problems:
        raise StudyError(study.name, problems)
    return asked


def _space_problem(name: str, one: Any) -> str | None:
    where = f"search.space.{name}"
    if isinstance(one, list):
        return None
    if {*one} | {"log"} != {"low", "high", "log"}:
        return f"{where} must be a list or {{low, high, log}}, got {one}"
    low, high = one["low"], one["high"]
    if not all(isinstance(end, int | float) for end in (low, high)) or not low < high:
        return f"{where}: low must be a number below high, got {low!r} and {high!r}"
    if one.get("log") and low <= 0:
        return f"{where}: a log range must begin above 0, got {low}"
    return None


class _Condition:
    """The search of one condition: its candidates, and their scores by seed."""

    def __init__(self, study: Study, asked: Search, name: str, pool: Path, run_all: RunAll) -> None:
        self.study, self.asked, self.name = study, asked, name
        self.pool, self.run_all = pool, run_all
        self.sign = 1 if study.file.higher_is_better else -1
        params = {other: study.fields[other]["params"] for other in study.conditions}
        others = {each for one in params.values() for each in one} - {*params[name]}
        self.space = {key: one for key, one in asked.space.items() if key not in others}
        self.candidates: list[Values] = []
        self.left: list[int] = []
        self.scores: dict[int, dict[int, float]] = {}
        self.chance = math.nan

    def search(self) -> Found:
        """Spend the runs of all rounds, and return what was found."""
        if not self.space:
            return Found(self.name, pd.DataFrame(), {}, "there is nothing to search", 0)
        first, second, third = rounds_of(self.asked)
        if (combinations := self._combinations()) is not None:
            self.candidates = combinations
            self._spend(range(len(combinations)), first)
        else:
            self._propose()
        self._spend(self._best(_kept(self.asked.candidates)), second)
        self._spend(self._best(2), third)
        best, runs = self._best(2), sum(len(each) for each in self.scores.values())
        failed = self._mean(best[0]) == -math.inf
        values = {} if failed else self.candidates[best[0]]
        sentence = "all candidates failed or diverged" if failed else self._lead(best)
        return Found(self.name, self._table(), values, sentence, runs)

    def _combinations(self) -> list[Values] | None:
        """All combinations of the lists of the space, if they are few; otherwise None."""
        lists = [one for one in self.space.values() if isinstance(one, list)]
        few = math.prod(map(len, lists)) <= self.asked.candidates
        if len(lists) < len(self.space) or not few:
            return None
        return [dict(zip(self.space, each, strict=True)) for each in itertools.product(*lists)]

    def _propose(self) -> None:
        """Ask Optuna for candidates, and score each with its first seeds."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=derive_seed(0, f"search/{self.name}") % 2**32)
        trials = optuna.create_study(direction="maximize", sampler=sampler)
        while (begin := len(self.candidates)) < self.asked.candidates:
            count = min(BATCH, self.asked.candidates - begin)
            asked = [trials.ask() for _ in range(count)]
            self.candidates += [
                {name: _suggest(trial, name, one) for name, one in self.space.items()}
                for trial in asked
            ]
            self._spend(range(begin, begin + count), min(2, self.asked.seeds) * count)
            for number, trial in enumerate(asked, begin):
                mean = self._mean(number)
                failed = {"state": optuna.trial.TrialState.FAIL} if mean == -math.inf else {}
                trials.tell(trial, None if failed else mean, **failed)

    def _spend(self, numbers: Sequence[int], runs: int) -> None:
        """Share so many more runs among candidates, with the next seeds, and read the scores."""
        each, more = divmod(runs, len(numbers))
        folders: dict[tuple[int, int], RunFolder] = {}
        for place, number in enumerate(numbers):
            begin = FIRST_SEED + len(self.scores.setdefault(number, {}))
            for seed in range(begin, begin + each + (place < more)):
                run = self.study.with_values(self.name, self.candidates[number], seed)
                folders[number, seed] = RunFolder(self.pool, run)
        names = [f"search of {self.name}, {self.candidates[number]}" for number, _ in folders]
        self.run_all([*folders.values()], names)
        for (number, seed), folder in folders.items():
            result = folder.result() or Result("failed")
            self.scores[number][seed] = result.scores.get("validation", math.nan)
            self.chance = self.chance if result.chance is None else result.chance

    def _mean(self, number: int) -> float:
        """The mean, negative if less is better. A candidate that failed or diverged loses."""
        mean = float(np.mean([*self.scores[number].values()]))
        return self.sign * mean if mean == mean else -math.inf

    def _best(self, count: int) -> list[int]:
        """The best of the candidates that are left; the others are out."""
        self.left = sorted(self.left or self.scores, key=self._mean, reverse=True)[:count]
        return self.left

    def _table(self) -> pd.DataFrame:
        out = [number for number in self.scores if number not in self.left]
        out.sort(key=lambda number: (len(self.scores[number]), self._mean(number)), reverse=True)
        rows = [
            {
                **self.candidates[number],
                "n": len(scores := self.scores[number]),
                "mean": self.sign * self._mean(number),
                "sd": float(np.std([*scores.values()], ddof=1)) if len(scores) > 1 else None,
            }
            for number in [*self.left, *out]
        ]
        return pd.DataFrame(rows)

    def _lead(self, best: Sequence[int]) -> str:
        """How far the winner leads the second, in units of the metric, paired by seed."""
        if at_chance(self.sign * self._mean(best[0]), self.chance, self.sign):
            return "all candidates are at chance level: they are not ranked"
        if len(best) < 2:
            return "there was one candidate"
        first, second = (self.scores[number] for number in best)
        both = [self.sign * (first[seed] - second[seed]) for seed in first if seed in second]
        differences = np.array([each for each in both if each == each])
        low, high = interval(differences, 0.95)
        if len(differences) < 2:
            return "the best two can't be compared"
        text = f"the best leads the second by {differences.mean():.4f} [{low:.4f}, {high:.4f}]"
        return text if low > 0 else f"{text}: they are not ranked, the interval holds 0"


def _suggest(trial: optuna.Trial, name: str, one: Any) -> Any:
    if isinstance(one, list):
        return one[trial.suggest_categorical(name, list(range(len(one))))]
    low, high, log = one["low"], one["high"], bool(one.get("log"))
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(name, low, high, log=log)
    return trial.suggest_float(name, low, high, log=log)
