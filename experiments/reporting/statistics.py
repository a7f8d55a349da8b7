"""Paired comparisons over seeds: differences, t intervals, equality, and p corrected after Holm.

Both conditions of a pair have the same seed, hence the same split, noise, initial weights and
order of batches, and what the seed does cancels.

    >>> scores = {"none": {1: 0.50, 2: 0.60, 3: 0.55}, "drop": {1: 0.60, 2: 0.72, 3: 0.69}}
    >>> difference = compare(scores, "none")["drop"]
    >>> round(difference.mean, 3), round(difference.p, 4), difference.verdict
    (0.12, 0.0091, 'higher')

"No difference shown" is not "no difference": `Difference.hidden` says how large one may still be,
`Difference.detectable` how large one has to be to be found, and with a margin two one-sided tests
(TOST) say whether it is smaller. scipy and statsmodels do the arithmetic.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import numpy as np
from scipy import optimize, stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import ttost_paired

LEVEL = 0.05  # of the tests; the intervals have 95 %
POWER = 0.8
ROUNDING = 1e-9  # below what any two shares of images can differ by, and above what rounding does
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Difference:
    """One condition minus another, over the seeds that both have.

    Args:
        n: pairs.
        mean: of the differences; None without a pair.
        interval: of the mean, 95 %, not corrected for other comparisons; None below three pairs,
            and where the differences have no spread.
        p: of the two-sided paired t-test, not corrected; None wherever there is no interval.
        holm: p, corrected over the comparisons that it was one of.
        equal: whether all differences are the same, up to rounding.
        family: how many comparisons p is corrected over.
        margin: as a share; None if it is not asked whether the two are equal up to it.
        tost: p of that: the difference is within the margin; corrected like p.
        pairs: the scores of both.
    """

    n: int
    mean: float | None
    interval: tuple[float, float] | None = None
    p: float | None = None
    holm: float | None = None
    equal: bool = False
    family: int = 1
    margin: float | None = None
    tost: float | None = None
    pairs: tuple[tuple[float, float], ...] = ()

    @property
    def hidden(self) -> float | None:
        """The end of the interval that is farther from zero: how large a difference may be.

        It is the least bound at which two one-sided tests at 2.5 % show that the difference is
        smaller (see `equivalence_p`).
        """
        return None if self.interval is None else max(map(abs, self.interval))

    @property
    def is_within(self) -> bool:
        """Whether the difference is shown to be within the margin."""
        return self.tost is not None and self.tost < LEVEL

    @property
    def verdict(self) -> str:
        """What is shown: a word.

        `higher`, `lower`, `equal` (up to the margin), `not shown`, `identical`, `constant`,
        `too few` or `no pairs`. `constant` is a difference that is the same with every seed, for
        which there is no test. What is `higher` or `lower` may be within the margin, too.
        """
        if self.mean is None:
            return "no pairs"
        if self.equal and self.mean == 0:
            return "identical"
        if self.n < 3:
            return "too few"
        if self.p is None:
            return "constant"
        corrected = self.p if self.holm is None else self.holm
        if corrected >= LEVEL:
            return "equal" if self.is_within else "not shown"
        return "higher" if self.mean > 0 else "lower"

    @property
    def correlation(self) -> float | None:
        """Of the two over the seeds; None without a test, and where one of them has no spread."""
        if self.interval is None or not self.pairs:
            return None
        sides = list(zip(*self.pairs, strict=True))
        if any(max(side) - min(side) <= _dust(side) for side in sides):
            return None
        # without the dust of rounding, whose sign would be told as -0.00
        return round(float(stats.pearsonr(*sides).statistic), 12) + 0.0

    @property
    def pays(self) -> bool | None:
        """Whether pairing shortens the interval, which Welch's has without; None if unknown."""
        if self.correlation is None or self.interval is None:
            return None
        welch = stats.ttest_ind(*zip(*self.pairs, strict=True), equal_var=False)
        alone = welch.confidence_interval(1 - LEVEL)
        return bool(self.interval[1] - self.interval[0] < alone.high - alone.low)

    @property
    def detectable(self) -> float | None:
        """The true difference that such a test finds with 80 % chance, with the spread seen here.

        The level is the strictest of Holm's method: that of the smallest p of the family.
        """
        if self.interval is None or not self.pairs:
            return None
        spread = statistics.stdev(one - other for one, other in self.pairs)
        return spread * detectable_effect(self.n, LEVEL / self.family)


