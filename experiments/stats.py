"""Paired differences between conditions, with simultaneous intervals and four words.

The primary comparisons of a study are one family: each pair of conditions on each primary test.
Their intervals hold together with 95 % (Bonferroni), and so do the words:

| word | meaning |
| --- | --- |
| better, worse | the interval is above, or below, 0 |
| same | the interval is within the margin on both sides |
| open | the data do not decide |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from experiments.data import RESERVED
from experiments.runs import RunFolder
from experiments.study import Study

LEVEL = 0.95


def frame_of(folders: Sequence[tuple[str, RunFolder]]) -> pd.DataFrame:
    """Return one row for each run of a study: its status, its scores, its rates and its cost.

    Args:
        folders: the list of `experiments.runs.folders_of`.
    """
    rows = [_row_of(name, folder) for name, folder in folders]
    return pd.DataFrame(rows)


def _row_of(condition: str, folder: RunFolder) -> dict[str, object]:
    """Return the columns of a run that a report needs."""
    row: dict[str, object] = {
        "condition": condition,
        "seed": folder.run.seed,
        "status": folder.status,
    }

    result = folder.result()
    if result is not None and result.epochs:
        for test, score in result.scores.items():
            if test != "validation":
                row[test] = score
        epochs = pd.DataFrame(result.epochs)
        row["chance"] = result.chance
        row["train_loss"] = epochs["loss"].iloc[-1]
        row["nominal"] = epochs["nominal"].mean()
        row["realized"] = epochs["realized"].mean()
        row["seconds"] = epochs["seconds"].median()

    row["error"] = folder.error()
    return row


def epochs_of(folders: Sequence[tuple[str, RunFolder]]) -> pd.DataFrame:
    """Return means over the seeds for each condition and epoch: the training loss and the rates.

    Args:
        folders: the list of `experiments.runs.folders_of`.
    """
    keys = ["condition", "epoch"]
    values = ["loss", "nominal", "realized"]

    rows: list[dict[str, object]] = []
    for name, folder in folders:
        result = folder.result()
        if result is not None:
            rows += [{"condition": name, **epoch} for epoch in result.epochs]
    if not rows:
        return pd.DataFrame(columns=[*keys, *values])

    table = pd.DataFrame(rows).astype({"nominal": float, "realized": float})
    means = table.groupby(keys, sort=False)[values].mean()
    return means.reset_index()


def tests_in(frame: pd.DataFrame) -> list[str]:
    """Return the names of the tests: all columns with scores."""
    return [name for name in frame.columns if name not in RESERVED]


def scale_of(frame: pd.DataFrame) -> float:
    """Return 100 if all scores are shares, so that differences are in points; otherwise 1."""
    scores = frame[tests_in(frame)].to_numpy(dtype=float)
    scores = scores[~np.isnan(scores)]
    are_shares = np.all((scores >= 0) & (scores <= 1))
    return 100.0 if are_shares else 1.0


def compare(frame: pd.DataFrame, study: Study) -> pd.DataFrame:
    """Return all comparisons on all tests, one row each, the primary ones marked.

    The columns are a, b, test, primary, n, difference, sd, low, high, margin, word and p. The
    difference is a minus b, in points, with its standard deviation over the seeds. The simultaneous
    interval goes from low to high. The p-value belongs to the paired t-test. It is not corrected
    for the number of comparisons.
    """
    tests = tests_in(frame)
    primary = study.file.primary or dict.fromkeys(tests[:1], 1.0)
    scale = scale_of(frame)
    sign = 1 if study.file.higher_is_better else -1

    family = max(1, len(study.pairs) * len(primary))
    level = 1 - (1 - LEVEL) / family
    rows = []
    for a, b in study.pairs:
        for test in tests:
            row = {"a": a, "b": b, "test": test, "primary": test in primary}
            differences = scale * paired(frame, a, b, test)
            margin = primary.get(test, np.nan)
            row |= _judged(differences, level, margin, sign)
            rows.append(row)
    return pd.DataFrame(rows)


def _judged(differences: np.ndarray, level: float, margin: float, sign: int) -> dict[str, object]:
    """Return the statistics of the differences of a comparison, and its word."""
    low, high = interval(differences, level)
    series = pd.Series(differences)

    p = np.nan
    if not np.allclose(differences, differences[:1]):
        p = stats.ttest_1samp(differences, 0).pvalue

    return {
        "n": len(differences),
        "difference": series.mean(),
        "low": low,
        "high": high,
        "sd": series.std(),
        "margin": margin,
        "word": word(sign * low, sign * high, margin),
        "p": p,
    }


def paired(frame: pd.DataFrame, a: str, b: str, test: str) -> np.ndarray:
    """Return the differences a minus b of the seeds for which both have a score."""
    wide = frame.pivot(index="seed", columns="condition", values=test)
    if a not in wide or b not in wide:
        return np.array([])
    differences = wide[a] - wide[b]
    return differences.dropna().to_numpy(dtype=float)


def interval(differences: np.ndarray, level: float) -> tuple[float, float]:
    """Return the interval of the mean, by Student's t; NaN for fewer than two differences.

    Example:
        >>> [round(x, 2) for x in interval(np.array([1.0, 2.0, 3.0]), 0.95)]
        [-0.48, 4.48]
    """
    n = len(differences)
    if n < 2:
        return np.nan, np.nan
    quantile = stats.t.ppf((1 + level) / 2, n - 1)
    half = quantile * differences.std(ddof=1) / np.sqrt(n)
    mean = differences.mean()
    return float(mean - half), float(mean + half)


def word(low: float, high: float, margin: float) -> str:
    """Return the verdict of an interval: same, better, worse or open.

    Example:
        >>> word(0.2, 0.8, 1.0), word(0.2, 1.8, 1.0), word(-0.2, 1.8, 1.0)
        ('same', 'better', 'open')
    """
    lower = min(low, high)
    upper = max(low, high)
    if -margin <= lower and upper <= margin:
        return "same"
    if lower > 0:
        return "better"
    if upper < 0:
        return "worse"
    return "open"


def at_chance(best: float, chance: float, sign: int) -> bool:
    """Return whether the best score is within two points of always the most frequent class.

    Args:
        best: score of a condition.
        chance: score of a model that always says the most frequent class; NaN if it is not known.
        sign: -1 if less is better.

    Example:
        >>> at_chance(0.34, 0.33, 1), at_chance(0.34, 0.33, -1), at_chance(0.34, np.nan, 1)
        (True, True, False)
    """
    return sign * (best - chance) < 0.02
