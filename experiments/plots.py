"""The two pictures of a report: the forest of differences, and the learning curves."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

COLORS = {"better": "C2", "worse": "C3", "same": "C0", "open": "0.5"}


def forest(compared: pd.DataFrame, unit: str = "points") -> Figure:
    """Draw each difference with its simultaneous interval; margins are gray bands.

    Args:
        compared: what `experiments.stats.compare` returned.
        unit: of the differences.
    """
    tests = list(dict.fromkeys(compared["test"]))
    labels = list(dict.fromkeys(compared["a"] + " − " + compared["b"]))
    size = (2.2 + 2.4 * len(tests), 1.2 + 0.34 * len(labels))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(tests), squeeze=False, sharey=True)[0]
    for ax, test in zip(axes, tests, strict=True):
        rows = compared[compared["test"] == test]
        ax.axvline(0, color="0.3", lw=0.8)
        margin = rows["margin"].max()
        if margin == margin:
            ax.axvspan(-margin, margin, color="0.92", zorder=0)
        for row in rows.itertuples():
            y, color = labels.index(f"{row.a} − {row.b}"), COLORS[row.word]
            ax.plot([row.low, row.high], [y, y], color=color, lw=2)
            ax.plot(
                row.difference, y, "o", color=color, ms=5, mfc=color if row.primary else "white"
            )
        ax.set_title(test, fontsize=10)
        ax.set_xlabel(unit, fontsize=9)
        ax.set_yticks(range(len(labels)), labels, fontsize=8)
    axes[0].set_ylim(len(labels) - 0.5, -0.5)
    return figure


def learning(epochs: pd.DataFrame) -> Figure:
    """Draw the training loss of each condition, and its nominal and realized rates.

    Args:
        epochs: what `experiments.stats.epochs_of` returned.
    """
    figure = Figure(figsize=(8, 3), layout="constrained")
    loss, rate = figure.subplots(1, 2)
    for index, (name, rows) in enumerate(epochs.groupby("condition", sort=False)):
        loss.plot(rows["epoch"], rows["loss"], color=f"C{index}", label=name)
        if rows["nominal"].notna().any():
            rate.plot(rows["epoch"], rows["nominal"], color=f"C{index}", lw=1, ls=":")
            rate.plot(rows["epoch"], rows["realized"], color=f"C{index}", label=name)
    loss.set(yscale="log", title="training loss", xlabel="epoch")
    rate.set(title="rate: realized, and nominal (dotted)", xlabel="epoch")
    loss.legend(fontsize=8)
    return figure


def save(figure: Figure, path: Any) -> None:
    """Save a picture; its bytes follow from the data and the version of matplotlib."""
    figure.savefig(path, dpi=100, metadata={"Software": None})
