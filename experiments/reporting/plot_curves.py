"""Pictures over the epochs: training, scores in evaluation, rates asked for and realized."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.reporting.plot_style import (
    BASELINE,
    COLORS,
    MARKERS,
    entitle,
    whole_epochs,
    wrapped,
)
from experiments.reporting.summary import Row, epoch_rates
from experiments.results import Epoch

Curve = dict[int, float]  # epoch, from 1 -> value
Value = Callable[[Epoch], float | None]
MOST = 6  # curves in a panel that can still be told apart

SCORES: dict[str, Value] = {
    "validation accuracy, %": lambda epoch: _percent(epoch.validation),
    "validation loss, nats": lambda epoch: epoch.validation_loss,
    "test accuracy, %": lambda epoch: _percent(epoch.test),
}


def plot_learning(rows: Sequence[Row]) -> Figure:
    """Training loss and accuracy over the epochs, the baseline in every panel."""
    measures: dict[str, Value] = {
        "training loss, nats": lambda epoch: epoch.loss,
        training_accuracy(rows): lambda epoch: _percent(epoch.accuracy),
    }
    panels = {
        title: value
        for title, value in measures.items()
        if any(over_epochs(row, value) for row in rows)  # with mixup, there is no accuracy
    }
    return _panels(rows, panels, "training over the epochs", spread=False)


def plot_validation(rows: Sequence[Row]) -> Figure:
    """Scores after every epoch, with the seeds' spread: of validation images, and of the test."""
    panels = {title: value for title, value in SCORES.items() if _is_known(rows, value)}
    return _panels(rows, panels, "scores over the epochs", spread=True)


def has_scores(rows: Sequence[Row]) -> bool:
    """Whether there are scores after every epoch."""
    return any(_is_known(rows, value) for value in SCORES.values())


def _is_known(rows: Sequence[Row], value: Value) -> bool:
    return any(over_epochs(row, value) for row in rows)


def _panels(rows: Sequence[Row], panels: Mapping[str, Value], name: str, *, spread: bool) -> Figure:
    """Curves of so many values, a part of the conditions in each line, the baseline in all."""
    base = [row for row in rows if row.is_baseline]
    groups = _groups([row for row in rows if not row.is_baseline]) or [[]]
    figure, grid = _figure([base + group for group in groups], max(2, len(panels)))
    for line, group in zip(grid, groups, strict=True):
        looks = looks_of(base + group, lambda row: [over_epochs(row, v) for v in panels.values()])
        for axes, (title, value) in zip(line, panels.items(), strict=False):
            for look in looks:
                if curve := over_epochs(look.rows[0], value):
                    style = look.style(curve)
                    axes.plot(*_xy(curve), label=look.name, **style)
                    for row in look.rows if spread else ():
                        ends = [over_epochs(row, value, end).values() for end in (min, max)]
                        band = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
                        axes.fill_between(list(curve), *map(list, ends), **band)
            axes.set_ylabel(title)
            whole_epochs(axes)
            if title.endswith("nats"):
                _log_where_wide(axes)
        for axes in line[len(panels) :]:
            axes.set_axis_off()
        _legend(line[len(panels) - 1], *line[0].get_legend_handles_labels())
    entitle(figure, f"{name}, means over the seeds")
    return figure


def _log_where_wide(axes: Axes) -> None:
    """Losses that fall, or rise, a hundredfold: on a linear axis, the small ones are one line."""
    low, high = axes.dataLim.intervaly
    if 0 < 100 * low < high < math.inf:
        axes.set_yscale("log")


def training_accuracy(rows: Sequence[Row]) -> str:
    """What an axis of training accuracy says: some of the labels may be wrong.

    Example:
        >>> training_accuracy([])
        'training accuracy, %'
    """
    noisy = {row.config.label_noise > 0 for row in rows}
    if True not in noisy:
        return "training accuracy, %"
    return f"training accuracy\n{'' if len(noisy) == 1 else 'partly '}on wrong labels, %"


