"""From the runs of a study to a row per condition: scores, differences, rates, cost.

Conditions that differ in their `replica` alone are one condition, run several times: its scores
are averaged over them, seed by seed, before it is compared. How far they are apart is what chance
alone does: an A/A check.

rows = summarize(*read_runs(directory))
rows[1].scores["clean"].difference.verdict    # "higher", say
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import dropblock_hooks
from dropblock_hooks import Regularizer
from experiments.config import Config
from experiments.reporting.comparisons import Family, against_baseline, families
from experiments.reporting.statistics import Difference, average, compare, mean_interval
from experiments.results import Result
from experiments.running.records import Run, StudyRecord


@dataclass(frozen=True)
class Score:
    """One score of one condition over its seeds.

    Args:
        values: seed -> share of the test images classified right, averaged over replicas.
        mean: None without a value.
        std: over the seeds (n - 1); None below two.
        interval: of the mean, 95 %, by t; None below three.
        difference: to the baseline; None for the baseline itself. That of a replica is to the run
            that it repeats, and not corrected.
    """

    values: dict[int, float]
    mean: float | None
    std: float | None
    interval: tuple[float, float] | None
    difference: Difference | None


@dataclass(frozen=True)
class Row:
    """One condition.

    Args:
        condition: its name.
        baseline: the name of the one that it is compared to.
        factors: factor -> level; empty for a condition of its own.
        config: of its first run.
        runs: all of them, also those that have no result.
        scores: test split -> its score; of a condition with replicas, the mean over them.
        replicas: names of the conditions that repeat this one, and are part of its scores.
        repeats: the name of the condition that this one repeats.
        nominal: the rate asked for, mean over seeds, epochs and sites; None without one.
        realized: the share dropped (Disout: changed), likewise.
        seconds: of a run, on average; None if no run is finished.
        memory: of a run, on average, in bytes.
        seconds_ratio: seconds over those of the baseline, of the seeds that both have.
        memory_ratio: memory, likewise.
    """

    condition: str
    baseline: str
    factors: dict[str, str]
    config: Config
    runs: tuple[Run, ...]
    scores: dict[str, Score]
    nominal: float | None
    realized: float | None
    seconds: float | None
    memory: float | None
    seconds_ratio: float | None
    memory_ratio: float | None
    replicas: tuple[str, ...] = ()
    repeats: str | None = None

    @property
    def results(self) -> dict[int, Result]:
        """Seed -> result, of the runs that are finished."""
        return _results(self.runs)

    @property
    def n(self) -> int:
        """How many runs are finished."""
        return len(self.results)

    @property
    def is_baseline(self) -> bool:
        """Whether the others are compared to it."""
        return self.condition == self.baseline


def summarize(record: StudyRecord, runs: Sequence[Run]) -> list[Row]:
    """One row per condition: the baseline, then the others in the order of the study.

    Raises:
        ValueError: if the baseline is none of the conditions.
    """
    if record.baseline not in record.conditions:
        raise ValueError(f"the baseline {record.baseline!r} is none of the study's conditions")
    names = dict.fromkeys([record.baseline, *record.conditions])
    of_names = {name: tuple(run for run in runs if run.condition == name) for name in names}
    by_condition = {name: of_one for name, of_one in of_names.items() if of_one}
    results = {name: _results(of_one) for name, of_one in by_condition.items()}
    every = [result for of_one in results.values() for result in of_one.values()]
    found = dict.fromkeys(split for result in every for split in result.scores)
    repeats = _repeats(by_condition)
    scores: dict[str, dict[str, Score]] = {name: {} for name in by_condition}
    for split in sorted(found, key=lambda split: split != "clean"):
        of_split = {
            name: {seed: r.scores[split] for seed, r in of_one.items() if split in r.scores}
            for name, of_one in results.items()
        }
        contrasts = [one for one in record.contrasts if one.test == split]
        families_of = partial(families, contrasts=contrasts)
        for name, score in _scores(record.baseline, of_split, repeats, families_of).items():
            scores[name][split] = score
    rows = [
        _row(record.baseline, of_one, scores[name], results.get(record.baseline, {}))
        for name, of_one in by_condition.items()
    ]
    return [
        replace(
            row,
            repeats=repeats.get(row.condition),
            replicas=tuple(name for name, first in repeats.items() if first == row.condition),
        )
        for row in rows
    ]


def compared(rows: Sequence[Row]) -> list[Row]:
    """The conditions that are compared: the baseline, and all that repeat no other one."""
    return [row for row in rows if row.repeats is None]


def checks(rows: Sequence[Row]) -> list[Row]:
    """The A/A conditions."""
    return [row for row in rows if row.repeats is not None]


def _repeats(by_condition: Mapping[str, tuple[Run, ...]]) -> dict[str, str]:
    """Name of a condition -> that of the first one with the same config but for `replica`."""
    firsts: list[tuple[Config, str]] = []
    repeats = {}
    for name, runs in by_condition.items():
        config = runs[0].config
        first = next((first for other, first in firsts if is_replica(config, other)), None)
        if first is None:
            firsts.append((config, name))
        else:
            repeats[name] = first
    return repeats


def _scores(
    baseline: str,
    values: dict[str, dict[int, float]],
    repeats: Mapping[str, str],
    families_of: Callable[[Mapping[str, Mapping[int, float]]], list[Family]],
) -> dict[str, Score]:
    """A score for each condition: of replicas their own, of what they repeat the mean."""
    averaged = {
        name: average([of_one, *(values[other] for other in repeats if repeats[other] == name)])
        for name, of_one in values.items()
        if name not in repeats
    }
    differences = against_baseline(averaged, baseline, families_of(averaged))
    for name, first in repeats.items():
        differences[name] = compare({name: values[name], first: values[first]}, first)[name]
    return {
        name: _score(averaged.get(name, of_one), differences.get(name))
        for name, of_one in values.items()
    }


def contrasted(record: StudyRecord, rows: Sequence[Row]) -> list[Family]:
    """The families of the study's contrasts, each on its own test images, primary ones first."""
    found = []
    for asked in record.contrasts:
        scores = {row.condition: row.scores.get(asked.test) for row in compared(rows)}
        values = {name: {} if score is None else score.values for name, score in scores.items()}
        found += families(values, [asked])
    return sorted(found, key=lambda family: not family.is_primary)


