"""The second reading of a study, by the best epochs; and accuracy against the number of epochs."""

import csv
import random
import re
from dataclasses import replace

import pytest

from experiments import report
from experiments.contrasts import read_contrasts
from experiments.recounting.numbers import read_study
from experiments.recounting.reports import recount_report
from experiments.report import make_report, rewrite_report, write_report
from experiments.reporting.best import at_best
from experiments.reporting.epochs import epochs_factor, plot_epochs
from experiments.reporting.plot_curves import has_scores, plot_validation
from experiments.reporting.plot_style import own_settings
from experiments.reporting.score_tables import score_table
from experiments.reporting.summary import summarize
from experiments.results import Best
from experiments.study import Study
from tests.experiments.synthetic import (
    diverged,
    failed,
    make_record,
    make_run,
    make_study,
)

TITLE = "Best epoch by validation"
LENGTHS = "Accuracy against number of epochs"
SEEDS = (1, 2, 3)


def peaked(condition, seed, gain=0.0, epochs=4, **others):
    """A run whose accuracy rises to its third epoch and falls then; the best one is that."""
    draw = random.Random(f"{condition}/{seed}")
    peak = min(epochs, 3) - 1
    curve = [
        0.5 + gain + 0.1 * n - 0.15 * max(0, n - peak) + draw.uniform(0, 0.02)
        for n in range(epochs)
    ]
    changed = {split: curve[-1] - draw.uniform(0.1, 0.12) for split in ("occluded", "noisy")}
    fields = {"epochs": epochs, "validation": 0.2, **others.pop("fields", {})}
    run = make_run(condition, seed, {"clean": curve[-1], **changed}, fields=fields, **others)
    scored = [
        replace(epoch, validation=accuracy - 0.1, validation_loss=2 - accuracy)
        for epoch, accuracy in zip(run.result.epochs, curve, strict=True)
    ]
    best = Best(peak, curve[peak] - 0.1, {"clean": curve[peak], **changed})
    return replace(run, result=replace(run.result, epochs=scored, best=best))


def plain_runs():
    """Three arms and an A/A check."""
    return [
        peaked(name, seed, gain, fields=fields)
        for name, gain, fields in (
            ("none", 0.0, {}),
            ("A/A", 0.0, {"replica": 1}),
            ("drop", 0.05, {"spec": {"layer4": {"Dropout2d": {"p": 0.5}}}}),
            ("slow", 0.0, {"lr": 0.01}),
        )
        for seed in SEEDS
    ]


def grid_runs(levels=("2", "4", "8")):
    """Two arms, each trained for three numbers of epochs, and an A/A check."""
    crossed = [
        peaked(
            f"{arm}, {level}",
            seed,
            gain,
            int(level.split()[0]),
            factors={"arm": arm, "length": level},
            fields={"lr": lr},
        )
        for arm, gain, lr in (("none", 0.0, 0.1), ("drop", 0.05, 0.2))
        for level in levels
        for seed in SEEDS
    ]
    first = {"epochs": int(levels[0].split()[0]), "fields": {"lr": 0.1, "replica": 1}}
    return [*crossed, *(peaked("A/A", seed, **first) for seed in SEEDS)]


def many_runs():
    """An arm, a slow one, and several replicas, of which all pairs are looked at."""
    again = [peaked(f"A{n}", s, fields={"replica": n}) for n in (1, 2) for s in SEEDS]
    return [run for run in plain_runs() if run.condition != "A/A"] + again


PAIRS = {"gains": [{"pairs": ["none", "drop", "slow"]}]}
ASKED = [
    (plain_runs, PAIRS),
    (
        plain_runs,
        {
            "beside": PAIRS["gains"],
            "kept": {"test": "noisy", "primary": True, "margin": 6, "compare": PAIRS["gains"]},
        },
    ),
    (many_runs, {"gains": {"primary": True, "margin": 6, "compare": PAIRS["gains"]}}),
    (grid_runs, {"arms": [{"pairs": "arm", "within": "length"}], "lengths": [{"pairs": "length"}]}),
]


def study_of(runs, asked=None, baseline=None):
    """The record and the study of such runs."""
    record = make_record(runs, baseline=baseline or runs[0].condition)
    contrasts, problems = read_contrasts(asked, record.conditions, record.baseline)
    assert not problems
    record = replace(record, contrasts=contrasts)
    configs = {run.condition: replace(run.config, seed=0) for run in runs}
    plan = Study(
        name=record.name,
        question=record.question,
        conditions=configs,
        factors=record.conditions,
        baseline=record.baseline,
        seeds=record.seeds,
        fingerprints=dict.fromkeys(configs, "digits"),
        contrasts=contrasts,
    )
    return record, plan


