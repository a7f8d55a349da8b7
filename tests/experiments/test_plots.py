"""The pictures: which there are, what is on them, and that no text covers another."""

import re
from dataclasses import replace
from itertools import combinations

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from experiments.reporting.chance import chances
from experiments.reporting.plot_curves import plot_learning, plot_rates
from experiments.reporting.plot_factors import Scale, plot_factors
from experiments.reporting.plot_scores import plot_chance, plot_differences, plot_scores
from experiments.reporting.plot_style import BASELINE, COLORS, jitter, own_settings, save
from experiments.reporting.plots import draw
from experiments.reporting.summary import summarize
from tests.experiments.synthetic import failed, make_record, make_run, make_study

LONG = "DropBlock2d on every block of layer2 and layer3, block size {}, linear from 0 to .{}"


def rows_of(runs, **record):
    return summarize(make_record(runs, **record), runs)


def score(condition, seed):
    """Some accuracies that differ."""
    clean = 0.5 + len(condition) % 7 / 50 + seed * (1 + len(condition) % 3) / 100
    return {"clean": clean, "occluded": clean - 0.1, "noisy": clean**2}


def runs_of(names, seeds=(1, 2, 3), **others):
    return [make_run(name, seed, score(name, seed), **others) for name in names for seed in seeds]


def two():
    return runs_of(["none"]) + runs_of(["drop"], rates=(0.1, 0.2, 0.3))


def many():
    names = [LONG.format(number, number) for number in range(12)]
    return runs_of(["none"]) + runs_of(names, rates=(0.1, 0.2, 0.3))


def grid(first=("0.1", "0.2", "0.5"), second=("stage 2", "stage 3", "stage 4", "all")):
    runs = runs_of(["none"])
    for rate in first:
        for place in second:
            factors = {"rate": rate, "placement": place}
            runs += runs_of([f"{rate}, {place}"], factors=factors, rates=(0.1, 0.2, 0.3))
    return runs


KINDS = {
    "two": two,
    "many": many,
    "grid": grid,
    "one seed": lambda: runs_of(["none", "drop"], seeds=(1,)),
    "no rates": lambda: runs_of(["none", "drop"]),
    "formulas": lambda: runs_of(["none", "$a_1$ and 5 $", "[x]_{", "\\alpha $\\frac$"]),
    "no baseline": lambda: [failed("none", 1), make_run("drop", 1, score("drop", 1))],
    "baseline only": lambda: runs_of(["none"]),
}
FIGURES = {
    "scores": lambda rows: plot_scores(rows, "clean"),
    "differences": lambda rows: plot_differences(rows, ["occluded", "noisy"]),
    "learning": plot_learning,
    "rates": plot_rates,
    "factors": plot_factors,
}
# each picture, and each kind of rows
PLAIN = {
    ("scores", "many"), ("differences", "two"), ("learning", "many"), ("rates", "two"),
    ("factors", "grid"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _settings():
    with own_settings():
        yield


def texts_of(figure, monkeypatch):
    """Every text that is drawn, with the box that it takes, in pixels."""
    canvas, drawn, draw_text = FigureCanvasAgg(figure), [], Text.draw

    def note(text, renderer):
        drawn.append(text)
        draw_text(text, renderer)

    monkeypatch.setattr(Text, "draw", note)
    canvas.draw()
    shown = [text for text in drawn if text.get_text() and text.get_visible()]
    return [(text.get_text(), text.get_window_extent()) for text in shown]


def lines_of(axes, **properties):
    return [
        line
        for line in axes.get_lines()
        if all(getattr(line, f"get_{name}")() == value for name, value in properties.items())
    ]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k in ("two", "formulas") else pytest.mark.slow) for k in KINDS],
)
def test_all_pictures_that_there_are_data_for(kind, tmp_path):
    rows = rows_of(KINDS[kind]())
    found = draw(rows, tmp_path)
    expected = {"scores", "learning"}
    expected |= {"robustness"} if len(rows) > 1 else set()
    expected |= {"rates"} if kind in ("two", "many", "grid") else set()
    expected |= {"factors"} if kind == "grid" else set()
    assert set(found) == expected
    for path in found.values():
        assert 2_000 < path.stat().st_size < 60_000
        with Image.open(path) as image:
            assert image.width < 1000


