"""The report of a study: a function of `runs.csv` and `study.yaml`.

`write_report(folder, study, frame, epochs)` writes

| file | content |
| --- | --- |
| report.md | the answer, one table, two pictures, means, settings |
| runs.csv | one row for each run |
| comparisons.csv | all comparisons, with n, standard deviation, p and Holm's p |
| epochs.csv | means for each condition and epoch |
| study.yaml | the study, with all placeholders filled |
| forest.png, learning.png | the pictures |
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import yaml

from experiments.checkpoint import write_whole
from experiments.plots import forest, learning, save
from experiments.stats import LEVEL, at_chance, compare, scale_of, tests_in
from experiments.study import Study, read_study


def read_report(folder: Path) -> tuple[Study, pd.DataFrame, pd.DataFrame]:
    """Return the study, the runs and the epochs in a report's folder; no runs before a report.

    Raises:
        OSError: if a file is missing.
    """
    study = read_study(folder / "study.yaml")
    study = replace(study, name=folder.resolve().name)

    frame = pd.DataFrame(columns=["status"])
    runs_path = folder / "runs.csv"
    if runs_path.exists():
        frame = pd.read_csv(runs_path, dtype={"error": str}).fillna({"error": ""})

    epochs = pd.DataFrame()
    epochs_path = folder / "epochs.csv"
    if epochs_path.exists():
        epochs = pd.read_csv(epochs_path)
    return study, frame, epochs


def write_report(
    folder: Path, study: Study, frame: pd.DataFrame, epochs: pd.DataFrame, notes: str = ""
) -> Path:
    """Write the report and its data; return the path of report.md.

    Args:
        folder: the folder of the report, made if need be.
        study: the study of the report.
        frame: one row for each run.
        epochs: means for each condition and epoch.
        notes: warnings about the runs, such as mixed versions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    compared = compare(frame, study) if tests_in(frame) else pd.DataFrame()

    pictures = []
    if len(compared) and compared["low"].notna().any():
        save(forest(compared, _unit(frame)), folder / "forest.png")
        pictures.append("forest.png")
    if len(epochs):
        save(learning(epochs), folder / "learning.png")
        pictures.append("learning.png")

    files = {
        "study.yaml": settings_of(study),
        "runs.csv": frame.to_csv(index=False),
        "comparisons.csv": compared.to_csv(index=False),
        "report.md": make_report(study, frame, compared, pictures, notes),
    }
    if len(epochs):
        files["epochs.csv"] = epochs.to_csv(index=False)
    for name, text in files.items():
        write_whole(folder / name, text.encode())
    return folder / "report.md"


def settings_of(study: Study) -> str:
    """Return the study as YAML, with all placeholders filled."""
    return yaml.safe_dump(study.plain(), sort_keys=False, allow_unicode=True, width=100)


def make_report(
    study: Study,
    frame: pd.DataFrame,
    compared: pd.DataFrame,
    pictures: list[str] | tuple[str, ...] = (),
    notes: str = "",
) -> str:
    """Return the report as Markdown."""
    parts = [f"# {study.name}"]
    if study.file.question:
        question = " ".join(study.file.question.split())
        parts.append(f"**Question.** {question}")
    parts += warnings(study, frame)
    if notes:
        parts.append(notes)

    if len(compared):
        parts += ["## Answer", *answer(compared, frame), difference_table(compared, frame)]
    if "forest.png" in pictures:
        parts += ["![differences](forest.png)", "Gray bands are margins. White dots: not primary."]

    parts += ["## Means", mean_table(study, frame)]
    if "learning.png" in pictures:
        parts.append("![training](learning.png)")
    parts += ["## Settings", f"```yaml\n{settings_of(study)}```"]
    return "\n\n".join(parts) + "\n"


def warnings(study: Study, frame: pd.DataFrame) -> list[str]:
    """Return the first lines of a report: unfinished, failed or diverged runs, and chance level."""
    runs = len(frame)
    finished = int((frame["status"] == "finished").sum())
    if runs == finished:
        lines = [f"{len(study.conditions)} conditions, {len(study.seeds)} seeds: {runs} runs."]
    else:
        lines = [
            f"**Unfinished: {finished} of {runs} runs are finished.** Comparisons use these alone.",
            *_failures(frame),
        ]
    lines += _chance_level(study, frame)
    return ["\n".join(lines)]


def _failures(frame: pd.DataFrame) -> list[str]:
    """Return a line for each run that failed or diverged, with the reason."""
    lines = []
    for row in frame[frame["status"].isin(["failed", "diverged"])].itertuples():
        has_reason = isinstance(row.error, str) and row.error
        reason = f": {row.error}" if has_reason else ""
        lines.append(f"- {row.condition}, seed {row.seed}: {row.status}{reason}")
    return lines


def _chance_level(study: Study, frame: pd.DataFrame) -> list[str]:
    """Return a warning if no condition is better than to answer with the most frequent class."""
    tests = tests_in(frame)
    if not tests:
        return []

    first = tests[0]
    chance = frame["chance"].mean() if "chance" in frame else float("nan")
    means = frame.groupby("condition")[first].mean()
    sign = 1 if study.file.higher_is_better else -1
    best = means.max() if sign > 0 else means.min()
    if not at_chance(best, chance, sign):
        return []
    return [
        f"**All conditions are at chance level** on {first} ({best:.1%}; the most "
        f"frequent class alone gives {chance:.1%}). Nothing can be compared."
    ]


