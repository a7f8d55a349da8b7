"""The report of a study, from its run directories: Markdown, CSV files, and pictures.

write_report(Path("runs/quick"))    # runs/quick/report/report.md, and what it shows
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.files import draft_folder
from experiments.reporting.cost import cost
from experiments.reporting.findings import alarms, answer, counted, escape, listed, overview
from experiments.reporting.plots import draw
from experiments.reporting.setting import setting
from experiments.reporting.summary import Row, is_tested, summarize
from experiments.reporting.tables import (
    accuracy_text,
    difference_text,
    holm_text,
    markdown,
    table,
    write_runs,
    write_summary,
)
from experiments.running.records import Run, StudyRecord, read_runs

__all__ = ["make_report", "summarize", "table", "write_report"]

CAPTIONS = {
    "scores": "Each seed is a point. On the left are the accuracies; on the right, the paired "
    "differences.",
    "factors": "Means; the points are the seeds. The dashed line is the baseline; other conditions "
    "that are not in the grid are left out. Differences are paired by seed, which is not shown "
    "here: see the table.",
    "robustness": "Differences to the baseline on the changed test images; marks as above.",
    "learning": "Means over the seeds, while training: with the regularizers on, and on the labels "
    "trained with.",
    "rates": "Means over the seeds and those sites that have both a nominal and a realized rate.",
}
INTERVALS = {
    "scores": " Intervals have 95 %: on the left those of the means, on the right those of the "
    "differences, which are what is tested.",
    "factors": " Intervals are those of the means, 95 %, not what is tested.",
}


def write_report(directory: Path, out: Path | None = None) -> Path:
    """Write the report of a study's directory; its `report.md` is returned.

    Args:
        directory: of a study, with `study.json`.
        out: a folder for the report, made if need be; `directory/report` by default.

    Raises:
        ValueError: if the directory is not a study's.
        OSError: if it can't be written; a report that was there is then left as it was.
    """
    record, runs = read_runs(directory)
    rows = summarize(record, runs)
    out = directory / "report" if out is None else out
    out.mkdir(parents=True, exist_ok=True)
    with draft_folder(out) as new:
        pictures = draw(rows, new)
        (new / "report.md").write_text(make_report(record, rows, pictures), encoding="utf-8")
        write_runs(rows, new / "runs.csv")
        write_summary(rows, new / "summary.csv")
        for path in sorted(new.iterdir()):
            os.replace(path, out / path.name)
    for name in CAPTIONS.keys() - pictures.keys():
        (out / f"{name}.png").unlink(missing_ok=True)  # of an earlier state of the study
    return out / "report.md"


def make_report(record: StudyRecord, rows: Sequence[Row], pictures: Iterable[str] = ()) -> str:
    """The report as Markdown.

    Args:
        record: of the study.
        rows: its summary.
        pictures: names of those that lie beside it.
    """
    pictures = list(pictures)
    splits = list(rows[0].scores) if rows else []
    parts = [f"# {escape(record.name)}", f"**Question.** {' '.join(record.question.split())}"]
    parts += [_extent(record, rows)]
    if splits:
        parts += ["## Answer", *answer(rows), _equal_epochs(rows)]
        parts += ["## Clean accuracy", _score_table(rows, "clean"), _reading(rows)]
        for name in ("scores", "factors"):
            parts += _picture(name, pictures, INTERVALS[name] if _tested(rows, "clean") else "")
    others = [split for split in splits if split != "clean"]
    if others:
        parts += ["## Robustness", *_robustness(rows, others), *_picture("robustness", pictures)]
    if "learning" in pictures:
        parts += ["## Training", *_picture("learning", pictures)]
    if any(row.nominal is not None for row in rows):
        parts += ["## Rates", _rate_table(rows), *_picture("rates", pictures)]
    parts += _absent(rows)
    parts += ["## What was run", *setting(record, rows)]
    if splits:
        parts += ["## Cost", *cost(rows)]
    return "\n\n".join(parts) + "\n"


def _extent(record: StudyRecord, rows: Sequence[Row]) -> str:
    runs = [run for row in rows for run in row.runs]
    finished = sum(row.n for row in rows)
    text = f"{counted(len(rows), 'condition')}, {counted(len(record.seeds), 'seed')}: "
    if finished == len(runs):
        return f"{text}{counted(finished, 'run')}, all finished."
    return (
        f"{text}**{finished} of {counted(len(runs), 'run')} finished**; the others, named "
        "[below](#runs-that-do-not-count), do not count, so n is smaller where they are missing."
    )


def _equal_epochs(rows: Sequence[Row]) -> str:
    """After how many epochs the conditions are compared."""
    base = next(row for row in rows if row.is_baseline).config.epochs
    unlike = [f"{row.condition} ({row.config.epochs})" for row in rows if row.config.epochs != base]
    text = f"All are tested after their last epoch, {base}; no epoch was chosen by its score."
    if not unlike:
        return text
    return text.replace(f", {base};", f", {base} but for {listed(unlike)};")


def _reading(rows: Sequence[Row]) -> str:
    """How the table is to be read."""
    others = len(rows) - 1
    spread = any(row.n > 1 for row in rows)
    text = "Means ± standard deviations over n seeds." if spread else "Each is of one seed."
    if not others:
        return text
    text += " Differences are in percentage points, paired by seed"
    if not _tested(rows, "clean"):
        return text + _untested(rows)
    corrected = f", corrected after Holm over the {others} comparisons of this table"
    return (
        f"{text}, with the 95 % interval of the paired t-test; there is none below three pairs. "
        f"p is that of the two-sided test{corrected if others > 1 else ''}; the intervals are not "
        "corrected, nor is anything over several tables. “No difference shown” is not “no "
        "difference”: the interval says how large one may be."
    )


def _untested(rows: Sequence[Row]) -> str:
    """Why there is no test."""
    pairs = [found.n for row in rows if (found := row.scores["clean"].difference)]
    if max(pairs, default=0) < 3:
        return "; with fewer than three pairs, there is no interval and no test."
    return "; where they have no spread, or fewer than three pairs, there is no test."


def _tested(rows: Sequence[Row], split: str) -> bool:
    """Whether anything is."""
    return any(is_tested(row.scores[split]) for row in rows)


def _score_table(rows: Sequence[Row], split: str) -> str:
    base = escape(rows[0].baseline)
    lines = []
    for row in rows:
        score = row.scores[split]
        found = score.difference
        text = difference_text(found)
        if found is not None and found.n not in (row.n, 0):
            text += f" ({counted(found.n, 'pair')})"
        lines.append((escape(row.condition), row.n, accuracy_text(score), text, holm_text(found)))
    return markdown(("condition", "n", "accuracy, %", f"minus {base} [95 %]", "Holm p"), lines)


def _robustness(rows: Sequence[Row], splits: Sequence[str]) -> list[str]:
    """For each split of changed test images a table, and what it shows in a sentence."""
    corrected = len(rows) > 2 and any(_tested(rows, split) for split in splits)
    note = "; each table is corrected for itself" if corrected else ""
    parts = [f"The same networks on changed test images{note}."]
    for split in splits:
        parts.append(f"### {escape(split.capitalize())}")
        parts += [text for text in [*alarms(rows, split), overview(rows, split)] if text]
        parts.append(_score_table(rows, split))
    return parts


def _rate_table(rows: Sequence[Row]) -> str:
    lines = [
        (escape(row.condition), f"{row.nominal:.4f}", f"{row.realized:.4f}")
        for row in rows
        if row.nominal is not None
    ]
    note = (
        "Means over seeds, epochs and sites: the rate asked for, and the share dropped or changed."
    )
    return f"{note}\n\n{markdown(('condition', 'nominal', 'realized'), lines)}"


def _absent(rows: Sequence[Row]) -> list[str]:
    """Runs without a score, by name, with their reasons."""
    lines = []
    for row in rows:
        gone = [run for run in row.runs if run.status != "finished"]
        if gone:
            lines.append(
                f"- **{escape(row.condition)}**: n is {row.n} of {len(row.runs)}\n"
                + "\n".join(f"  - seed {run.seed}: {_reason(run)}" for run in gone)
            )
    if not lines:
        return []
    note = "A condition of which runs are absent is judged by those that are left."
    return ["## Runs that do not count", "\n".join(lines), note]


def _reason(run: Run) -> str:
    if run.status == "diverged":
        after = len(run.result.epochs) if run.result else 0
        return f"diverged after {counted(after, 'whole epoch')} (the loss was no longer finite)"
    error = " ".join((run.error or "").split())
    return f"failed: {escape(error)}" if run.status == "failed" else "not run, or not to the end"


def _picture(name: str, pictures: Sequence[str], more: str = "") -> list[str]:
    return [f"![{name}]({name}.png)", CAPTIONS[name] + more] if name in pictures else []