def test_nothing_is_drawn_of_nothing(tmp_path):
    assert draw(rows_of([failed("none", 1), failed("drop", 1)]), tmp_path) == {}
    assert draw([], tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_equal_rows_give_equal_bytes_without_a_date(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        draw(rows_of(two()), tmp_path / name, ["scores"])
    for path in (tmp_path / "a").iterdir():
        found = path.read_bytes()
        assert found == (tmp_path / "b" / path.name).read_bytes()
        chunks = set(re.findall(rb"tEXt|tIME|iTXt|zTXt", found))
        assert chunks == set()


def test_a_picture_has_the_colors_that_were_drawn(tmp_path):
    figure = Figure(figsize=(8.6, 2.5))
    axes = figure.subplots()
    for number, color in enumerate((*COLORS, BASELINE["color"])):
        epochs = np.arange(31)
        middle = np.sin(epochs / (3 + number))
        axes.plot(epochs, middle, color=color)
        axes.fill_between(epochs, middle - 1, middle + 1, color=color, alpha=0.2, linewidth=0)
    save(figure, tmp_path / "bands.png")
    drawn = np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(int)
    with Image.open(tmp_path / "bands.png") as image:
        saved = np.asarray(image.convert("RGB")).astype(int)
    far = np.abs(saved - drawn).max(-1) > 8  # of 255
    assert far.mean() < 0.02


def test_the_users_settings_do_not_matter_and_are_kept(tmp_path):
    rows = rows_of(make_study(none=[0.5, 0.6], drop=[0.6, 0.6]))
    before = draw(rows, tmp_path, ["scores"])["scores"].read_bytes()
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "text.usetex": True}):
        after = draw(rows, tmp_path, ["scores"])["scores"].read_bytes()
        assert matplotlib.rcParams["font.size"] == 30
    assert after == before


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in PLAIN else pytest.mark.slow)
        for name in FIGURES
        for kind in ("two", "many", "grid")
        if name != "factors" or kind == "grid"
    ],
)
def test_no_text_covers_another_or_leaves_the_picture(kind, name, monkeypatch):
    rows = rows_of(KINDS[kind]())
    figure = FIGURES[name](rows)
    found = texts_of(figure, monkeypatch)
    assert len(found) > 8
    width, height = figure.canvas.get_width_height()
    for text, box in found:
        assert box.x0 >= -1, text
        assert box.y0 >= -1, text
        assert box.x1 <= width + 1, text
        assert box.y1 <= height + 1, text
    for (text, box), (other, second) in combinations(found, 2):
        overlap = min(box.x1, second.x1) - max(box.x0, second.x0)
        if overlap > 1 and min(box.y1, second.y1) - max(box.y0, second.y0) > 1:
            raise AssertionError(f"{text!r} and {other!r} cover one another")


@pytest.mark.parametrize("name", ["scores", "differences"])
def test_a_long_name_of_the_baseline_covers_nothing(name, monkeypatch):
    names = [LONG.format(number, number) for number in range(2)]
    found = texts_of(FIGURES[name](rows_of(runs_of(names), baseline=names[0])), monkeypatch)
    labels = [box for text, box in found if text.startswith("minus")]
    for one, other in combinations(labels, 2):
        assert one.x1 < other.x0 or other.x1 < one.x0
    if name == "scores":
        [left] = [box for text, box in found if text == "clean accuracy, %"]
        assert left.x1 < labels[0].x0


def test_the_baseline_of_a_grid_is_a_point_and_a_line():
    rows = rows_of(grid(second=("all",)), baseline="0.2, all")
    [axes] = plot_factors(rows).axes
    [dashed] = lines_of(axes, linestyle="--")
    means = {row.condition: 100 * row.scores["clean"].mean for row in rows}
    assert (dashed.get_label(), dashed.get_ydata()[0]) == ("0.2, all", means["0.2, all"])
    [series] = lines_of(axes, linestyle="-", marker="o")
    assert list(series.get_ydata())[1] == means["0.2, all"]


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([0.7, 0.6], {"a seed", "mean"}),
        ([0.7, 0.6, 0.4], {"a seed", "mean, 95 % interval"}),
        ([0.7, 0.81, 0.74], {"a seed", "mean, 95 % interval", "higher (Holm p < .05)"}),
        ([0.3, 0.41, 0.34], {"a seed", "mean, 95 % interval", "lower (Holm p < .05)"}),
    ],
)
def test_the_legend_explains_only_what_is_there(scores, words):
    rows = rows_of(make_study(none=[0.5, 0.6, 0.55][: len(scores)], other=scores))
    for figure in (plot_scores(rows, "clean"), plot_differences(rows, ["clean"])):
        [legend] = figure.legends
        assert {text.get_text() for text in legend.get_texts()} == words