@cache
def detectable_effect(n: int, level: float) -> float:
    """The difference, in standard deviations, that a paired t-test of n pairs finds with 80 %.

    By the noncentral t; the tail on the other side is below 1e-6, and left out.

    Example:
        >>> round(detectable_effect(12, 0.05), 2)
        0.89
    """
    # statsmodels' TTestPower needs both tails, of which one is nan: with 6 pairs it is 10 % off
    bound = stats.t.isf(level / 2, n - 1)

    def missing(effect: float) -> float:
        return float(stats.nct.sf(bound, n - 1, effect * math.sqrt(n))) - POWER

    return float(optimize.brentq(missing, 0.0, 2 * bound / math.sqrt(n) + 3))


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """`values - baseline`, pair by pair, with the interval and p of the paired t-test."""
    pairs = tuple(zip(values, baseline, strict=True))
    differences = [value - base for value, base in pairs]
    if not differences:
        return Difference(0, None)
    n, mean = len(differences), statistics.fmean(differences)
    dust = _dust([*values, *baseline])
    if max(differences) - min(differences) <= dust:
        return Difference(n, 0.0 if abs(mean) <= dust else mean, equal=True, pairs=pairs)
    if n < 3:
        return Difference(n, mean, pairs=pairs)
    test = stats.ttest_rel(values, baseline)
    low, high = test.confidence_interval(1 - LEVEL)
    interval = (float(low), float(high))
    return Difference(n, mean, interval, float(test.pvalue), pairs=pairs)


def _dust(values: Sequence[float]) -> float:
    """What rounding may do to values."""
    return ROUNDING * max(1.0, *map(abs, values))


def equivalence_p(values: Sequence[float], baseline: Sequence[float], bound: float) -> float | None:
    """The p of two one-sided paired t-tests (TOST): is the difference between -bound and +bound?

    A small p shows that the two are equal up to the bound; None where there is no t-test.

    Example:
        >>> round(equivalence_p([0.61, 0.70, 0.66], [0.60, 0.71, 0.65], bound=0.05), 3)
        0.01

    Raises:
        ValueError: if the bound is not positive.
    """
    if not bound > 0:
        raise ValueError(f"bound must be positive, got {bound}")
    if paired_difference(values, baseline).interval is None:
        return None
    return float(ttost_paired(np.asarray(values), np.asarray(baseline), -bound, bound)[0])


def average(replicas: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Seed -> the mean of what one condition scored in its replicas, of those that have the seed.

    Example:
        >>> average([{1: 0.50, 2: 0.60}, {1: 0.54}])
        {1: 0.52, 2: 0.6}
    """
    seeds = dict.fromkeys(seed for replica in replicas for seed in replica)
    return {seed: statistics.fmean(r[seed] for r in replicas if seed in r) for seed in seeds}


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The t interval of a mean, 95 %; None below three values and where they have no spread."""
    difference = paired_difference(values, [0.0] * len(values))
    return difference.interval


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """The p-values, corrected after Holm (1979) over all of them, in their order.

    A comparison without a p counts as one that shows nothing: the others are corrected for it.

    Example:
        >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03, 0.005])]
        [0.03, 0.06, 0.06, 0.02]
    """
    counted = [1.0 if p is None else p for p in p_values]
    gc.freeze()  # it collects all garbage, which takes long where a lot is loaded
    try:
        corrected = multipletests(counted, method="holm")[1] if counted else []
    finally:
        gc.unfreeze()
    return [None if p is None else float(c) for p, c in zip(p_values, corrected, strict=True)]


def compare(scores: Mapping[str, Mapping[int, float]], baseline: str) -> dict[str, Difference]:
    """Every other condition against the baseline, paired by seed, corrected over all of them.

    Args:
        scores: condition -> seed -> score; a seed that has no score is left out.
        baseline: one of the conditions.

    Raises:
        ValueError: for a score that is not finite.
    """
    others = [condition for condition in scores if condition != baseline]
    found = compare_pairs(scores, [(condition, baseline) for condition in others])
    return dict(zip(others, found, strict=True))


def compare_pairs(
    scores: Mapping[Name, Mapping[int, float]],
    pairs: Sequence[tuple[Name, Name]],
    margin: float | None = None,
) -> list[Difference]:
    """The first of each pair minus the second, paired by seed, corrected over all of the pairs.

    Args:
        scores: condition, or whatever stands for several -> seed -> score.
        pairs: of keys of the scores.
        margin: as a share: tested is, too, whether each difference is within it.

    Example:
        >>> scores = {"a": {1: 0.5, 2: 0.6, 3: 0.5}, "b": {1: 0.6, 2: 0.72, 3: 0.64}}
        >>> round(compare_pairs(scores, [("b", "a")])[0].mean, 3)
        0.12

    Raises:
        ValueError: for a score that is not finite.
    """
    for condition, by_seed in scores.items():
        for seed, score in by_seed.items():
            if not math.isfinite(score):
                raise ValueError(
                    f"a score must be finite, got {score} of {condition!r} with seed {seed}"
                )
    found, within = [], []
    for one, other in pairs:
        common = [seed for seed in scores[one] if seed in scores[other]]
        sides = [[scores[side][seed] for seed in common] for side in (one, other)]
        found.append(paired_difference(sides[0], sides[1]))
        within.append(None if margin is None else equivalence_p(sides[0], sides[1], margin))
    corrected = holm([difference.p for difference in found])
    return [
        replace(one, holm=p, family=len(found), margin=margin, tost=tost)
        for one, p, tost in zip(found, corrected, holm(within), strict=True)
    ]