def plot_rates(rows: Sequence[Row]) -> Figure:
    """The rates over the epochs, and the realized against the nominal one."""
    groups = _groups([row for row in rows if row.nominal is not None])
    figure, grid = _figure(groups, 2)
    for (over, against), group in zip(grid, groups, strict=True):
        curves = {row.condition: rate_curves(row) for row in group}
        top = max(rate for pair in curves.values() for curve in pair for rate in curve.values())
        end = 1.05 * top or 1.0
        _draw_nominal(over, [asked for asked, _ in curves.values()])
        against.plot([0, end], [0, end], label="equal", zorder=1, **BASELINE)
        for look in looks_of(group, rate_curves, with_baseline=False):
            asked, dropped = curves[look.rows[0].condition]
            style = look.style(dropped) | {"linewidth": 1.1}
            over.plot(*_xy(dropped), label=look.name, **style)
            points = (list(asked.values()), list(dropped.values()))
            against.plot(*points, **style | {"linewidth": 0.7})
        against.set(xlabel="nominal rate", ylabel="realized rate", xlim=(0, end), ylim=(0, end))
        over.set(ylabel="realized rate", ylim=(0, end))
        whole_epochs(over)
        named = [axes.get_legend_handles_labels() for axes in (over, against)]
        _legend(against, *(one + other for one, other in zip(*named, strict=True)))
    entitle(figure, "rates as shares of the values, means over the seeds")
    return figure


def _draw_nominal(axes: Axes, curves: Sequence[Curve]) -> None:
    """The rates asked for, each once: those of many conditions are the same."""
    each = {tuple(_rounded(curve).items()): curve for curve in curves}
    for number, curve in enumerate(each.values()):
        style = {"color": "#000000", "linestyle": ":", "linewidth": 1.2, "zorder": 5}
        axes.plot(*_xy(curve), label=None if number else "nominal", **style)


@dataclass(frozen=True)
class Look:
    """How the curves of some rows look, which are the same: drawn once, named together.

    Args:
        rows: at least one.
        number: of its color and marker; None for the baseline.
        count: of all looks in the panel.
    """

    rows: tuple[Row, ...]
    number: int | None
    count: int

    @property
    def name(self) -> str:
        """All names, as in "none = A"."""
        return wrapped(" = ".join(row.condition for row in self.rows), 26)

    def style(self, curve: Curve) -> dict[str, Any]:
        """A line whose markers stand elsewhere than those of others, so that none is covered."""
        marker = "o" if len(curve) == 1 else None
        if self.number is None:
            return {"marker": marker, "zorder": 4, **BASELINE}
        every = max(self.count, math.ceil(len(curve) / 6))
        first = self.number * every // self.count % max(1, len(curve))
        color, marker = COLORS[self.number % len(COLORS)], MARKERS[self.number % len(MARKERS)]
        return {"color": color, "marker": marker, "markevery": (first, every)}


def looks_of(
    rows: Sequence[Row], curves: Callable[[Row], Sequence[Curve]], with_baseline: bool = True
) -> list[Look]:
    """The rows of a panel, those whose curves are the same together.

    Args:
        rows: as many as can be told apart, and the baseline.
        curves: of a row, in all panels of the line.
        with_baseline: whether the baseline is dashed, and not one of the others.
    """
    alike: list[tuple[Sequence[Curve], list[Row]]] = []
    for row in rows:
        own = [_rounded(curve) for curve in curves(row)]
        same = next((found for of, found in alike if of == own and any(own)), None)
        if same is None:
            alike.append((own, [row]))
        else:
            same.append(row)
    dashed = [with_baseline and any(row.is_baseline for row in found) for _, found in alike]
    numbers = count()
    return [
        Look(tuple(found), None if is_base else next(numbers), len(alike))
        for (_, found), is_base in zip(alike, dashed, strict=True)
    ]


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


def _rounded(curve: Curve) -> Curve:
    """What of a curve can be seen: means of the same rates over more sites differ by rounding."""
    return {epoch: round(value, 9) for epoch, value in curve.items()}


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
