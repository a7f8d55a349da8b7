"""Pictures over the epochs: training, scores in evaluation, rates asked for and realized."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.reporting.plot_style import BASELINE, COLORS, MARKERS, whole_epochs, wrapped
from experiments.reporting.summary import Row, epoch_rates
from experiments.results import Epoch

Curve = dict[int, float]  # epoch, from 1 -> value
Value = Callable[[Epoch], float | None]
MOST = 6  # curves in a panel that can still be told apart

SCORES: dict[str, Value] = {
    "validation accuracy, %": lambda epoch: _percent(epoch.validation),
    "validation loss": lambda epoch: epoch.validation_loss,
    "test accuracy, %": lambda epoch: _percent(epoch.test),
}


def plot_learning(rows: Sequence[Row]) -> Figure:
    """Training loss and accuracy over the epochs, the baseline in every panel."""
    measures: dict[str, Value] = {
        "training loss": lambda epoch: epoch.loss,
        "training accuracy, %": lambda epoch: _percent(epoch.accuracy),
    }
    panels = {
        title: value
        for title, value in measures.items()
        if any(over_epochs(row, value) for row in rows)  # with mixup, there is no accuracy
    }
    return _panels(rows, panels, spread=False)


def plot_validation(rows: Sequence[Row]) -> Figure:
    """Scores after every epoch, with the seeds' spread: of validation images, and of the test."""
    return _panels(rows, {t: v for t, v in SCORES.items() if _is_known(rows, v)}, spread=True)


def has_scores(rows: Sequence[Row]) -> bool:
    """Whether there are scores after every epoch."""
    return any(_is_known(rows, value) for value in SCORES.values())


def _is_known(rows: Sequence[Row], value: Value) -> bool:
    return any(over_epochs(row, value) for row in rows)


def _panels(rows: Sequence[Row], panels: Mapping[str, Value], *, spread: bool) -> Figure:
    """Curves of so many values, a part of the conditions in each line, the baseline in all."""
    base = [row for row in rows if row.is_baseline]
    groups = _groups([row for row in rows if not row.is_baseline]) or [[]]
    figure, grid = _figure([base + group for group in groups], max(2, len(panels)))
    for line, group in zip(grid, groups, strict=True):
        for axes, (title, value) in zip(line, panels.items(), strict=False):
            for row in base:  # above the others, which may be equal
                _draw_curve(axes, over_epochs(row, value), row, zorder=4, **BASELINE)
            for row, color in zip(group, COLORS, strict=False):
                _draw_curve(axes, over_epochs(row, value), row, color=color)
            if spread:
                colors = [*(str(BASELINE["color"]) for _ in base), *COLORS]
                for row, color in zip([*base, *group], colors, strict=False):
                    low, high = (over_epochs(row, value, end) for end in (min, max))
                    ends = (list(low.values()), list(high.values()))
                    axes.fill_between(list(low), *ends, color=color, alpha=0.2, linewidth=0)
            axes.set_ylabel(title)
            whole_epochs(axes)
        for axes in line[len(panels) :]:
            axes.set_axis_off()
        _legend(line[len(panels) - 1], *line[0].get_legend_handles_labels())
    return figure


def plot_rates(rows: Sequence[Row]) -> Figure:
    """The rates over the epochs, and the realized against the nominal one."""
    groups = _groups([row for row in rows if row.nominal is not None])
    figure, grid = _figure(groups, 2)
    for (over, against), group in zip(grid, groups, strict=True):
        top = 0.0
        for row, color, marker in zip(group, COLORS, MARKERS, strict=False):
            asked, dropped = rate_curves(row)
            top = max(top, *asked.values(), *dropped.values())
            over.plot(*_xy(asked), ":", color=color, lw=2.2)
            over.plot(*_xy(dropped), color=color, lw=1.1, label=_name(row))
            points = (list(asked.values()), list(dropped.values()))
            against.plot(*points, marker, color=color, ms=3.5, alpha=0.6)
        end = 1.05 * top or 1.0
        against.plot([0, end], [0, end], label="equal", zorder=1, **BASELINE)
        against.set(xlabel="nominal rate", ylabel="realized rate", xlim=(0, end), ylim=(0, end))
        over.set(ylabel="rate (dotted: nominal)", ylim=(0, end))
        whole_epochs(over)
        named = [axes.get_legend_handles_labels() for axes in (over, against)]
        _legend(against, *(one + other for one, other in zip(*named, strict=True)))
    return figure


def over_epochs(
    row: Row, value: Value, of: Callable[[list[float]], float] = statistics.fmean
) -> Curve:
    """The mean over the seeds, or another number of them; epochs without a value are left out."""
    by_epoch: dict[int, list[float]] = {}
    for result in row.results.values():
        for epoch in result.epochs:
            found = value(epoch)
            if found is not None:
                by_epoch.setdefault(epoch.epoch + 1, []).append(found)
    return {epoch: of(values) for epoch, values in sorted(by_epoch.items())}


def rate_curves(row: Row) -> tuple[Curve, Curve]:
    """Nominal and realized rate, means over seeds and those sites that have both."""
    by_epoch: dict[int, list[tuple[float, float]]] = {}
    for result in row.results.values():
        for epoch, pairs in zip(result.epochs, epoch_rates(result), strict=True):
            by_epoch.setdefault(epoch.epoch + 1, []).extend(pairs)
    known = {epoch: pairs for epoch, pairs in sorted(by_epoch.items()) if pairs}
    asked = {epoch: statistics.fmean(pair[0] for pair in pairs) for epoch, pairs in known.items()}
    dropped = {epoch: statistics.fmean(pair[1] for pair in pairs) for epoch, pairs in known.items()}
    return asked, dropped


def _draw_curve(axes: Axes, curve: Curve, row: Row, **style: Any) -> None:
    """A line, or a point where there is but one epoch."""
    marker = "o" if len(curve) == 1 else None
    axes.plot(*_xy(curve), label=_name(row), marker=marker, **style)


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows in parts that are not too large for a panel; a level of a grid stays together."""
    groups: list[list[Row]] = []
    for _, level in groupby(rows, key=lambda row: next(iter(row.factors.values()), None)):
        together = list(level)
        parts = math.ceil(len(together) / MOST)
        size = math.ceil(len(together) / parts)
        for start in range(0, len(together), size):
            part = together[start : start + size]
            if parts == 1 and groups and len(groups[-1]) + len(part) <= MOST:
                groups[-1] += part
            else:
                groups.append(part)
    return groups


def _figure(groups: Sequence[Sequence[Row]], columns: int) -> tuple[Figure, list[list[Axes]]]:
    """A line of panels for each group, as high as its legend."""
    heights = [
        max(2.5, 0.7 + sum(0.04 + 0.145 * (_name(row).count("\n") + 1) for row in group))
        for group in groups
    ]
    figure = Figure(figsize=(8.6, sum(heights)), layout="constrained")
    ratios = {"height_ratios": heights}
    grid = figure.subplots(len(groups), columns, squeeze=False, gridspec_kw=ratios)
    return figure, [list(line) for line in grid]


def _legend(axes: Axes, handles: list, labels: list[str]) -> None:
    axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0)


def _name(row: Row) -> str:
    return wrapped(row.condition, 26)


def _xy(curve: Curve) -> tuple[list[int], list[float]]:
    return list(curve), list(curve.values())


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
