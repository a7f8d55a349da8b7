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

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd
import yaml

from experiments.checkpoint import write_whole
from experiments.plots import forest, learning, save
from experiments.stats import LEVEL, at_chance, compare, scale_of, tests_in
from experiments.study import Study, read_study


def read_report(folder: Path) -> tuple[Study, pd.DataFrame, pd.DataFrame]:
    """The study, the runs and the epochs of a report's folder. Before a report there are no runs.

    Raises:
        OSError: if a file is missing.
    """
    study = replace(read_study(folder / "study.yaml"), name=folder.resolve().name)
    runs, epochs = folder / "runs.csv", folder / "epochs.csv"
    frame = pd.DataFrame(columns=["status"])
    if runs.exists():
        frame = pd.read_csv(runs, dtype={"error": str}).fillna({"error": ""})
    return study, frame, pd.read_csv(epochs) if epochs.exists() else pd.DataFrame()


def write_report(
    folder: Path, study: Study, frame: pd.DataFrame, epochs: pd.DataFrame, notes: str = ""
) -> Path:
    """Write the report and its data; return the path of report.md.

    Args:
        folder: of the report, made if need be.
        study: that was run.
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
        **({"epochs.csv": epochs.to_csv(index=False)} if len(epochs) else {}),
        "report.md": make_report(study, frame, compared, pictures, notes),
    }
    for name, text in files.items():
        write_whole(folder / name, text.encode())
    return folder / "report.md"


def settings_of(study: Study) -> str:
    """The study as YAML, with all placeholders filled."""
    return yaml.safe_dump(study.plain(), sort_keys=False, allow_unicode=True, width=100)


def make_report(
    study: Study,
    frame: pd.DataFrame,
    compared: pd.DataFrame,
    pictures: list[str] | tuple[str, ...] = (),
    notes: str = "",
) -> str:
    """The report as Markdown."""
    parts = [f"# {study.name}"]
    parts += [f"**Question.** {' '.join(study.file.question.split())}"] * bool(study.file.question)
    parts += [*warnings(study, frame), *([notes] if notes else [])]
    if len(compared):
        parts += ["## Answer", *answer(compared, frame), difference_table(compared, frame)]
    if "forest.png" in pictures:
        parts += ["![differences](forest.png)", "Gray bands are margins. White dots: not primary."]
    parts += ["## Means", mean_table(study, frame)]
    if "learning.png" in pictures:
        parts += ["![training](learning.png)"]
    parts += ["## Settings", f"```yaml\n{settings_of(study)}```"]
    return "\n\n".join(parts) + "\n"


def warnings(study: Study, frame: pd.DataFrame) -> list[str]:
    """The first lines of a report: unfinished, failed or diverged runs, and chance level."""
    runs, finished = len(frame), int((frame["status"] == "finished").sum())
    if runs == finished:
        lines = [f"{len(study.conditions)} conditions, {len(study.seeds)} seeds: {runs} runs."]
    else:
        lines = [
            f"**Unfinished: {finished} of {runs} runs are finished.** Comparisons use these alone."
        ]
        for row in frame[frame["status"].isin(["failed", "diverged"])].itertuples():
            why = f": {row.error}" if isinstance(row.error, str) and row.error else ""
            lines.append(f"- {row.condition}, seed {row.seed}: {row.status}{why}")
    tests = tests_in(frame)
    chance = frame["chance"].mean() if "chance" in frame else float("nan")
    if tests:
        sign = 1 if study.file.higher_is_better else -1
        best = sign * (sign * frame.groupby("condition")[tests[0]].mean()).max()
        if at_chance(best, chance, sign):
            lines.append(
                f"**All conditions are at chance level** on {tests[0]} ({best:.1%}; the most "
                f"frequent class alone gives {chance:.1%}). Nothing can be compared."
            )
    return ["\n".join(lines)]


def answer(compared: pd.DataFrame, frame: pd.DataFrame) -> list[str]:
    """One sentence for each primary comparison."""
    rows = compared[compared["primary"]]
    sentences = [f"- {sentence(row, frame)}" for _, row in rows.iterrows()]
    count = len(rows)
    note = (
        f"Intervals of the {count} primary comparison{'s' * (count != 1)} hold together with "
        f"{LEVEL:.0%}. They are paired by seed."
    )
    return ["\n".join(sentences), note]


def sentence(row: pd.Series, frame: pd.DataFrame) -> str:
    """A comparison in one sentence."""
    where, margin = f"on {row['test']}", f"{row['margin']:g} {_unit(frame)}"
    margin = margin.removesuffix("s") if row["margin"] == 1 else margin
    words = {
        "better": f"{row['a']} is better than {row['b']} {where}",
        "worse": f"{row['a']} is worse than {row['b']} {where}",
        "same": f"{row['a']} is the same as {row['b']} within {margin} {where}",
        "open": f"Open: {row['a']} against {row['b']} {where}",
    }
    return f"{words[row['word']]}: {cell(row)} {_unit(frame)}, n = {row['n']}."


def cell(row: pd.Series) -> str:
    """A difference with its interval, such as `+0.28 [-0.12, +0.69]`."""
    if row["low"] != row["low"]:
        return "no interval" if row["n"] == 0 else f"{row['difference']:+.2f} (no interval)"
    return f"{row['difference']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]"


def difference_table(compared: pd.DataFrame, frame: pd.DataFrame) -> str:
    """The comparisons as rows and the tests as columns; bold intervals leave out 0."""
    tests = list(dict.fromkeys(compared["test"]))
    primary = set(compared.loc[compared["primary"], "test"])
    heads = [f"{test}{'' if test in primary else ' (not primary)'}" for test in tests]
    lines = [f"| {_unit(frame)} | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(tests)}"]
    for (a, b), rows in compared.groupby(["a", "b"], sort=False):
        cells = []
        for test in tests:
            row = rows[rows["test"] == test].iloc[0]
            text = cell(row)
            bold = row["low"] > 0 or row["high"] < 0
            cells.append(f"{f'**{text}**' if bold else text} {row['word']}")
        lines.append(f"| {_escaped(a)} − {_escaped(b)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_table(study: Study, frame: pd.DataFrame) -> str:
    """Means and standard deviations of each condition, its rates and the time of an epoch."""
    tests, scale = tests_in(frame), scale_of(frame) if tests_in(frame) else 1.0
    heads = ["condition", "n", *tests, "nominal rate", "realized rate", "s per epoch"]
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 1)}"]
    first = None
    for name in study.conditions:
        rows = frame[(frame["condition"] == name) & (frame["status"] == "finished")]
        cells = [f"{scale * rows[t].mean():.2f} ± {scale * rows[t].std():.2f}" for t in tests]
        cells = [text.replace(" ± nan", "") if len(rows) else "" for text in cells]
        rates = [_number(rows, column, ".4f") for column in ("nominal", "realized")]
        seconds = rows["seconds"].median() if "seconds" in rows and len(rows) else float("nan")
        first = seconds if first is None else first
        time = "" if seconds != seconds else f"{seconds:.2f} ({seconds / first:.2f} ×)"
        lines.append(f"| {' | '.join([_escaped(name), str(len(rows)), *cells, *rates, time])} |")
    return "\n".join(lines)


def _number(rows: pd.DataFrame, column: str, style: str) -> str:
    value = rows[column].mean() if column in rows and len(rows) else float("nan")
    return "" if value != value else f"{value:{style}}"


def _unit(frame: pd.DataFrame) -> str:
    return "points" if scale_of(frame) == 100.0 else "units"


def _escaped(text: object) -> str:
    return str(text).replace("|", "\\|")


def insert(page: str, blocks: Mapping[str, str]) -> str:
    """A page with the text between `<!-- name -->` and `<!-- end -->` replaced by a block.

    Example:
        >>> insert("a <!-- x -->old<!-- end --> b", {"x": "new"})
        'a <!-- x -->new<!-- end --> b'

    Raises:
        ValueError: if the page has no place for a block.
    """
    for name, text in blocks.items():
        pattern = re.compile(rf"(<!-- {re.escape(name)} -->).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"the page has no place for {name!r}: <!-- {name} --> <!-- end -->")
        page = pattern.sub(lambda found, text=text: f"{found[1]}{text}{found[2]}", page, count=1)
    return page
