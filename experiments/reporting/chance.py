"""What chance alone does: all pairs of the replicas of one condition (A/A).

A pair's p is below .05 in 5 % of cases, if the tests are right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from scipy import stats

from experiments.reporting.statistics import LEVEL, Difference, compare_pairs
from experiments.reporting.summary import Row


@dataclass(frozen=True)
class Chance:
    """Replicas of one condition, in pairs.

    Args:
        condition: that they are of.
        replicas: names of all of them.
        differences: later one and earlier one -> the difference; p is not corrected.
    """

    condition: str
    replicas: tuple[str, ...]
    differences: dict[tuple[str, str], Difference]

    @property
    def tested(self) -> int:
        """How many pairs have a p."""
        return sum(one.p is not None for one in self.differences.values())

    @property
    def alarms(self) -> int:
        """How many of those have a p below .05."""
        return sum(one.p is not None and one.p < LEVEL for one in self.differences.values())

    @property
    def interval(self) -> tuple[float, float]:
        """Of the share of p < .05, 95 %, after Clopper and Pearson."""
        low, high = stats.binomtest(self.alarms, self.tested).proportion_ci(1 - LEVEL)
        return float(low), float(high)


def pairs_of_replicas(replicas: Mapping[str, Mapping[int, float]]) -> Chance:
    """All distinct pairs of replicas, compared seed by seed.

    Args:
        replicas: name -> seed -> score, each for itself; the first is the one that is repeated.

    Example:
        >>> scores = {name: {1: 0.5, 2: 0.6, 3: 0.5 + place} for place, name in enumerate("abc")}
        >>> found = pairs_of_replicas(scores)
        >>> len(found.differences), found.tested, found.alarms
        (3, 3, 0)
    """
    pairs = [(later, earlier) for earlier, later in combinations(replicas, 2)]
    found = compare_pairs(replicas, pairs)
    return Chance(next(iter(replicas)), (*replicas,), dict(zip(pairs, found, strict=True)))


def chances(rows: Sequence[Row], split: str) -> list[Chance]:
    """That of each condition that has two replicas or more besides itself."""
    own = {
        row.condition: {s: r.scores[split] for s, r in row.results.items() if split in r.scores}
        for row in rows
    }
    return [
        pairs_of_replicas({name: own[name] for name in (row.condition, *row.replicas)})
        for row in rows
        if len(row.replicas) > 1
    ]