@pytest.fixture
def written(monkeypatch, tmp_path):
    """The folder of a report of runs, and their study."""

    def write(runs, asked=None):
        record, plan = study_of(runs, asked)
        monkeypatch.setattr(report, "read_runs", lambda _: (record, runs))
        return write_report(tmp_path).parent, plan

    return write


def document(runs, asked=None, pictures=()):
    record, _ = study_of(runs, asked)
    return make_report(record, summarize(record, runs), pictures)


def section(text, title):
    return re.split(r"\n## ", text.split(f"## {title}\n", 1)[1])[0]


def test_the_second_reading_makes_the_same_comparisons_of_the_best_epochs():
    contrast = {"gains": [{"take": "drop", "minus": "none"}]}
    runs = plain_runs()
    found = section(document(runs, contrast), TITLE)
    moved = [replace(r, result=replace(r.result, scores=r.result.best.scores)) for r in runs]
    other = document(moved, contrast)
    rows = summarize(study_of(moved, contrast)[0], moved)
    expected = [line.split(" | ") for line in score_table(rows, "clean").splitlines()]
    lines = [line.split(" | ") for line in found.splitlines() if line.startswith("| ")]
    assert [line[:2] + line[4:] for line in lines[: len(expected)]] == expected
    best = [run.result.best.validation for run in runs]
    validation = [100 * sum(best[:6]) / 6, 100 * sum(best[6:9]) / 3]
    taken = [["3.0 of 4", f"{mean:.2f}"] for mean in validation]
    assert [line[2:4] for line in lines[2:4]] == taken
    table = section(other, "Contrasts").split("### ", 1)[1].split("\n\n![")[0].strip()
    assert table in found
    assert "**Higher than none:** *drop*." in found


def test_the_second_reading_says_which_families_are_primary_and_of_which_images():
    entries = PAIRS["gains"]
    asked = {
        "beside": entries,
        "gain": {"primary": True, "compare": entries},
        "kept": {"primary": True, "test": "occluded", "compare": entries},
    }
    found = section(document(plain_runs(), asked), TITLE)
    titles = ["Primary: gain", "Primary: kept, on occluded test images", "Exploratory: beside"]
    assert re.findall("### (.+)", found) == titles
    assert "Tables whose titles name other test images are of those" in found
    plain = section(document(plain_runs(), {"beside": entries}), TITLE)
    assert re.findall("### (.+)", plain) == ["beside"]
    assert "name other test images" not in plain


def test_a_family_of_the_best_epochs_is_of_their_scores_on_its_images():
    asked = {"kept": {"test": "occluded", "compare": [{"take": "drop", "minus": "none"}]}}
    runs = [
        replace(
            run,
            result=replace(
                run.result,
                best=replace(run.result.best, scores={**run.result.best.scores, "occluded": score}),
            ),
        )
        for place, run in enumerate(plain_runs())
        for score in [0.3 + 0.01 * place + 0.002 * (place**2 % 7)]
    ]
    own = {(run.condition, run.seed): run.result.best.scores["occluded"] for run in runs}
    none = [(own["none", seed] + own["A/A", seed]) / 2 for seed in SEEDS]
    gain = sum(own["drop", seed] - base for seed, base in zip(SEEDS, none, strict=True)) / 3
    found = section(document(runs, asked), TITLE).split("### kept, on occluded test images")[1]
    assert f"| drop − none | 3 | {100 * gain:+.2f} [" in found


def test_no_epoch_is_said_to_be_chosen_where_none_was():
    text = document(plain_runs())
    assert (
        "Here, all are tested after their last epoch, 4; no epoch was chosen by its score. The "
        "[best epochs by validation](#best-epoch-by-validation) are a second reading; none was "
        "chosen by a test score." in text
    )
    without = document(make_study(none=[0.5, 0.6], drop=[0.6, 0.8]))
    assert "All are tested after their last epoch, 3; no epoch was chosen by its score." in without
    assert TITLE not in without
    assert "validation" not in without


def test_runs_without_a_best_epoch_do_not_count_in_it():
    runs = plain_runs()
    runs += [peaked("late", 1), failed("late", 2), diverged("late", 3)]
    runs += [make_run("blind", seed, 0.5) for seed in SEEDS]  # without validation
    record, _ = study_of(runs)
    rows = {row.condition: row for row in at_best(record, summarize(record, runs))}
    assert (rows["late"].n, rows["blind"].n, rows["drop"].n) == (1, 0, 3)
    lines = section(document(runs), TITLE).splitlines()
    [blind] = [line for line in lines if line.startswith("| blind")]
    assert [cell.strip() for cell in blind.split("|")[1:-1]] == ["blind", "0", *[""] * 7]
    assert "**No seed in common with none:** *blind*." in "".join(lines)


