"""The pictures of a report, as PNG files: scores, scores by factor, learning curves, rates.

They are drawn on figures of their own, without pyplot's state and with matplotlib's own settings;
equal rows give equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from experiments.reporting.plot_curves import plot_learning, plot_rates
from experiments.reporting.plot_factors import plot_factors
from experiments.reporting.plot_scores import plot_differences, plot_scores
from experiments.reporting.plot_style import own_settings, save
from experiments.reporting.summary import Row


def draw(rows: Sequence[Row], folder: Path) -> dict[str, Path]:
    """All pictures that there are data for, in a folder that exists; name -> file."""
    if not any(row.n for row in rows):
        return {}
    splits = [split for split in rows[0].scores if split != "clean"]
    figures: dict[str, tuple[bool, Callable[[], Figure]]] = {
        "scores": ("clean" in rows[0].scores, lambda: plot_scores(rows, "clean")),
        "factors": (any(row.factors for row in rows), lambda: plot_factors(rows)),
        "robustness": (bool(splits) and len(rows) > 1, lambda: plot_differences(rows, splits)),
        "learning": (True, lambda: plot_learning(rows)),
        "rates": (any(row.nominal is not None for row in rows), lambda: plot_rates(rows)),
    }
    paths = {}
    with own_settings():
        for name, (has_data, make) in figures.items():
            if has_data:
                paths[name] = folder / f"{name}.png"
                save(make(), paths[name])
    return paths
