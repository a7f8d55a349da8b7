"""The pictures of a report, as PNG files: scores, scores by factor, learning curves, rates.

They are drawn on figures of their own, without pyplot's state and with matplotlib's own settings;
equal rows give equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from experiments.reporting.plot_curves import plot_learning, plot_rates
from experiments.reporting.plot_factors import plot_factors
from experiments.reporting.plot_scores import plot_differences, plot_scores
from experiments.reporting.plot_style import own_settings, plain, save
from experiments.reporting.summary import Row, compared


def draw(
    rows: Sequence[Row], folder: Path, only: Collection[str] | None = None, study: str = ""
) -> dict[str, Path]:
    """All pictures that there are data for, in a folder that exists; name -> file.

    The name of the study stands in their titles.

    Replicas are part of the scores of what they repeat, and have curves of their own.
    """
    if not any(row.n for row in rows):
        return {}
    heads = compared(rows)
    splits = [split for split in rows[0].scores if split != "clean"]
    figures: dict[str, tuple[bool, Callable[[], Figure]]] = {
        "scores": ("clean" in rows[0].scores, lambda: plot_scores(heads, "clean")),
        "factors": (any(row.factors for row in rows), lambda: plot_factors(heads)),
        "robustness": (bool(splits) and len(heads) > 1, lambda: plot_differences(heads, splits)),
        "learning": (True, lambda: plot_learning(rows)),
        "rates": (any(row.nominal is not None for row in rows), lambda: plot_rates(rows)),
    }
    paths = {}
    with own_settings():
        for name, (has_data, make) in figures.items():
            if has_data and (only is None or name in only):
                paths[name] = folder / f"{name}.png"
                figure = make()
                if study:
                    figure.suptitle(f"{plain(study)}: {figure.get_suptitle()}")
                save(figure, paths[name])
    return paths