def _row(
    baseline: str, runs: tuple[Run, ...], scores: dict[str, Score], base: dict[int, Result]
) -> Row:
    results = _results(runs)
    rates = [pair for result in results.values() if (pair := mean_rates(result))]
    pairs = [(result, base[seed]) for seed, result in results.items() if seed in base]
    return Row(
        condition=runs[0].condition,
        baseline=baseline,
        factors=runs[0].factors,
        config=runs[0].config,
        runs=runs,
        scores=scores,
        nominal=_mean([pair[0] for pair in rates]),
        realized=_mean([pair[1] for pair in rates]),
        seconds=_mean([result.seconds for result in results.values()]),
        memory=_mean([result.memory for result in results.values()]),
        seconds_ratio=_ratio([(one.seconds, other.seconds) for one, other in pairs]),
        memory_ratio=_ratio([(one.memory, other.memory) for one, other in pairs]),
    )


def _score(values: dict[int, float], difference: Difference | None) -> Score:
    numbers = list(values.values())
    return Score(
        values=values,
        mean=_mean(numbers),
        std=statistics.stdev(numbers) if len(numbers) > 1 else None,
        interval=mean_interval(numbers),
        difference=difference,
    )


def _results(runs: Iterable[Run]) -> dict[int, Result]:
    return {run.seed: run.result for run in runs if run.status == "finished" and run.result}


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _ratio(pairs: Sequence[tuple[float, float]]) -> float | None:
    below = sum(base for _, base in pairs)
    return sum(value for value, _ in pairs) / below if below else None


def is_tested(score: Score) -> bool:
    """Whether its difference to the baseline has a p-value."""
    return score.difference is not None and score.difference.p is not None


def is_replica(config: Config, of: Config) -> bool:
    """Whether a config is another one but for its `replica` and seed: an A/A check.

    Example:
        >>> is_replica(Config(replica=1), Config()), is_replica(Config(epochs=2), Config())
        (True, False)
    """
    return config.replica != of.replica and replace(config, seed=of.seed, replica=of.replica) == of


def drops(site: str) -> bool:
    """Whether a site's rate is a share dropped or changed, which bounds and strengths are not.

    Example:
        >>> drops("layer4.0/DropBlock2d"), drops("layer4.0/ClipGradNorm#2")
        (True, False)
    """
    name = site.rpartition("/")[2].partition("#")[0]
    cls = getattr(dropblock_hooks, name, None)
    if not (isinstance(cls, type) and issubclass(cls, Regularizer)):
        return True  # a peer's
    return any(field.name == "p" for field in fields(cls))


def epoch_rates(result: Result) -> list[list[tuple[float, float]]]:
    """For each epoch, (nominal, realized) of those sites that have both."""
    return [
        [
            (asked, dropped)
            for site, asked in epoch.nominal.items()
            if asked is not None
            and (dropped := epoch.realized.get(site)) is not None
            and drops(site)
        ]
        for epoch in result.epochs
    ]


def mean_rates(result: Result) -> tuple[float, float] | None:
    """Nominal and realized rate, each a mean over the epochs and those sites that have both."""
    pairs = [pair for epoch in epoch_rates(result) for pair in epoch]
    if not pairs:
        return None
    return statistics.fmean(pair[0] for pair in pairs), statistics.fmean(pair[1] for pair in pairs)
