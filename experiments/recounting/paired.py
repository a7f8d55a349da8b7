"""Paired t-tests and what goes with them; nothing of `experiments.reporting` is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import integrate, optimize, special, stats

Values = dict[int, float]  # seed -> a score


@dataclass(frozen=True)
class Test:
    """A paired t-test: mean, interval, p and corrected p, as shares.

    Args:
        n: pairs.
        mean: of the differences.
        low: end of the 95 % interval.
        high: the other one.
        p: not corrected.
        r: correlation of the two; None where one has no spread.
        pays: whether the interval is shorter than Welch's.
        spread: standard deviation of the differences.
        holm: p, corrected after Holm over all that were tested together.
        family: how many those were.
        tost: corrected p of two one-sided tests; None without a margin.
        margin: of those, in points.
    """

    n: int
    mean: float
    low: float
    high: float
    p: float
    r: float | None
    pays: bool
    spread: float
    holm: float = 1.0
    family: int = 1
    tost: float | None = None
    margin: float | None = None

    @property
    def hidden(self) -> float:
        """How large a difference may be."""
        return max(abs(self.low), abs(self.high))

    @property
    def points(self) -> str:
        """Mean and interval in percentage points."""
        mean, low, high = (two(100 * each, "+") for each in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]"

    @property
    def found(self) -> float:
        """What is found with 80 % chance."""
        return self.spread * effect(self.n, 0.05 / self.family)

    @property
    def verdict(self) -> str:
        """higher, lower, equal (up to the margin) or no."""
        if self.holm < 0.05:
            return "higher" if self.mean > 0 else "lower"
        return "equal" if self.tost is not None and self.tost < 0.05 else "no"


def compare(pairs: Sequence[tuple[Values, Values]], margin: float | None = None) -> list[Test]:
    """The first of each pair minus the second, p corrected after Holm over all of the pairs.

    Args:
        pairs: of scores.
        margin: in points.
    """
    found = [_test(*pair) for pair in pairs]
    tost: list[float | None] = [None] * len(found)
    if margin is not None:
        least = [(abs(t.mean) - margin / 100) / (t.spread / np.sqrt(t.n)) for t in found]
        of_margin = [stats.t.cdf(t, test.n - 1) for t, test in zip(least, found, strict=True)]
        tost = [*holm(of_margin)]
    corrected = holm([test.p for test in found])
    return [
        Test(**{**vars(test), "holm": p, "tost": within, "margin": margin, "family": len(found)})
        for test, p, within in zip(found, corrected, tost, strict=True)
    ]


def _test(one: Values, other: Values) -> Test:
    seeds = sorted(one.keys() & other.keys())
    sides = np.array([[side[s] for s in seeds] for side in (one, other)])
    differences = sides[0] - sides[1]
    n, mean, spread = len(seeds), differences.mean(), differences.std(ddof=1)
    error = spread / np.sqrt(n)
    half = stats.t.isf(0.025, n - 1) * error
    parts = sides.var(axis=1, ddof=1) / n
    freedom = parts.sum() ** 2 / (parts**2 / (n - 1)).sum()
    alone = stats.t.isf(0.025, freedom) * np.sqrt(parts.sum())
    spreads = np.ptp(sides, axis=1).min() > 1e-9
    r = round(float(np.corrcoef(sides)[0, 1]), 12) + 0.0 if spreads else None  # no -0.00
    p = 2 * stats.t.sf(abs(mean) / error, n - 1)
    return Test(n, mean, mean - half, mean + half, p, r, bool(half < alone), spread)


def holm(p_values: Sequence[float]) -> np.ndarray:
    """The p-values corrected after Holm over all of them, in their order."""
    p = np.array(p_values)
    order = np.argsort(p)
    corrected = np.empty(len(p))
    factors = np.arange(len(p), 0, -1)
    corrected[order] = np.minimum(1, np.maximum.accumulate(p[order] * factors))
    return corrected


@cache
def effect(n: int, level: float) -> float:
    """The effect that a paired t-test finds with 80 %, in standard deviations, by integration.

    The t statistic is above its bound where a normal variable is above the bound times the
    standard deviation that was measured, whose distribution is the root of a chi-square.
    """
    freedom = n - 1
    bound = -special.stdtrit(freedom, level / 2)
    log = np.log(2) + freedom / 2 * np.log(freedom / 2) - special.gammaln(freedom / 2)

    def missing(size: float) -> float:
        def above(s: float) -> float:
            density = np.exp(log + (freedom - 1) * np.log(s) - freedom * s * s / 2)
            return float(special.ndtr(size * np.sqrt(n) - bound * s) * density)

        parts = [integrate.quad(above, *ends, epsabs=1e-12) for ends in ((0, 1), (1, np.inf))]
        return float(sum(part[0] for part in parts)) - 0.8

    most = 1.0
    while missing(most) < 0:
        most *= 2
    return float(optimize.brentq(missing, 0, most))


def two(number: float, sign: str = "") -> str:
    """A number with two decimals; a tie is rounded alike, in whatever order it was summed."""
    return f"{round(float(number), 9):{sign}.2f}"


def p_says(p: float) -> str:
    """A p of two digits; of four where two would hide on which side of .05 it is."""
    if p < 0.0001:
        return "<.0001"
    text = f"{p:.2g}"
    if (float(text) < 0.05) != (p < 0.05):
        text = f"{p:.4f}".rstrip("0")
        text = "<.05" if float(text) == 0.05 else text
    return text[1:] if text.startswith("0") else text
