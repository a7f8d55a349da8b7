"""From the runs of a study to a table: means, paired differences, rates, seconds.

Differences are paired: both conditions of a pair have the same seed, hence the same split, noise,
initial weights and batch order, and what the seed does cancels.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table
from scipy import stats

from experiments.study import Run
from experiments.train import Result


@dataclass(frozen=True)
class Difference:
    """A mean paired difference, with its 95 % interval and p of the paired t-test.

    Interval and p are None below three pairs, and where the differences have no spread.
    """

    mean: float
    interval: tuple[float, float] | None
    p: float | None


@dataclass(frozen=True)
class Row:
    """One condition over its seeds; accuracies are shares, rates are means over training.

    Args:
        std: of the accuracy over the seeds (n - 1); None for one seed.
        difference: to the baseline; None for the baseline itself.
        nominal: the rate asked for; None where nothing is dropped.
        realized: the share dropped.
        seconds: of one run, on average.
    """

    condition: str
    n: int
    accuracy: float
    std: float | None
    difference: Difference | None
    nominal: float | None
    realized: float | None
    seconds: float


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """The mean of `values - baseline`, pair by pair, with paired-t interval and p."""
    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    mean = statistics.fmean(differences)
    spread = max(differences) - min(differences)
    if len(differences) < 3 or spread < 1e-9:  # less than any two accuracies can differ
        return Difference(mean, None, None)
    test = stats.ttest_1samp(differences, 0.0)
    interval = test.confidence_interval(0.95)
    return Difference(mean, (float(interval.low), float(interval.high)), float(test.pvalue))


def mean_rates(result: Result) -> tuple[float, float] | None:
    """Nominal and realized rate, each a mean over the epochs and those sites that have both."""
    pairs = [
        (asked, dropped)
        for key, rates in result.nominal.items()
        for asked, dropped in zip(rates, result.realized[key], strict=True)
        if asked is not None and dropped is not None
    ]
    if not pairs:
        return None
    return statistics.fmean(pair[0] for pair in pairs), statistics.fmean(pair[1] for pair in pairs)


def summarize(runs: Sequence[Run], baseline: str) -> list[Row]:
    """One row per condition, in the order in which they were run."""
    conditions = dict.fromkeys(run.condition for run in runs)
    accuracies = {
        name: {run.config.seed: run.result.accuracy for run in runs if run.condition == name}
        for name in conditions
    }
    rows = []
    for name, by_seed in accuracies.items():
        results = [run.result for run in runs if run.condition == name]
        rates = [pair for result in results if (pair := mean_rates(result))]
        values = list(by_seed.values())
        base = [accuracies[baseline][seed] for seed in by_seed]
        rows.append(
            Row(
                condition=name,
                n=len(values),
                accuracy=statistics.fmean(values),
                std=statistics.stdev(values) if len(values) > 1 else None,
                difference=None if name == baseline else paired_difference(values, base),
                nominal=statistics.fmean(pair[0] for pair in rates) if rates else None,
                realized=statistics.fmean(pair[1] for pair in rates) if rates else None,
                seconds=statistics.fmean(result.seconds for result in results),
            )
        )
    return rows


def table(rows: Sequence[Row], baseline: str) -> Table:
    """The rows as text: accuracies in percent, differences in percentage points, seconds a run."""
    view = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    view.add_column("condition", overflow="fold")
    view.add_column("n", justify="right")
    view.add_column("accuracy, %", no_wrap=True)
    view.add_column(f"minus {baseline} [95 %]")
    view.add_column("p")
    view.add_column("rate", justify="right")
    view.add_column("realized", justify="right")
    view.add_column("s", justify="right")
    for row in rows:
        spread = "" if row.std is None else f" ± {100 * row.std:.2f}"
        view.add_row(
            row.condition,
            str(row.n),
            f"{100 * row.accuracy:.2f}{spread}",
            *_difference_cells(row.difference),
            "" if row.nominal is None else f"{row.nominal:.4f}",
            "" if row.realized is None else f"{row.realized:.4f}",
            f"{row.seconds:.1f}",
        )
    return view


def write_csv(runs: Sequence[Run], path: str | Path) -> None:
    """One line per run: condition, seed, accuracy, last loss, rates, seconds."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["condition", "seed", "accuracy", "loss", "nominal", "realized", "seconds"])
        for run in runs:
            result = run.result
            rates = mean_rates(result) or ("", "")
            values = (result.accuracy, result.loss[-1], *rates, result.seconds)
            writer.writerow([run.condition, run.config.seed, *values])


def _difference_cells(difference: Difference | None) -> tuple[str, str]:
    if difference is None:
        return "", ""
    text = f"{100 * difference.mean:+.2f}"
    if difference.interval is not None:
        low, high = difference.interval
        text += f" [{100 * low:+.2f}, {100 * high:+.2f}]"
    return text, "" if difference.p is None else f"{difference.p:.2g}"