def test_scores_show_every_seed_mean_interval_and_baseline():
    runs = make_study(none=[0.5, 0.6, 0.55], drop=[0.60, 0.72, None])
    rows = rows_of(runs)
    left, right = plot_scores(rows, "clean").axes
    seeds = [line.get_xdata() for line in lines_of(left, marker="o", linestyle="None")]
    assert [list(values) for values in seeds] == [pytest.approx([50, 60, 55]), [60, 72]]
    means = [line.get_xdata()[0] for line in lines_of(left, marker="D")]
    assert means == pytest.approx([55, 66])
    [interval] = lines_of(left, marker="None", linestyle="-")  # none for two seeds
    low, high = rows[0].scores["clean"].interval
    assert list(interval.get_xdata()) == pytest.approx([100 * low, 100 * high])
    [dashed] = lines_of(left, linestyle="--")
    assert list(dashed.get_xdata()) == pytest.approx([55, 55])
    [pairs] = lines_of(right, marker="o", linestyle="None")
    assert list(pairs.get_xdata()) == pytest.approx([10, 12])
    assert [text.get_text() for text in left.get_yticklabels()] == ["none", "drop"]
    bottom, top = left.get_ylim()
    assert bottom > top  # the first condition is at the top


def test_only_what_is_shown_has_a_color():
    same = [0.50, 0.60, 0.55]
    up, down, unclear = [0.60, 0.72, 0.69], [0.40, 0.48, 0.41], [0.60, 0.60, 0.50]
    rows = rows_of(make_study(none=same, up=up, down=down, unclear=unclear))
    verdicts = [row.scores["clean"].difference.verdict for row in rows[1:]]
    assert verdicts == ["higher", "lower", "not shown"]
    right = plot_scores(rows, "clean").axes[1]
    marks = lines_of(right, marker="D")
    assert [to_hex(mark.get_color()) for mark in marks] == ["#0072b2", "#d55e00", "#555555"]
    assert to_hex(marks[2].get_markerfacecolor()) == "#ffffff"


def test_numbers_stand_at_their_places_and_names_in_order():
    assert Scale.of(["1", "3", "7"]).places == (1, 3, 7)
    assert Scale.of(["0.5", "0.1"]).places == (0.5, 0.1)
    assert Scale.of(["all", "3"]).places == (0, 1)
    assert not Scale.of(["1", "3", "7"]).logarithmic
    assert not Scale.of(["0", "100"]).logarithmic
    assert Scale.of(["0.001", "0.1"]).logarithmic
    axes = plot_factors(rows_of(grid(first=("b", "a")))).axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["b", "a"]
    axes = plot_factors(rows_of(grid(first=("0.5", "0.1")))).axes[0]
    assert list(axes.get_xticks()) == [0.5, 0.1]


def test_the_second_factor_is_a_series_of_its_own_color():
    rows = rows_of(grid())
    figure = plot_factors(rows)
    [axes] = figure.axes
    series = lines_of(axes, linestyle="-", marker="o")
    assert [line.get_label() for line in series] == ["stage 2", "stage 3", "stage 4", "all"]
    assert len({to_hex(line.get_color()) for line in series}) == 4
    means = {row.condition: 100 * row.scores["clean"].mean for row in rows}
    assert list(series[3].get_ydata()) == pytest.approx(
        [means[f"{rate}, all"] for rate in ("0.1", "0.2", "0.5")]
    )
    [dashed] = lines_of(axes, linestyle="--")
    assert (dashed.get_label(), dashed.get_ydata()[0]) == ("none", pytest.approx(means["none"]))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("rate", "clean accuracy, %")


def test_further_factors_are_panels():
    runs = [
        replace(run, factors=run.factors and {**run.factors, "schedule": name})
        for name in ("linear", "constant")
        for run in grid(second=("all",))
    ]
    runs = [
        replace(run, condition=", ".join(run.factors.values()) or run.condition) for run in runs
    ]
    titles = [axes.get_title() for axes in plot_factors(rows_of(runs)).axes]
    assert titles == ["schedule linear", "schedule constant"]


@pytest.mark.parametrize("name", FIGURES)
def test_each_picture_has_a_title(name):
    kind = grid if name == "factors" else two
    assert len(FIGURES[name](rows_of(kind())).get_suptitle()) > 15


