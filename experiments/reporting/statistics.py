"""Paired comparisons over seeds: differences, t intervals, and p-values corrected after Holm.

Both conditions of a pair have the same seed, hence the same split, noise, initial weights and
order of batches, and what the seed does cancels.

    >>> scores = {"none": {1: 0.50, 2: 0.60, 3: 0.55}, "drop": {1: 0.60, 2: 0.72, 3: 0.69}}
    >>> difference = compare(scores, "none")["drop"]
    >>> round(difference.mean, 3), round(difference.p, 4), difference.verdict
    (0.12, 0.0091, 'higher')

"No difference shown" is not "no difference": `Difference.hidden` says how large one may still be,
and `equivalence_p` tests whether it is below a bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scipy.special import stdtr, stdtrit

LEVEL = 0.05  # of the tests; the intervals have 95 %
ROUNDING = 1e-9  # below what any two shares of images can differ by, and above what rounding does


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
    """

    n: int
    mean: float | None
    interval: tuple[float, float] | None = None
    p: float | None = None
    holm: float | None = None
    equal: bool = False

    @property
    def hidden(self) -> float | None:
        """The end of the interval that is farther from zero: how large a difference may be.

        It is the least bound at which two one-sided tests at 2.5 % show that the difference is
        smaller (see `equivalence_p`).
        """
        return None if self.interval is None else max(map(abs, self.interval))

    @property
    def verdict(self) -> str:
        """`higher`, `lower`, `not shown`, `identical`, `constant`, `too few` or `no pairs`.

        `constant` is a difference that is the same with every seed, for which the t-test has no p.
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
            return "not shown"
        return "higher" if self.mean > 0 else "lower"


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """`values - baseline`, pair by pair, with the interval and p of the paired t-test."""
    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    if not differences:
        return Difference(0, None)
    n, mean = len(differences), statistics.fmean(differences)
    dust = ROUNDING * max(1.0, *map(abs, values), *map(abs, baseline))
    if max(differences) - min(differences) <= dust:
        return Difference(n, 0.0 if abs(mean) <= dust else mean, equal=True)
    if n < 3:
        return Difference(n, mean)
    error = statistics.stdev(differences) / math.sqrt(n)
    half = float(stdtrit(n - 1, 1 - LEVEL / 2)) * error
    p = 2 * float(stdtr(n - 1, -abs(mean) / error))  # both tails of Student's t
    return Difference(n, mean, (mean - half, mean + half), p)


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
    found = paired_difference(values, baseline)
    if found.mean is None or found.interval is None:
        return None
    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(found.n)
    return float(stdtr(found.n - 1, (abs(found.mean) - bound) / error))


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
    known = [(p, index) for index, p in enumerate(p_values) if p is not None]
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(sorted(known)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        corrected[index] = largest
    return corrected


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
    scores: Mapping[str, Mapping[int, float]], pairs: Sequence[tuple[str, str]]
) -> list[Difference]:
    """The first of each pair minus the second, paired by seed, corrected over all of the pairs.

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
    found = []
    for one, other in pairs:
        common = [seed for seed in scores[one] if seed in scores[other]]
        found.append(
            paired_difference(
                [scores[one][seed] for seed in common], [scores[other][seed] for seed in common]
            )
        )
    corrected = holm([difference.p for difference in found])
    return [replace(one, holm=p) for one, p in zip(found, corrected, strict=True)]
