"""The report of a study, from its run directories: Markdown, CSV files, and pictures.

write_report(Path("runs/quick"))    # runs/quick/report/report.md, and what it shows
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.reporting.findings import answer, counted, escape, listed, overview
from experiments.reporting.plots import draw
from experiments.reporting.setting import setting
from experiments.reporting.summary import Row, summarize
from experiments.reporting.tables import (
    accuracy_text,
    difference_text,
    holm_text,
    table,
    write_runs,
    write_summary,
)
from experiments.running.runs import Run, StudyRecord, read_runs

__all__ = ["make_report", "summarize", "table", "write_report"]

CAPTIONS = {
    "scores": "Each seed is a point. On the left, intervals are those of the means; on the right, "
    "those of the paired differences, which are what is tested.",
    "factors": "Means with their 95 % intervals; the points are the seeds. Differences are paired "
    "by seed, which these intervals do not show: for what is tested, see the table.",
    "robustness": "Differences to the baseline on the changed test images; marks as above.",
    "learning": "Means over the seeds, while training: with the regularizers on, and on the labels "
    "trained with.",
    "rates": "Means over the seeds and those sites that have both a nominal and a realized rate.",
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
    with tempfile.TemporaryDirectory(dir=out, prefix=".new-") as name:
        new = Path(name)
        pictures = draw(rows, new)
        (new / "report.md").write_text(make_report(record, rows, pictures), encoding="utf-8")
        write_runs(rows, new / "runs.csv")
        write_summary(rows, new / "summary.csv")
        for path in sorted(new.iterdir()):
            os.replace(path, out / path.name)
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
        parts += [*_picture("scores", pictures), *_picture("factors", pictures)]
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
        parts += ["## Cost", _cost_table(rows), _cost_note(record)]
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
    return (
        "Means ± standard deviations over n seeds. Differences are in percentage points, paired by "
        "seed, with the 95 % interval of the paired t-test; there is none below three pairs. p is "
        f"that of the two-sided test, corrected after Holm over the {counted(others, 'comparison')}"
        " of this table; the intervals are not corrected, nor is anything over several tables. "
        "“No difference shown” is not “no difference”: the interval says how large one may be."
    )


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
    return _table(("condition", "n", "accuracy, %", f"minus {base} [95 %]", "Holm p"), lines)


def _robustness(rows: Sequence[Row], splits: Sequence[str]) -> list[str]:
    """For each split of changed test images a table, and what it shows in a sentence."""
    parts = ["The same networks on changed test images; each table is corrected for itself."]
    for split in splits:
        parts.append(f"### {escape(split.capitalize())}")
        parts += [overview(rows, split)] if len(rows) > 1 else []
        parts.append(_score_table(rows, split))
    return parts


def _rate_table(rows: Sequence[Row]) -> str:
    lines = [
        (escape(row.condition), f"{row.nominal:.4f}", f"{row.realized:.4f}")
        for row in rows
        if row.nominal is not None
    ]
    note = "Means over seeds, epochs and sites: the rate asked for, and the share dropped."
    return f"{note}\n\n{_table(('condition', 'nominal', 'realized'), lines)}"


def _cost_table(rows: Sequence[Row]) -> str:
    base = escape(rows[0].baseline)
    lines = [
        (
            escape(row.condition),
            f"{row.seconds:.1f}",
            f"{row.seconds / row.config.epochs:.2f}",
            _number(row.seconds_ratio),
            f"{row.memory / 1e6:.0f}",
            _number(row.memory_ratio),
        )
        for row in rows
        if row.seconds is not None and row.memory is not None
    ]
    names = ("condition", "s a run", "s an epoch", f"ratio to {base}", "MB", f"ratio to {base}")
    return _table(names, lines)


def _cost_note(record: StudyRecord) -> str:
    return (
        "Means over the seeds; ratios are over those that have a finished run of "
        f"{escape(record.baseline)}, too. Unlike the rest of this report, these numbers depend on "
        "what else the machine did. Memory is the most that a process held at a time, all that it "
        "had loaded included; on a GPU, that torch allocated there."
    )


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


def _picture(name: str, pictures: Sequence[str]) -> list[str]:
    return [f"![{name}]({name}.png)", CAPTIONS[name]] if name in pictures else []


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _table(names: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    rows = [names, ["---"] + ["---:" for _ in names[1:]], *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)