@pytest.mark.parametrize("gain", [0.0, 0.2])
def test_replicas_are_averaged_and_a_false_alarm_is_told(gain):
    runs = plain_runs()
    runs[3:6] = [peaked("A/A", seed, gain, fields={"replica": 1}) for seed in SEEDS]
    text = section(document(runs), TITLE)
    assert ("Warning: a false alarm.** A/A differs" in text) == (gain > 0)
    record, _ = study_of(runs)
    none = at_best(record, summarize(record, runs))[0].scores["clean"].values
    own = {(run.condition, run.seed): run.result.best.scores["clean"] for run in runs}
    assert none[2] == pytest.approx((own["none", 2] + own["A/A", 2]) / 2)


@pytest.mark.parametrize(("make", "asked"), ASKED)
@pytest.mark.usefixtures("unrendered")
def test_a_report_made_again_from_its_runs_csv_says_the_same(make, asked, written):
    folder, plan = written(make(), asked)
    before = (folder / "report.md").read_text(encoding="utf-8")
    summary = (folder / "summary.csv").read_bytes()
    assert f"## {TITLE}" in before
    assert "![validation](validation.png)" in section(before, TITLE)
    rewrite_report(folder, plan)
    assert (folder / "report.md").read_text(encoding="utf-8") == before
    assert (folder / "summary.csv").read_bytes() == summary


@pytest.mark.usefixtures("unrendered")
def test_runs_csv_tells_the_best_epoch_and_nothing_without(written):
    folder, _ = written([*plain_runs(), *(make_run("blind", seed) for seed in SEEDS)])
    with (folder / "runs.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    best = plain_runs()[0].result.best
    assert (lines[0]["best_epoch"], lines[0]["validation"]) == ("3", str(best.validation))
    assert [lines[0][f"best_{split}"] for split in best.scores] == [*map(str, best.scores.values())]
    blind = [line for line in lines if line["condition"] == "blind"]
    for name in ("best_epoch", "validation", "best_clean", "best_noisy"):
        assert [line[name] for line in blind] == [""] * 3


@pytest.mark.parametrize(("make", "asked"), ASKED)
@pytest.mark.usefixtures("unrendered")
def test_the_second_reading_is_recounted(make, asked, written):
    folder, _ = written(make(), asked)
    study = read_study(folder)
    assert [str(fault) for fault in recount_report(study)] == []
    path = folder / "report.md"
    lines = path.read_text(encoding="utf-8").splitlines()
    title, tried = "", 0
    for number, line in enumerate(lines):
        title = line[3:] if line.startswith("## ") else title
        if title not in (TITLE, LENGTHS) or not line.startswith(("| ", "**", "### ")):
            continue
        for match in [*re.finditer(r"\d", line)][-2:]:
            other = f"{line[: match.start()]}{(int(match[0]) + 5) % 10}{line[match.end() :]}"
            said = [*lines[:number], other, *lines[number + 1 :]]
            path.write_text("\n".join(said), encoding="utf-8")
            assert any(fault.line == number + 1 for fault in recount_report(study)), other
            tried += 1
    assert tried > 8
    path.write_text("\n".join(lines).replace("; none was chosen by a test score", ""))
    assert recount_report(study)


@pytest.mark.usefixtures("unrendered")
def test_any_best_epoch_that_is_changed_is_found(written):
    folder, _ = written(plain_runs())
    path = folder / "runs.csv"
    text = path.read_text(encoding="utf-8")
    for column in ("best_epoch", "validation", "best_clean"):
        lines = list(csv.DictReader(text.splitlines()))
        lines[4][column] = str(float(lines[4][column]) * 1.5)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, lines[0])
            writer.writeheader()
            writer.writerows(lines)
        assert recount_report(read_study(folder)), column


def test_accuracy_against_epochs_is_a_table_of_each_reading():
    runs = [run for run in grid_runs() if run.condition != "A/A"]
    found = section(document(runs, pictures=["epochs"]), LENGTHS)
    last, best = found.split("### After the best epoch by validation")
    means = {(run.condition, kind): 0.0 for run in runs for kind in ("last", "best")}
    for run in runs:
        means[run.condition, "last"] += 100 * run.result.scores["clean"] / 3
        means[run.condition, "best"] += 100 * run.result.best.scores["clean"] / 3
    for part, kind in ((last, "last"), (best, "best")):
        assert "| epochs | 2 | 4 | 8 |" in part
        for arm in ("none", "drop"):
            [line] = [each for each in part.splitlines() if each.startswith(f"| {arm} |")]
            cells = [cell.split(" ± ")[0].strip() for cell in line.split("|")[2:-1]]
            assert cells == [f"{means[f'{arm}, {n}', kind]:.2f}" for n in (2, 4, 8)]
    assert "![epochs](epochs.png)" in found