@pytest.mark.parametrize(
    ("splits", "named"),
    [
        (["clean"], "clean test images"),
        (["clean", "noisy"], "clean and noisy test images"),
        (["clean", "occluded", "noisy"], "clean, occluded and noisy test images"),
    ],
)
def test_a_title_names_the_test_images(splits, named):
    title = plot_differences(rows_of(two()), splits).get_suptitle()
    assert title == f"{named}: paired differences to none"


def test_titles_name_the_study(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(
        "experiments.reporting.plots.save",
        lambda figure, path: titles.append(figure.get_suptitle()),
    )
    draw(rows_of(grid()), tmp_path, study="a_$tudy")
    assert len(titles) == 5
    assert all(title.startswith("a_\\$tudy: ") for title in titles)


def test_levels_that_are_names_are_not_joined():
    def joined(levels):
        [axes] = plot_factors(rows_of(grid(first=levels))).axes
        marked = [line for line in axes.get_lines() if line.get_marker() == "o"]
        return {line.get_linestyle() for line in marked if line.get_label()[0] != "_"}

    assert joined(("0.1", "0.2", "0.5")) == {"-"}
    assert joined(("0.1", "0.2", "linear")) == joined(("b", "a")) == {"None"}


def test_a_level_that_one_panel_lacks_is_in_the_legend():
    runs = [
        replace(run, condition=f"{name} {run.condition}", factors={**run.factors, "schedule": name})
        for name, levels in (("linear", ("all",)), ("constant", ("all", "stage 2")))
        for run in grid(second=levels)
        if run.factors
    ]
    [legend] = plot_factors(rows_of([*runs_of(["none"]), *runs])).legends
    assert [text.get_text() for text in legend.get_texts()] == ["all", "none", "stage 2"]


def unlike(runs):
    """The runs, with a loss of its own for each condition."""
    changed = []
    for run in runs:
        shift = sum(map(ord, run.condition)) / 1e6
        epochs = [replace(epoch, loss=epoch.loss + shift) for epoch in run.result.epochs]
        changed.append(replace(run, result=replace(run.result, epochs=epochs)))
    return changed


@pytest.mark.parametrize(
    ("noises", "label"),
    [
        ([0.0, 0.0], "training accuracy, %"),
        ([0.4, 0.2], "training accuracy on wrong labels, %"),
        ([0.0, 0.2], "training accuracy partly on wrong labels, %"),
    ],
)
def test_the_axis_says_whether_labels_are_wrong(noises, label):
    runs = [
        make_run(name, 1, fields={"label_noise": noise})
        for name, noise in zip(("none", "drop"), noises, strict=True)
    ]
    accuracy = plot_learning(rows_of(unlike(runs))).axes[1]
    assert accuracy.get_ylabel().split() == label.split()


def test_curves_that_are_the_same_are_drawn_once_and_named_together():
    runs = [*unlike(runs_of(["other"])), *runs_of(["none", "twin", "twin 2"])]
    figure = plot_learning(rows_of(runs))
    for axes in figure.axes:
        assert [line.get_label() for line in axes.get_lines()] == ["none = twin = twin 2", "other"]
    [legend] = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    assert [text.get_text() for text in legend.get_texts()] == ["none = twin = twin 2", "other"]


def test_curves_that_nearly_coincide_have_markers_at_other_epochs():
    runs = [make_run("none", 1, fields={"epochs": 30})]
    runs += [make_run(name, 1, fields={"epochs": 30}) for name in "abcdef"]
    lines = plot_learning(rows_of(unlike(runs))).axes[0].get_lines()[1:]
    marked = [range(30)[slice(line.get_markevery()[0], None, line.get_markevery()[1])]
              for line in lines]  # fmt: skip
    assert all(4 <= len(epochs) <= 6 for epochs in marked)
    assert len({epoch for epochs in marked for epoch in epochs}) == sum(map(len, marked))
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 6


def test_the_same_nominal_rate_is_drawn_once():
    runs = runs_of(["none", "a"], rates=(0.1, 0.2, 0.3)) + runs_of(["b"], rates=(0.3, 0.2, 0.3))
    over, against = plot_rates(rows_of(runs)).axes
    nominal = lines_of(over, linestyle=":")
    found = [list(map(float, line.get_ydata())) for line in nominal]
    assert found == [pytest.approx([0.1, 0.2, 0.3]), pytest.approx([0.3, 0.2, 0.3])]
    names = [text.get_text() for text in against.get_legend().get_texts()]
    assert names == ["nominal", "none = a", "b", "equal"]


def test_learning_curves_are_means_over_seeds_with_the_baseline_in_each_panel():
    figure = plot_learning(rows_of(unlike(many())))
    assert len(figure.axes) == 4  # two measures, two parts of six conditions
    for axes in figure.axes:
        dashed, *others = axes.get_lines()
        assert dashed.get_label() == "none"
        assert len(others) == 6
        assert axes.get_xlabel() == "epoch"
    loss, accuracy = figure.axes[:2]
    labels = (loss.get_ylabel(), accuracy.get_ylabel())
    assert labels == ("training loss, nats", "training accuracy, %")
    assert list(loss.get_lines()[1].get_xdata()) == [1, 2, 3]
    assert list(loss.get_lines()[1].get_ydata()) == pytest.approx([2, 1.5, 1], abs=0.02)
    assert list(accuracy.get_lines()[1].get_ydata()) == pytest.approx([0, 25, 50])


def test_a_curve_of_one_epoch_is_a_point():
    early = [make_run(name, 1, 0.5, fields={"epochs": 1}) for name in ("none", "early")]
    lines = plot_learning(rows_of(unlike(early))).axes[0].lines
    assert {line.get_label(): line.get_marker() for line in lines} == {"none": "o", "early": "o"}
    assert lines[1].get_markevery()[0] == 0


def test_with_mixup_there_is_no_curve_of_accuracy():
    runs = [
        replace(
            run,
            result=replace(
                run.result, epochs=[replace(epoch, accuracy=None) for epoch in run.result.epochs]
            ),
        )
        for run in two()
    ]
    shown = [axes for axes in plot_learning(rows_of(runs)).axes if axes.axison]
    assert [axes.get_ylabel() for axes in shown] == ["training loss, nats"]


def test_rates_are_shown_over_epochs_and_against_one_another():
    over, against = plot_rates(rows_of(two())).axes
    [nominal] = lines_of(over, linestyle=":")
    [realized] = lines_of(over, linestyle="-")
    assert list(nominal.get_ydata()) == pytest.approx([0.1, 0.2, 0.3])
    assert list(realized.get_ydata()) == pytest.approx([0.11, 0.21, 0.31])
    [points] = lines_of(against, linestyle="-")
    assert list(points.get_xdata()) == pytest.approx([0.1, 0.2, 0.3])
    assert list(points.get_ydata()) == pytest.approx([0.11, 0.21, 0.31])
    assert over.get_ylim() == against.get_ylim() == against.get_xlim()


def test_jitter_is_small_fixed_and_apart():
    assert jitter([7, 3, 5], 0.2) == {3: -0.2, 5: 0.0, 7: 0.2}
    assert jitter([4], 0.2) == {4: 0.0}
    assert jitter([1, 2], 0.2) == {1: -0.1, 2: 0.1}
    assert list(jitter(range(5), 0.2).values()) == pytest.approx([-0.2, -0.1, 0, 0.1, 0.2])


def replicas(*others):
    """Three replicas of one condition, the last one better in all seeds, and whatever else."""
    noise = (0.0, 0.01, -0.02, 0.015)
    runs = [
        make_run(
            ("none", "A1", "A2")[n],
            seed,
            clean=0.5 + 0.1 * (n == 2) + shift * (1 + n),
            fields={"replica": n},
        )
        for n in range(3)
        for seed, shift in enumerate(noise, start=1)
    ]
    return rows_of([*runs, *others])


def test_where_there_are_replicas_alone_their_pairs_are_the_picture(tmp_path):
    drawn = draw(replicas(), tmp_path)
    assert "chance" in drawn
    assert not {"scores", "factors", "robustness"} & drawn.keys()
    other = [make_run("other", seed, clean=0.4, fields={"lr": 0.3}) for seed in range(1, 5)]
    assert {"chance", "scores"} <= draw(replicas(*other), tmp_path).keys()
    assert "chance" not in draw(rows_of(two()), tmp_path)


def test_the_picture_of_chance():
    rows = replicas()
    found = chances(rows, "clean")
    [axes] = plot_chance(found).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["A1 − none", "A2 − none", "A2 − A1"]
    points = [line for line in axes.lines if line.get_marker() == "D"]
    means = [one.mean for one in found[0].differences.values()]
    assert [point.get_xdata()[0] for point in points] == pytest.approx([100 * m for m in means])
    filled = [point.get_markerfacecolor() != "white" for point in points]
    assert filled == [one.p < 0.05 for one in found[0].differences.values()]
    assert any(filled)
    assert not all(filled)
