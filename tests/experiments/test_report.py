"""Reports: what they say first, and that all that is committed is what the runs tell."""

import functools
import importlib
import re
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from experiments import page
from experiments.plots import forest, learning, save
from experiments.report import insert, make_report, read_report, write_report
from experiments.stats import compare
from experiments.study import read_study
from tests.cases import rest_slow

RESULTS = sorted(path.parent for path in page.RESULTS.glob("*/runs.csv"))
QUICK = [folder for folder in RESULTS if folder.name == "quick"]
by_result = pytest.mark.parametrize(
    "folder", rest_slow(RESULTS, QUICK), ids=lambda folder: folder.name
)

of_matplotlib_3_11 = pytest.mark.skipif(
    not matplotlib.__version__.startswith("3.11."), reason="the pictures are of matplotlib 3.11"
)


def pixels(path):
    return np.asarray(Image.open(path))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of a report that is written anew, once."""

    @functools.cache
    def written(folder):
        made = tmp_path_factory.mktemp(folder.name)
        write_report(made, *read_report(folder))
        return made

    return written


@by_result
def test_a_committed_report_is_what_its_runs_tell(folder, written):
    new = written(folder)
    made, there = ({path.name for path in each.iterdir()} for each in (new, folder))
    assert made == there - {"settings.csv", "rates.csv", "lrs.csv"}  # of searches
    for name in made - {"comparisons.csv"} - {each for each in made if each.endswith(".png")}:
        assert (new / name).read_bytes() == (folder / name).read_bytes(), name
    made, there = (pd.read_csv(each / "comparisons.csv") for each in (new, folder))
    pd.testing.assert_frame_equal(made, there, rtol=1e-9)  # versions of scipy differ in last digits


@of_matplotlib_3_11
@by_result
def test_a_committed_picture_is_what_its_runs_tell(folder, written):
    pictures = sorted(folder.glob("*.png"))
    assert pictures
    for path in pictures:
        assert np.array_equal(pixels(written(folder) / path.name), pixels(path)), path


@of_matplotlib_3_11
def test_the_picture_of_the_page_is_what_the_runs_tell(tmp_path):
    save(forest(page.of_both()), tmp_path / "forest.png")
    assert np.array_equal(pixels(tmp_path / "forest.png"), pixels(page.RESULTS / "forest.png"))


@by_result
def test_a_committed_study_is_its_config(folder):
    path = page.ROOT / "experiments/configs" / f"{folder.name}.yaml"
    asked, run = read_study(path), read_study(folder / "study.yaml")
    assert asked.conditions == run.conditions
    assert (asked.seeds, asked.pairs) == (run.seeds, run.pairs)
    assert asked.file.primary == run.file.primary


def test_an_import_of_the_page_reads_no_report(monkeypatch):
    def refuse(folder):
        raise AssertionError(f"{folder} was read")

    monkeypatch.setattr("experiments.report.read_report", refuse)
    importlib.reload(page)
    monkeypatch.undo()
    importlib.reload(page)


def test_the_generated_parts_of_the_pages_are_what_the_runs_tell():
    for path, text in page.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"python -m experiments.page ({path.name})"


def test_the_advice_of_the_page_follows_from_the_comparisons():
    read = [pd.read_csv(page.RESULTS / name / "comparisons.csv") for name in page.NETWORKS]
    both = pd.concat(read).query("primary and a == 'DropBlock2d'")
    made = page.blocks()
    assert {"better"} <= {*both.loc[both["b"] == "none", "word"]} <= {"better", "same", "open"}
    counts = both.loc[both["b"] == "none", "word"].value_counts()
    for word, count in counts.items():
        assert f"{count} {word}" in made["verdict"].partition(";")[0]
    for row in both.itertuples():
        text = made["nothing" if row.b == "none" else "against"]
        assert (
            f"{row.test} {row.difference:+.2f} [{row.low:+.2f}, {row.high:+.2f}] {row.word}" in text
        )
    how = pd.read_csv(page.RESULTS / "how" / "comparisons.csv").query("primary")
    assert set(how["word"]) == {"same", "open"}  # the page says that no difference was shown
    assert made["schedule"] == "2 same, 2 open"
    assert made["size"] == "3 same, 3 open"


def test_no_number_stands_outside_the_generated_parts_of_the_findings():
    text = (page.ROOT / "experiments/README.md").read_text(encoding="utf-8")
    top = text.partition("## In code")[0]
    top = re.sub(r"<!-- \w+ -->.*?<!-- end -->", "", top, flags=re.DOTALL)
    top = top.replace("64×64", "").replace("95 %", "")
    assert not re.search(r"\d(?!d\b)", top)


@by_result
def test_the_pictures_show_the_tables(folder):
    study, frame, epochs = read_report(folder)
    compared = compare(frame, study)
    figure = forest(compared)
    assert len(figure.axes) == compared["test"].nunique()
    for ax in figure.axes:
        rows = compared[compared["test"] == ax.get_title()]
        drawn = [tuple(line.get_xdata()) for line in ax.lines if len(set(line.get_ydata())) == 1]
        for row in rows.itertuples():
            assert (row.low, row.high) in drawn
            assert (row.difference,) in drawn
    losses = learning(epochs).axes[0].lines if len(epochs) else []
    for line in losses:
        rows = epochs[epochs["condition"] == line.get_label()]
        assert line.get_ydata().tolist() == rows["loss"].tolist()
    assert len(losses) == (epochs["condition"].nunique() if len(epochs) else 0)


def make_frame(write, **columns):
    study = read_study(write(seeds=3))
    rows = [
        {"condition": name, "seed": run.seed, "status": "finished", "clean": 0.8 + 0.01 * run.seed,
         "chance": 0.34, "train_loss": 0.1, "nominal": np.nan, "realized": np.nan, "seconds": 1.0,
         "error": ""}
        for name, run in study.runs()
    ]  # fmt: skip
    return study, pd.DataFrame(rows).assign(**columns)


def text_of(study, frame):
    return make_report(study, frame, compare(frame, study))


def test_equal_conditions_are_the_same(write):
    text = text_of(*make_frame(write))
    assert "Dropout2d is the same as none within 1 point on clean: +0.00 [+0.00, +0.00]" in text
    assert "2 conditions, 3 seeds: 6 runs." in text
    assert "chance level" not in text


def test_chance_level_is_told_before_the_answer(write):
    text = text_of(*make_frame(write, clean=[0.33, 0.35, 0.34, 0.33, 0.35, 0.34]))
    assert text.index("All conditions are at chance level") < text.index("## Answer")


def test_chance_level_of_an_error_is_told(write):
    text = text_of(*make_frame(write, clean=[0.65, 0.66, 0.67, 0.65, 0.66, 0.67], chance=0.66))
    assert "All conditions are at chance level" in text
    study, frame = make_frame(write, clean=[0.3] * 6, chance=0.66)
    study = replace(study, file=study.file.model_copy(update={"higher_is_better": False}))
    assert "All conditions" not in text_of(study, frame)
    assert "All conditions" in text_of(study, frame.assign(clean=0.65))
    assert "All conditions" not in text_of(study, frame.assign(clean=0.65, chance=None))


def test_missing_runs_are_told_first_with_their_reason(write):
    study, frame = make_frame(write)
    frame.loc[1, ["status", "clean", "error"]] = "failed", np.nan, "RuntimeError: out of memory"
    frame.loc[2, ["status", "clean"]] = "open", np.nan
    text = text_of(study, frame)
    assert text.index("Unfinished: 4 of 6 runs") < text.index("## Answer")
    assert "Dropout2d, seed 1: failed: RuntimeError: out of memory" in text
    assert ", n = 1." in text


def test_other_metrics_are_not_in_points(write):
    study, frame = make_frame(write, clean=[12.0, 14.0, 12.5, 14.5, 13.0, 15.0])
    assert "units" in text_of(study, frame)
    assert "points" not in text_of(study, frame).partition("## Means")[0]


def test_names_do_not_break_the_table(write, folder):
    path = write(conditions={"a|b": {}, "c": {"lr": 0.2}}, seeds=3)
    study = read_study(path)
    _, frame = make_frame(write)
    frame["condition"] = frame["condition"].map({"none": "a|b", "Dropout2d": "c"})
    table = [line for line in text_of(study, frame).splitlines() if line.startswith("| c − ")]
    assert "a\\|b" in table[0]


def test_a_page_without_the_place_is_refused():
    with pytest.raises(ValueError, match="no place for 'x'"):
        insert("nothing", {"x": "text"})


def test_the_links_of_the_findings_exist():
    text = (page.ROOT / "experiments/README.md").read_text(encoding="utf-8")
    for path in re.findall(r"\]\((?!http|#)([^)#]+)", text):
        assert (Path(page.ROOT) / "experiments" / path).exists(), path