@pytest.mark.parametrize(
    ("levels", "factor"),
    [(("2", "4"), "length"), (("2 epochs", "4 epochs"), "length"), (("4",), None)],
)
def test_a_factor_of_numbers_of_epochs_is_known_by_its_levels(levels, factor):
    runs = grid_runs(levels)
    rows = summarize(study_of(runs)[0], runs)
    assert epochs_factor(rows) == factor
    same = [replace(row, config=replace(row.config, epochs=3)) for row in rows]
    assert epochs_factor(same) is None
    assert epochs_factor([replace(row, factors={}) for row in rows]) is None


def test_epochs_stand_at_their_numbers_and_readings_beside_one_another():
    runs = grid_runs(("2", "8", "4"))
    record, _ = study_of(runs)
    rows = summarize(record, runs)
    with own_settings():
        figure = plot_epochs(rows, at_best(record, rows))
        alone = plot_epochs(rows, ())
    titles = [axes.get_title() for axes in figure.axes]
    assert figure.get_suptitle() == "clean accuracy by number of epochs"
    assert titles == ["scored after the last epoch", "scored after the best epoch by validation"]
    for axes in figure.axes:
        assert axes.get_xlabel() == "number of epochs"
        assert sorted(axes.get_xticks()) == [2, 4, 8]
    lines = [line for line in figure.axes[1].get_lines() if line.get_linestyle() == "-"]
    named = {line.get_label(): line for line in lines if line.get_marker() == "o"}
    best = {row.condition: 100 * row.scores["clean"].mean for row in at_best(record, rows)}
    for arm in ("none", "drop"):
        assert list(named[arm].get_xdata()) == pytest.approx([2, 4, 8], abs=0.5)
        expected = [best[f"{arm}, {number}"] for number in (2, 4, 8)]
        assert list(named[arm].get_ydata()) == pytest.approx(expected)
    assert [axes.get_title() for axes in alone.axes] == [""]


def test_validation_curves_have_bands_from_the_lowest_seed_to_the_highest():
    runs = plain_runs()
    rows = summarize(study_of(runs)[0], runs)
    with own_settings():
        figure = plot_validation(rows)
    accuracy, loss = figure.axes
    assert accuracy.get_ylabel() == "validation accuracy, %"
    assert loss.get_ylabel() == "validation loss, nats"
    values = [
        [100 * run.result.epochs[n].validation for run in runs if run.condition == "drop"]
        for n in range(4)
    ]
    [line] = [each for each in accuracy.get_lines() if each.get_label() == "drop"]
    assert list(line.get_ydata()) == pytest.approx([sum(each) / 3 for each in values])
    assert list(line.get_xdata()) == [1, 2, 3, 4]
    bands = [band.get_paths()[0].vertices for band in accuracy.collections]
    assert len(bands) == 4
    for n, each in enumerate(values):
        at = bands[2][bands[2][:, 0] == n + 1][:, 1]
        assert (at.min(), at.max()) == pytest.approx((min(each), max(each)))


@pytest.mark.parametrize(
    ("factors", "scale"), [((1, 99), "linear"), ((1, 101), "log"), ((0, 101), "linear")]
)
def test_losses_that_span_a_hundredfold_are_on_a_logarithmic_axis(factors, scale):
    runs = [
        replace(run, result=replace(run.result, epochs=[
            replace(epoch, validation_loss=0.01 * factors[epoch.epoch > 1])
            for epoch in run.result.epochs
        ]))
        for run in plain_runs()
    ]  # fmt: skip
    rows = summarize(study_of(runs)[0], runs)
    with own_settings():
        accuracy, loss = plot_validation(rows).axes
    assert (accuracy.get_yscale(), loss.get_yscale()) == ("linear", scale)


def test_test_scores_over_epochs_are_shown_where_they_were_asked_for():
    runs = [
        replace(
            run,
            result=replace(
                run.result, epochs=[replace(epoch, test=0.5) for epoch in run.result.epochs]
            ),
        )
        for run in make_study(none=[0.5, 0.6], drop=[0.6, 0.8])
    ]
    record, _ = study_of(runs)
    rows = summarize(record, runs)
    with own_settings():
        [axes, _] = plot_validation(rows).axes
    assert axes.get_ylabel() == "test accuracy, %"
    text = document(runs, pictures=["learning", "validation"])
    assert "![validation](validation.png)" in section(text, "Training")
    plain = make_study(none=[0.5])
    assert not has_scores(summarize(study_of(plain)[0], plain))