def answer(compared: pd.DataFrame, frame: pd.DataFrame) -> list[str]:
    """Return one sentence for each primary comparison."""
    rows = compared[compared["primary"]]
    sentences = [f"- {sentence(row, frame)}" for _, row in rows.iterrows()]
    comparisons = "1 primary comparison" if len(rows) == 1 else f"{len(rows)} primary comparisons"
    note = (
        f"Intervals of the {comparisons} hold together with {LEVEL:.0%}. They are paired by seed."
    )
    return ["\n".join(sentences), note]


def sentence(row: pd.Series, frame: pd.DataFrame) -> str:
    """Return a comparison in one sentence."""
    unit = _unit(frame)
    margin = f"{row['margin']:g} {unit}"
    if row["margin"] == 1:
        margin = margin.removesuffix("s")

    a = row["a"]
    b = row["b"]
    where = f"on {row['test']}"
    verdicts = {
        "better": f"{a} is better than {b} {where}",
        "worse": f"{a} is worse than {b} {where}",
        "same": f"{a} is the same as {b} within {margin} {where}",
        "open": f"Open: {a} against {b} {where}",
    }
    return f"{verdicts[row['word']]}: {cell(row)} {unit}, n = {row['n']}."


def cell(row: pd.Series) -> str:
    """Return a difference with its interval, such as `+0.28 [-0.12, +0.69]`."""
    difference = f"{row['difference']:+.2f}"
    if not math.isnan(row["low"]):
        return f"{difference} [{row['low']:+.2f}, {row['high']:+.2f}]"
    if row["n"] == 0:
        return "no interval"
    return f"{difference} (no interval)"


def difference_table(compared: pd.DataFrame, frame: pd.DataFrame) -> str:
    """Return the comparisons as rows and the tests as columns; bold intervals leave out 0."""
    tests = list(dict.fromkeys(compared["test"]))
    primary = set(compared.loc[compared["primary"], "test"])
    heads = [test if test in primary else f"{test} (not primary)" for test in tests]

    rows = []
    for (a, b), comparisons in compared.groupby(["a", "b"], sort=False):
        by_test = comparisons.set_index("test")
        cells = [_verdict(by_test.loc[test]) for test in tests]
        rows.append([f"{_escaped(a)} − {_escaped(b)}", *cells])
    return _table([_unit(frame), *heads], rows)


def _verdict(row: pd.Series) -> str:
    """Return a difference, its interval and its word; bold if the interval leaves out 0."""
    text = cell(row)
    if row["low"] > 0 or row["high"] < 0:
        text = f"**{text}**"
    return f"{text} {row['word']}"


def mean_table(study: Study, frame: pd.DataFrame) -> str:
    """Return a table of conditions: means and deviations, rates, and the time of an epoch."""
    tests = tests_in(frame)
    scale = scale_of(frame) if tests else 1.0
    finished = frame[frame["status"] == "finished"]

    rows = []
    first_seconds = None
    for name in study.conditions:
        runs = finished[finished["condition"] == name]
        scores = [_mean_and_deviation(runs[test], scale) for test in tests]
        rates = [_number(runs, column, ".4f") for column in ("nominal", "realized")]

        seconds = float("nan")
        if "seconds" in runs and len(runs):
            seconds = runs["seconds"].median()
        if first_seconds is None:
            first_seconds = seconds
        time = "" if math.isnan(seconds) else f"{seconds:.2f} ({seconds / first_seconds:.2f} ×)"
        rows.append([_escaped(name), str(len(runs)), *scores, *rates, time])

    heads = ["condition", "n", *tests, "nominal rate", "realized rate", "s per epoch"]
    return _table(heads, rows)


def _mean_and_deviation(scores: pd.Series, scale: float) -> str:
    """Return the mean of scores, and the standard deviation of two or more."""
    if not len(scores):
        return ""
    mean = f"{scale * scores.mean():.2f}"
    deviation = scale * scores.std()
    return mean if math.isnan(deviation) else f"{mean} ± {deviation:.2f}"


def _number(rows: pd.DataFrame, column: str, style: str) -> str:
    """Return the mean of a column; nothing if it has no values."""
    if column not in rows or not len(rows):
        return ""
    value = rows[column].mean()
    return "" if math.isnan(value) else f"{value:{style}}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, the first column aligned left, the others aligned right."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heads, rule, *rows])


def _unit(frame: pd.DataFrame) -> str:
    return "points" if scale_of(frame) == 100.0 else "units"


def _escaped(text: object) -> str:
    return str(text).replace("|", "\\|")


def insert(page: str, blocks: Mapping[str, str]) -> str:
    """Return a page with the text between `<!-- name -->` and `<!-- end -->` replaced by a block.

    Example:
        >>> insert("a <!-- x -->old<!-- end --> b", {"x": "new"})
        'a <!-- x -->new<!-- end --> b'

    Raises:
        ValueError: if the page has no place for a block.
    """
    for name, text in blocks.items():
        begin = re.escape(f"<!-- {name} -->")
        place = re.search(rf"({begin}).*?(<!-- end -->)", page, re.DOTALL)
        if place is None:
            raise ValueError(f"the page has no place for {name!r}: <!-- {name} --> <!-- end -->")
        page = page[: place.end(1)] + text + page[place.start(2) :]
    return page
