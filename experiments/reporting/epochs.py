"""Accuracy against the number of epochs, of a study with a factor whose levels are such numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from experiments.reporting.findings import escape
from experiments.reporting.plot_factors import plot_factors
from experiments.reporting.plot_style import entitle
from experiments.reporting.summary import Row, compared
from experiments.reporting.tables import accuracy_text, markdown

TITLE = "Accuracy against number of epochs"
NOTE = (
    "Clean accuracy in percent, means ± standard deviations over the seeds. Each number of epochs "
    "is a training of its own, with its own schedules."
)
BEST = "After the best epoch by validation"


def epochs_factor(rows: Sequence[Row]) -> str | None:
    """The factor whose levels, two at least, are the numbers of epochs trained; None without one.

    A level is "40", or "40 epochs".
    """
    crossed = [row for row in rows if row.factors]
    for name in crossed[0].factors if crossed else ():
        levels = {row.factors[name]: row.config.epochs for row in crossed}
        if len(levels) > 1 and all(_says(*level) for level in levels.items()):
            return name
    return None


def _says(level: str, epochs: int) -> bool:
    found = re.fullmatch(r"(\d+)(?: epochs?)?", level)
    return found is not None and int(found[1]) == epochs


def epochs_section(rows: Sequence[Row], best: Sequence[Row]) -> list[str]:
    """The tables: a line for each combination of the other factors, a column for each number.

    Args:
        rows: of the study, which has such a factor.
        best: rows of the best epochs by validation; empty without any.
    """
    parts = [f"## {TITLE}", NOTE, _table(rows)]
    return parts if not best else [*parts, f"### {BEST}", _table(best)]


def _table(rows: Sequence[Row]) -> str:
    factor = epochs_factor(rows)
    numbers = sorted({row.config.epochs for row in rows if row.factors})
    lines: dict[str, dict[int, str]] = {}
    for row in compared(rows):
        if row.factors:
            others = [level for name, level in row.factors.items() if name != factor]
            cells = lines.setdefault(", ".join(others) or "all", {})
            cells[row.config.epochs] = accuracy_text(row.scores["clean"])
    return markdown(
        ("epochs", *map(str, numbers)),
        [(escape(name), *(of.get(each, "") for each in numbers)) for name, of in lines.items()],
    )


def plot_epochs(rows: Sequence[Row], best: Sequence[Row]) -> Figure:
    """Clean accuracy over the number of epochs, beside that of the best ones by validation."""
    factor = epochs_factor(rows)
    turned = []
    for when, of_one in (("the last epoch", rows), ("the best epoch by validation", best)):
        for row in of_one:
            others = {name: level for name, level in row.factors.items() if name != factor}
            factors = {"number of epochs": str(row.config.epochs), **others}
            after = {"scored after": when} if best else {}
            if row.factors:  # without the baseline's line, which would be of two readings
                turned.append(replace(row, factors={**factors, **after}, baseline=""))
    figure = plot_factors(turned)
    entitle(figure, "clean accuracy by number of epochs")
    return figure
