"""A picture of a grid: accuracy by the first factor, the second in colors, others as panels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.reporting.plot_style import (
    BASELINE,
    COLORS,
    MARKERS,
    entitle,
    jitter,
    numbers,
    plain,
    wrapped,
)
from experiments.reporting.summary import Row


@dataclass(frozen=True)
class Scale:
    """Where the levels of the first factor stand: at their numbers, if all are numbers."""

    levels: tuple[str, ...]
    places: tuple[float, ...]
    logarithmic: bool
    gap: float  # the least distance of two levels (of their logarithms)
    is_ordered: bool  # whether they are numbers, and not names

    @classmethod
    def of(cls, levels: Sequence[str]) -> Scale:
        """Of these levels, in the order of the study."""
        values = numbers(levels)
        places = values or [float(place) for place in range(len(levels))]
        logarithmic = min(places) > 0 and max(places) / min(places) >= 30
        ordered = sorted({math.log(place) if logarithmic else place for place in places})
        gaps = [high - low for low, high in pairwise(ordered)]
        least = min(gaps, default=1.0)
        return cls(tuple(levels), tuple(places), logarithmic, least, values is not None)

    def moved(self, place: float, gaps: float) -> float:
        """A place, so many gaps farther right."""
        shift = gaps * self.gap
        return place * math.exp(shift) if self.logarithmic else place + shift


def plot_factors(rows: Sequence[Row], split: str = "clean") -> Figure:
    """Accuracy by factor; conditions that are not in the grid are left out, but the baseline."""
    crossed = [row for row in rows if row.factors]
    names = list(crossed[0].factors)
    levels = {name: list(dict.fromkeys(row.factors[name] for row in crossed)) for name in names}
    panels = list(product(*(levels[name] for name in names[2:])))
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(8.6, 3.2 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
    series = levels[names[1]] if len(names) > 1 else [""]
    for axes, combination in zip(grid.flat, panels, strict=False):
        further = dict(zip(names[2:], combination, strict=True))
        axes.set_title(plain(", ".join(f"{name} {level}" for name, level in further.items())))
        scale = Scale.of(levels[names[0]])
        for number, level in enumerate(series):
            here = {**further, names[1]: level} if len(names) > 1 else {}
            chosen = [row for row in crossed if here.items() <= row.factors.items()]
            _draw_series(axes, chosen, names[0], scale, (number, len(series), level), split)
        _label(axes, names[0], scale)
        _draw_baseline(axes, rows, split)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for line in grid:
        line[0].set_ylabel(f"{split} accuracy, %")
    title = plain(names[1]) if len(names) > 1 else None
    drawn: dict[str, Artist] = {}  # a level may be missing in some of the panels
    for axes in grid.flat:
        drawn |= {
            label: mark for mark, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
    marks, known = list(drawn.values()), list(drawn)
    figure.legend(marks, known, loc="outside right upper", title=title, alignment="left")
    entitle(figure, f"{split} accuracy by {' and '.join(names)}")
    return figure


def _draw_baseline(axes: Axes, rows: Sequence[Row], split: str) -> None:
    for row in rows:
        if row.is_baseline and (mean := row.scores[split].mean) is not None:
            axes.axhline(100 * mean, label=wrapped(row.condition, 20), zorder=1, **BASELINE)


def _label(axes: Axes, name: str, scale: Scale) -> None:
    if scale.logarithmic:
        axes.set_xscale("log")
    axes.set_xticks(scale.places, [wrapped(level, 16) for level in scale.levels])
    axes.minorticks_off()
    axes.set_xlim(scale.moved(min(scale.places), -0.5), scale.moved(max(scale.places), 0.5))
    axes.set_xlabel(plain(name))
    axes.grid(axis="y")


def _draw_series(
    axes: Axes,
    rows: Sequence[Row],
    factor: str,
    scale: Scale,
    series: tuple[int, int, str],
    split: str,
) -> None:
    """The rows of one color, beside those of the other series."""
    number, count, label = series
    color, marker = COLORS[number % len(COLORS)], MARKERS[number // len(COLORS) % len(MARKERS)]
    shift = 0.5 * ((number + 0.5) / count - 0.5)
    spread = min(0.06, 1 / (7 * count))
    means = {}
    for row in rows:
        score = row.scores[split]
        if score.mean is None:
            continue
        level = scale.places[scale.levels.index(row.factors[factor])]
        place = scale.moved(level, shift)
        means[place] = 100 * score.mean
        offsets = jitter(list(score.values), spread)
        places = [scale.moved(place, offsets[seed]) for seed in score.values]
        values = [100 * value for value in score.values.values()]
        axes.plot(places, values, marker, color=color, alpha=0.4, markersize=3.2, mew=0, zorder=2)
        if score.interval is not None:
            axes.plot([place] * 2, [100 * end for end in score.interval], color=color, zorder=3)
    ordered = dict(sorted(means.items()))
    name = wrapped(label, 20) or "mean"
    style = {"color": color, "markersize": 5.5, "linewidth": 1, "label": name, "zorder": 4}
    line = "-" if scale.is_ordered else ""  # between names there is nothing to go through
    if ordered:
        axes.plot(list(ordered), list(ordered.values()), f"{marker}{line}", **style)
