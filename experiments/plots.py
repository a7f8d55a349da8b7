"""The pictures of a report and of its data.

forest     the differences between conditions, with their intervals
learning   the training loss of each condition, and its rates
samples    an image of each class, from each test
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

# For all that draws here. Ticks are made when a picture is saved, so `save` needs it, too.
in_style = style.context("dropblock_hooks.plots.light_and_dark")

COLORS = {
    "better": "C2",
    "worse": "C3",
    "same": "C0",
    "open": "0.5",
}


@in_style
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

    width = 2.5 + 1.5 * number_of_tests
    height = 1.2 + 0.34 * number
    size = width, height
    figure = Figure(figsize=size)

    grid = figure.subplots(1, number_of_tests, squeeze=False, sharey=True)
    columns = grid[0]

    for axes, test in zip(columns, tests, strict=True):
        of_test = compared["test"] == test
        rows = compared[of_test]
        _draw_differences(axes, rows, labels)
        axes.set_title(test)
        axes.set_xlabel(unit)
        axes.set_yticks(positions, labels)

    lowest = number - 0.5
    columns[0].set_ylim(lowest, -0.5)
    return figure


def _labels_of(compared: pd.DataFrame) -> pd.Series:
    """Return a label such as `DropBlock2d − none` for each comparison."""
    return compared["a"] + " − " + compared["b"]


def _draw_differences(axes: Axes, rows: pd.DataFrame, labels: list[str]) -> None:
    """Draw the intervals of a test; the place of a label is its height."""
    axes.axvline(0, color="0.5", lw=0.8)
    margin = rows["margin"].max()
    if not math.isnan(margin):
        axes.axvspan(-margin, margin, color="0.5", alpha=0.2, lw=0, zorder=0)

    labels_of_rows = _labels_of(rows)
    for label, row in zip(labels_of_rows, rows.itertuples(), strict=True):
        height = labels.index(label)
        color = COLORS[row.word]
        inside = color if row.primary else "white"

        ends = [row.low, row.high]
        axes.plot(ends, [height, height], color=color, lw=2)
        axes.plot(row.difference, height, "o", color=color, ms=5, mfc=inside)


@in_style
def learning(epochs: pd.DataFrame) -> Figure:
    """Draw the training loss of each condition, and its nominal and realized rates.

    Args:
        epochs: the table of `experiments.stats.epochs_of`.
    """
    figure = Figure()
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

    handles, labels = losses.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    return figure


@in_style
def samples(images: Mapping[str, Sequence[Tensor]]) -> Figure:
    """Draw images of one channel in a row for each test, with a column for each class.

    Args:
        images: one image of each class, (1, H, W) with values from 0 to 1, by the name of the test.
    """
    classes = max(len(of_test) for of_test in images.values())
    height = 0.25 + 0.73 * len(images)
    figure = Figure(figsize=(8, height))
    layout = figure.get_layout_engine()
    layout.set(w_pad=0.01, h_pad=0.01, wspace=0, hspace=0)

    grid = figure.subplots(len(images), classes, squeeze=False)

    for row, test in zip(grid, images, strict=True):
        row[0].set_ylabel(test, rotation=0, ha="right", va="center")
        for axes, image in zip(row, images[test], strict=True):
            shades = image[0].mul(15).round()  # few, so that the file is small
            axes.imshow(shades.numpy(), cmap="gray", vmin=0, vmax=15, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
    for label, axes in enumerate(grid[0]):
        axes.set_title(label)
    return figure


@in_style
def save(figure: Figure, path: Any) -> None:
    """Save a picture; its bytes follow from the data and the version of matplotlib."""
    figure.savefig(path, metadata={"Software": None})
