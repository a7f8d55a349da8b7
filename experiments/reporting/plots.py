"""The pictures of a report, as PNG files: scores, by factor and by epochs, curves, rates.

They are drawn on figures of their own, without pyplot's state and with matplotlib's own settings;
equal rows give equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from experiments.reporting.chance import chances
from experiments.reporting.epochs import epochs_factor, plot_epochs
from experiments.reporting.plot_curves import has_scores, plot_learning, plot_rates, plot_validation
from experiments.reporting.plot_factors import plot_factors
from experiments.reporting.plot_scores import plot_chance, plot_differences, plot_scores
from experiments.reporting.plot_style import own_settings, plain, save
from experiments.reporting.summary import Row, compared


def draw(
    rows: Sequence[Row],
    folder: Path,
    only: Collection[str] | None = None,
    best: Sequence[Row] = (),
    study: str = "",
) -> dict[str, Path]:
    """All pictures that there are data for, in a folder that exists; name -> file.

    Replicas are part of the scores of what they repeat, and have curves of their own; where there
    is nothing else, their pairs are the only picture of scores. Where a
    factor is the number of epochs, the picture of that is the one by factor.

    Args:
        rows: of the study.
        folder: for the files.
        only: names of those that are drawn; all if None.
        best: rows of the best epochs by validation.
        study: its name, which stands in their titles.
    """
    if not any(row.n for row in rows):
        return {}
    heads, pairs = compared(rows), chances(rows, "clean")
    several = len(heads) > 1 or not pairs
    splits = [split for split in rows[0].scores if split != "clean"]
    lengths = epochs_factor(heads) is not None
    figures: dict[str, tuple[bool, Callable[[], Figure]]] = {
        "scores": (several and "clean" in rows[0].scores, lambda: plot_scores(heads, "clean")),
        "factors": (
            several and not lengths and any(r.factors for r in rows),
            lambda: plot_factors(heads),
        ),
        "chance": (bool(pairs), lambda: plot_chance(pairs)),
        "epochs": (lengths, lambda: plot_epochs(heads, compared(best))),
        "robustness": (bool(splits) and len(heads) > 1, lambda: plot_differences(heads, splits)),
        "learning": (True, lambda: plot_learning(rows)),
        "validation": (has_scores(rows), lambda: plot_validation(rows)),
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
