"""Paired differences between conditions, with simultaneous intervals and four words.

The primary comparisons of a study are one family: each pair of conditions on each primary test.
Their intervals hold together with 95 % (Bonferroni), and so do the words:

| word | meaning |
| --- | --- |
| better, worse | the interval is above, or below, 0 |
| same | the interval is within the margin on both sides |
| open | neither: the data do not tell |
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
    """One row for each run of a study: its status, its scores, its rates and its cost.

    Args:
        folders: what `experiments.runs.folders_of` returned.
    """
    rows = []
    for name, folder in folders:
        seed, status = folder.run.seed, folder.status
        row: dict[str, object] = {"condition": name, "seed": seed, "status": status}
        result = folder.result()
        if result is not None and result.epochs:
            epochs = pd.DataFrame(result.epochs)
            row |= {key: value for key, value in result.scores.items() if key != "validation"}
            row |= {"chance": result.chance, "train_loss": epochs["loss"].iloc[-1]}
            row |= {"nominal": epochs["nominal"].mean(), "realized": epochs["realized"].mean()}
            row |= {"seconds": epochs["seconds"].median()}
        row["error"] = folder.error()
        rows.append(row)
    return pd.DataFrame(rows)


def epochs_of(folders: Sequence[tuple[str, RunFolder]]) -> pd.DataFrame:
    """Means over the seeds for each condition and epoch: the training loss and the rates.

    Args:
        folders: what `experiments.runs.folders_of` returned.
    """
    rows = []
    for name, folder in folders:
        result = folder.result()
        rows += [{"condition": name, **epoch} for epoch in (result.epochs if result else [])]
    if not rows:
        return pd.DataFrame(columns=["condition", "epoch", "loss", "nominal", "realized"])
    table = pd.DataFrame(rows).astype({"nominal": float, "realized": float})
    means = table.groupby(["condition", "epoch"], sort=False)[["loss", "nominal", "realized"]]
    return means.mean().reset_index()


def tests_in(frame: pd.DataFrame) -> list[str]:
    """The names of the tests: all columns with scores."""
    return [name for name in frame.columns if name not in RESERVED]


def scale_of(frame: pd.DataFrame) -> float:
    """100 where all scores are shares, so that differences are in points; otherwise 1."""
    values = frame[tests_in(frame)].to_numpy(dtype=float)
    return 100.0 if np.all(np.isnan(values) | ((values >= 0) & (values <= 1))) else 1.0


def compare(frame: pd.DataFrame, study: Study) -> pd.DataFrame:
    """All comparisons on all tests, one row each, the primary ones marked.

    Columns: a, b, test, primary, n, difference (a minus b, in points), sd (of the differences),
    low and high (the simultaneous interval), margin, word, and p (of the paired t-test, not
    corrected for the number of comparisons).
    """
    primary = study.file.primary or dict.fromkeys(tests_in(frame)[:1], 1.0)
    scale, sign = scale_of(frame), 1 if study.file.higher_is_better else -1
    family = max(1, len(study.pairs) * len(primary))
    rows = []
    for a, b in study.pairs:
        for test in tests_in(frame):
            deltas = scale * paired(frame, a, b, test)
            low, high = interval(deltas, 1 - (1 - LEVEL) / family)
            margin = primary.get(test, np.nan)
            row = {"a": a, "b": b, "test": test, "primary": test in primary}
            row |= {"n": len(deltas), "difference": pd.Series(deltas).mean()}
            row |= {"low": low, "high": high, "sd": pd.Series(deltas).std()}
            row |= {"margin": margin, "word": word(sign * low, sign * high, margin)}
            p = np.nan if np.allclose(deltas, deltas[:1]) else stats.ttest_1samp(deltas, 0).pvalue
            rows.append({**row, "p": p})
    return pd.DataFrame(rows)


def paired(frame: pd.DataFrame, a: str, b: str, test: str) -> np.ndarray:
    """The differences a minus b of the seeds for which both have a score."""
    wide = frame.pivot(index="seed", columns="condition", values=test)
    if a not in wide or b not in wide:
        return np.array([])
    return (wide[a] - wide[b]).dropna().to_numpy(dtype=float)


def interval(differences: np.ndarray, level: float) -> tuple[float, float]:
    """The interval of the mean, by Student's t; NaN for fewer than two differences.

    Example:
        >>> [round(x, 2) for x in interval(np.array([1.0, 2.0, 3.0]), 0.95)]
        [-0.48, 4.48]
    """
    n = len(differences)
    if n < 2:
        return np.nan, np.nan
    half = stats.t.ppf((1 + level) / 2, n - 1) * differences.std(ddof=1) / np.sqrt(n)
    mean = differences.mean()
    return float(mean - half), float(mean + half)


def word(low: float, high: float, margin: float) -> str:
    """The verdict of an interval: same, better, worse or open.

    Example:
        >>> word(0.2, 0.8, 1.0), word(0.2, 1.8, 1.0), word(-0.2, 1.8, 1.0)
        ('same', 'better', 'open')
    """
    low, high = min(low, high), max(low, high)
    if -margin <= low and high <= margin:
        return "same"
    return "better" if low > 0 else "worse" if high < 0 else "open"


def at_chance(best: float, chance: float, sign: int) -> bool:
    """Whether the best score is within two points of the most frequent class alone.

    Args:
        best: score of a condition.
        chance: score of a model that always says the most frequent class; NaN if it is not known.
        sign: -1 if less is better.

    Example:
        >>> at_chance(0.34, 0.33, 1), at_chance(0.34, 0.33, -1), at_chance(0.34, np.nan, 1)
        (True, True, False)
    """
    return sign * (best - chance) < 0.02
