"""Pictures of the scores: a line per condition, with the seeds as points and intervals."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.reporting.chance import Chance
from experiments.reporting.plot_style import BASELINE, entitle, jitter, plain, wrapped
from experiments.reporting.statistics import LEVEL
from experiments.reporting.summary import Row, Score, is_tested

BETTER, WORSE, UNCLEAR = "#0072B2", "#D55E00", "#555555"
SPREAD = 0.22  # of the seeds, in lines
WIDTH = 80  # of all panels, in letters


def plot_scores(rows: Sequence[Row], split: str) -> Figure:
    """Accuracies on the left, and on the right their differences to the baseline."""
    names = [row.condition for row in rows]
    figure, places = _figure(names)
    what = f"minus {rows[0].baseline}, percentage points"
    scores, differences = figure.subplots(1, 2, sharey=True)
    for row, place in zip(rows, places, strict=True):
        _draw_score(scores, row.scores[split], place)
        if row.is_baseline and row.scores[split].mean is not None:
            scores.axvline(100 * row.scores[split].mean, zorder=1, **BASELINE)
    scores.set_xlabel(f"{split} accuracy, %")
    _draw_differences(differences, rows, split, places)
    differences.set_xlabel(wrapped(what, WIDTH // 2))
    _label_lines([scores, differences], names, places)
    _explain(figure, rows, [split])
    entitle(figure, f"{split} accuracy, and paired differences to {rows[0].baseline}")
    return figure


def plot_differences(rows: Sequence[Row], splits: Sequence[str]) -> Figure:
    """The differences to the baseline, a panel for each split."""
    others = [row.condition for row in rows[1:]]
    what = f"minus {rows[0].baseline}, percentage points"
    figure, places = _figure(others)
    panels = figure.subplots(1, len(splits), sharey=True, squeeze=False)[0]
    for axes, split in zip(panels, splits, strict=True):
        _draw_differences(axes, rows, split, places)
        axes.set_title(plain(split))
        axes.set_xlabel(wrapped(what, WIDTH // len(splits)))
    _label_lines(panels, others, places)
    _explain(figure, rows, splits)
    what = " and ".join([", ".join(splits[:-1]), splits[-1]] if splits[1:] else splits)
    entitle(figure, f"{what} test images: paired differences to {rows[0].baseline}")
    return figure


def plot_chance(found: Sequence[Chance]) -> Figure:
    """The differences of all pairs of replicas; filled where p is below .05."""
    pairs = [(names, one) for each in found for names, one in each.differences.items()]
    labels = [f"{later} − {earlier}" for (later, earlier), _ in pairs]
    figure, places = _figure(labels)
    axes = figure.subplots()
    axes.axvline(0, zorder=1, **BASELINE)
    for (_, one), place in zip(pairs, places, strict=True):
        if one.mean is not None:
            alarm = one.p is not None and one.p < LEVEL
            _draw_mean(axes, one.mean, one.interval, place, WORSE if alarm else UNCLEAR)
    axes.set_xlabel("clean accuracy, later minus earlier replica, percentage points")
    _label_lines([axes], labels, places)
    axes.tick_params(axis="y", labelsize="small")
    entitle(figure, "clean accuracy, pairs of replicas")
    return figure


def _figure(names: Sequence[str]) -> tuple[Figure, list[float]]:
    """A figure that has room for the names, and the height of each one's line."""
    places, below = [], 0.0
    for name in names:
        size = max(1.0, 0.55 * (wrapped(name).count("\n") + 1))
        places.append(below + size / 2)
        below += size
    return Figure(figsize=(8.6, 1.3 + 0.31 * below), layout="constrained"), places


def _label_lines(panels: Sequence[Axes], names: Sequence[str], places: Sequence[float]) -> None:
    panels[0].set_yticks(places, [wrapped(name) for name in names])
    panels[0].set_ylim(places[-1] + 0.6, places[0] - 0.6)
    for axes in panels:
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")


def _draw_score(axes: Axes, score: Score, place: float) -> None:
    if score.mean is None:
        return
    offsets = jitter(list(score.values), SPREAD)
    values = [100 * value for value in score.values.values()]
    heights = [place + offsets[seed] for seed in score.values]
    axes.plot(values, heights, "o", color="#bbbbbb", markersize=3.5, zorder=2)
    _draw_mean(axes, score.mean, score.interval, place, UNCLEAR)


def _draw_differences(axes: Axes, rows: Sequence[Row], split: str, places: Sequence[float]) -> None:
    """One line for each row that has a place; the baseline may have none."""
    axes.axvline(0, zorder=1, **BASELINE)
    base = rows[0].scores[split].values
    with_place = rows[-len(places) :]
    for row, place in zip(with_place, places, strict=True):
        score = row.scores[split]
        found = score.difference
        if found is None or found.mean is None:
            continue
        pairs = {seed: value - base[seed] for seed, value in score.values.items() if seed in base}
        offsets = jitter(list(pairs), SPREAD)
        heights = [place + offsets[seed] for seed in pairs]
        points = [100 * difference for difference in pairs.values()]
        axes.plot(points, heights, "o", color="#bbbbbb", markersize=3.5, zorder=2)
        color = {"higher": BETTER, "lower": WORSE}.get(found.verdict, UNCLEAR)
        _draw_mean(axes, found.mean, found.interval, place, color)


def _draw_mean(
    axes: Axes, mean: float, interval: tuple[float, float] | None, place: float, color: str
) -> None:
    if interval is not None:
        axes.plot([100 * end for end in interval], [place] * 2, color=color, lw=1.8, zorder=3)
    axes.plot(100 * mean, place, "D", **_diamond(color), zorder=4)


def _diamond(color: str) -> dict[str, object]:
    """Filled where a difference is shown, which a printer without colors shows, too."""
    face = "white" if color == UNCLEAR else color
    return {"color": color, "markerfacecolor": face, "markersize": 5.5, "markeredgewidth": 1.4}


def _explain(figure: Figure, rows: Sequence[Row], splits: Sequence[str]) -> None:
    """Say what the marks are; intervals and colors, only where there can be some."""
    scores = [row.scores[split] for row in rows for split in splits]
    tested = any(map(is_tested, scores))
    texts = {UNCLEAR: "mean"}
    if any(score.interval for score in scores) or tested:
        texts = {UNCLEAR: "mean, 95 % interval"}
    verdicts = {score.difference.verdict for score in scores if score.difference}
    shown = {"higher": BETTER, "lower": WORSE}
    texts |= {shown[name]: f"{name} (Holm p < .05)" for name in shown if name in verdicts}
    seed = Line2D([], [], marker="o", linestyle="", color="#bbbbbb", markersize=3.5, label="a seed")
    means = [
        Line2D([], [], marker="D", lw=1.8, label=text, **_diamond(color))  # type: ignore[arg-type]
        for color, text in texts.items()
    ]
    figure.legend(handles=[seed, *means], loc="outside lower center", ncols=4)
