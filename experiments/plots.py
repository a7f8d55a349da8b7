"""The two pictures of a report: the forest of differences, and the learning curves."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = {
    "better": "C2",
    "worse": "C3",
    "same": "C0",
    "open": "0.5",
}


def forest(compared: pd.DataFrame, unit: str = "points") -> Figure:
    """Draw each difference with its simultaneous interval; margins are gray bands.

    Args:
        compared: the table of `experiments.stats.compare`.
        unit: the unit of the differences.
    """
    tests = compared["test"].unique().tolist()
    number_of_tests = len(tests)
    labels = _labels_of(compared).unique().tolist()
    number = len(labels)
    positions = range(number)

    width = 2.2 + 2.4 * number_of_tests
    height = 1.2 + 0.34 * number
    size = width, height
    figure = Figure(figsize=size, layout="constrained")

    grid = figure.subplots(1, number_of_tests, squeeze=False, sharey=True)
    columns = grid[0]

    for axes, test in zip(columns, tests, strict=True):
        of_test = compared["test"] == test
        rows = compared[of_test]
        _draw_differences(axes, rows, labels)
        axes.set_title(test, fontsize=10)
        axes.set_xlabel(unit, fontsize=9)
        axes.set_yticks(positions, labels, fontsize=8)

    lowest = number - 0.5
    columns[0].set_ylim(lowest, -0.5)
    return figure


def _labels_of(compared: pd.DataFrame) -> pd.Series:
    """Return a label such as `DropBlock2d − none` for each comparison."""
    return compared["a"] + " − " + compared["b"]


def _draw_differences(axes: Axes, rows: pd.DataFrame, labels: list[str]) -> None:
    """Draw the intervals of a test; the place of a label is its height."""
    axes.axvline(0, color="0.3", lw=0.8)
    margin = rows["margin"].max()
    if not math.isnan(margin):
        axes.axvspan(-margin, margin, color="0.92", zorder=0)

    labels_of_rows = _labels_of(rows)
    for label, row in zip(labels_of_rows, rows.itertuples(), strict=True):
        height = labels.index(label)
        color = COLORS[row.word]
        inside = color if row.primary else "white"

        ends = [row.low, row.high]
        axes.plot(ends, [height, height], color=color, lw=2)
        axes.plot(row.difference, height, "o", color=color, ms=5, mfc=inside)


def learning(epochs: pd.DataFrame) -> Figure:
    """Draw the training loss of each condition, and its nominal and realized rates.

    Args:
        epochs: the table of `experiments.stats.epochs_of`.
    """
    figure = Figure(figsize=(8, 3), layout="constrained")
    losses, rates = figure.subplots(1, 2)
    losses.set(yscale="log", title="training loss", xlabel="epoch")
    rates.set(title="rate: realized, and nominal (dotted)", xlabel="epoch")

    conditions = epochs.groupby("condition", sort=False)
    for index, (name, rows) in enumerate(conditions):
        color = f"C{index}"
        epoch = rows["epoch"]
        loss = rows["loss"]
        nominal = rows["nominal"]
        realized = rows["realized"]

        losses.plot(epoch, loss, color=color, label=name)
        has_rate = nominal.notna().any()
        if has_rate:
            rates.plot(epoch, nominal, color=color, lw=1, ls=":")
            rates.plot(epoch, realized, color=color, label=name)

    losses.legend(fontsize=8)
    return figure


def save(figure: Figure, path: Any) -> None:
    """Save a picture; its bytes follow from the data and the version of matplotlib."""
    figure.savefig(path, dpi=100, metadata={"Software": None})
