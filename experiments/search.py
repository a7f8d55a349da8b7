"""The search of a study: the same number of runs for each condition, ranked over seeds.

Optuna proposes the candidates. All of them run with two seeds, the best third with three more, and
the best two with five more (as far as `seeds` allows). Only the validation set is scored. The run
folders are the only store: after an interruption the same candidates are asked for again, and
finished runs are read.

A list in the space is a choice. `{low: 0.01, high: 1, log: true}` is a range, of whole numbers if
both ends are. A name is a parameter of the condition (`${name}`) or a field of a run, such as `lr`.
A condition without a parameter is searched over the fields alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd

from experiments.config import Run
from experiments.runs import RunFolder
from experiments.seeds import derive_seed
from experiments.stats import interval
from experiments.study import Study, StudyError, params_of, with_values

FIRST_SEED = 1001  # so that a search has no seed of a study
ROUNDS = (2, 5)  # seeds of a candidate after the first and the second round
BATCH = 4  # candidates that Optuna is asked for at a time

Values = dict[str, Any]


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


def search(study: Study, pool: Path, run_all: Callable[[Sequence[RunFolder]], None]) -> list[Found]:
    """Search each condition, and return the results.

    Args:
        study: with `search`.
        pool: folder of the runs.
        run_all: trains runs, until all are settled.

    Raises:
        StudyError: if the study has no search, a space is wrong, or there is no validation set.
    """
    check(study)
    return [_search_one(study, name, pool, run_all) for name in study.conditions]


def check(study: Study) -> None:
    """Refuse a search that can't be made.

    Raises:
        StudyError: with everything that is wrong.
    """
    from experiments.data import load_data

    asked = study.file.search
    if asked is None:
        raise StudyError(study.name, ["it has no search: add search: {space: {lr: [0.05, 0.1]}}"])
    problems = [p for name, one in asked.space.items() if (p := _space_problem(name, one))]
    known = {name for condition in study.conditions for name in params_of(study, condition)}
    for name in asked.space:
        field = name.partition(".")[0]
        if name not in known and field not in Run.model_fields:
            problems.append(
                f"search.space.{name}: no condition has params: {{{name}: ...}}, and a run has no "
                f"field {field!r}"
            )
    taken = sorted(set(study.seeds) & set(range(FIRST_SEED, FIRST_SEED + asked.seeds)))
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


def _space_problem(name: str, one: Any) -> str | None:
    where = f"search.space.{name}"
    if isinstance(one, list):
        return None if one else f"{where}: the list is empty"
    if set(one) - {"low", "high", "log"} or not {"low", "high"} <= set(one):
        return f"{where} must be a list or {{low, high, log}}, got {one}"
    low, high = one["low"], one["high"]
    if not all(isinstance(end, int | float) for end in (low, high)) or not low < high:
        return f"{where}: low must be a number below high, got {low!r} and {high!r}"
    if one.get("log") and low <= 0:
        return f"{where}: a log range must begin above 0, got {low}"
    return None


def _search_one(
    study: Study, condition: str, pool: Path, run_all: Callable[[Sequence[RunFolder]], None]
) -> Found:
    asked = study.file.search
    assert asked is not None
    params = {*params_of(study, condition)}
    others = {name for each in study.conditions for name in params_of(study, each)} - params
    space = {name: one for name, one in asked.space.items() if name not in others}
    if not space:
        return Found(condition, pd.DataFrame(), {}, "there is nothing to search", 0)
    scores: dict[int, dict[int, float]] = {}
    candidates: list[Values] = []

    def score(numbers: Sequence[int], upto: Callable[[int], int]) -> None:
        """Run candidates with further seeds, and read their scores."""
        folders = {
            (number, seed): RunFolder(pool, with_values(study, condition, candidates[number], seed))
            for number in numbers
            for seed in range(FIRST_SEED, FIRST_SEED + min(upto(number), asked.seeds))
        }
        run_all([*folders.values()])
        for (number, seed), folder in folders.items():
            result = folder.result()
            value = result.scores.get("validation", math.nan) if result else math.nan
            scores.setdefault(number, {})[seed] = value

    sign = 1 if study.file.higher_is_better else -1

    def mean(number: int) -> float:
        values = [value for value in scores[number].values() if value == value]
        whole = len(values) == len(scores[number])  # a run that diverged or failed loses
        return sign * float(np.mean(values)) if whole else -math.inf

    first = _propose(space, asked.candidates, condition, candidates, score, mean)
    kept = sorted(range(len(candidates)), key=mean, reverse=True)
    kept = kept[: max(2, math.ceil(len(kept) / 3))]
    score(kept, lambda number: max(ROUNDS[1], first(number)))
    kept = sorted(kept, key=mean, reverse=True)[:2]
    score(kept, lambda number: asked.seeds)
    kept = sorted(kept, key=mean, reverse=True)
    table = pd.DataFrame(
        {
            **values,
            "n": len(scores[number]),
            "mean": sign * mean(number),
            "sd": float(np.std([*scores[number].values()], ddof=1))
            if len(scores[number]) > 1
            else None,
        }
        for number, values in enumerate(candidates)
    ).sort_values(["n", "mean"], ascending=[False, sign < 0], kind="stable")
    runs = sum(len(each) for each in scores.values())
    return Found(condition, table, candidates[kept[0]], _lead(kept, scores, sign), runs)


def _propose(
    space: Mapping[str, Any],
    count: int,
    condition: str,
    candidates: list[Values],
    score: Callable[[Sequence[int], Callable[[int], int]], None],
    mean: Callable[[int], float],
) -> Callable[[int], int]:
    """Fill the list of candidates, and score each with its first seeds.

    All combinations of short lists are candidates. There are then fewer than `count`, and each has
    more seeds, so that the number of runs is the same for all conditions.
    """
    lists = [one for one in space.values() if isinstance(one, list)]
    combinations = math.prod(map(len, lists)) if len(lists) == len(space) else math.inf
    if combinations <= count:
        candidates += [
            dict(zip(space, values, strict=True)) for values in itertools.product(*lists)
        ]
        each, more = divmod(ROUNDS[0] * count, len(candidates))

        def seeds(number: int) -> int:
            return each + (number < more)

        score(range(len(candidates)), seeds)
        return seeds
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=derive_seed(0, f"search/{condition}") % 2**32)
    trials = optuna.create_study(direction="maximize", sampler=sampler)
    while len(candidates) < count:
        asked = [trials.ask() for _ in range(min(BATCH, count - len(candidates)))]
        begin = len(candidates)
        candidates += [
            {name: _suggest(trial, name, one) for name, one in space.items()} for trial in asked
        ]
        score(range(begin, len(candidates)), lambda number: ROUNDS[0])
        for number, trial in enumerate(asked, begin):
            failed = mean(number) == -math.inf
            state = optuna.trial.TrialState.FAIL if failed else None
            trials.tell(trial, None if failed else mean(number), state=state)
    return lambda number: ROUNDS[0]


def _suggest(trial: optuna.Trial, name: str, one: Any) -> Any:
    if isinstance(one, list):
        return one[trial.suggest_categorical(name, list(range(len(one))))]
    low, high, log = one["low"], one["high"], bool(one.get("log"))
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(name, low, high, log=log)
    return trial.suggest_float(name, low, high, log=log)


def _lead(kept: Sequence[int], scores: Mapping[int, Mapping[int, float]], sign: int) -> str:
    """How far the winner leads the runner-up, in units of the metric, paired by seed."""
    if len(kept) < 2:
        return "there was one candidate"
    first, second = (scores[number] for number in kept[:2])
    both = [sign * (first[seed] - second[seed]) for seed in first if seed in second]
    differences = np.array([each for each in both if each == each])
    low, high = interval(differences, 0.95)
    if len(differences) < 2:
        return "the best two can't be compared"
    text = f"the best leads the second by {differences.mean():.4f} [{low:.4f}, {high:.4f}]"
    return text if low > 0 else f"{text}: they are not ranked, the interval holds 0"
