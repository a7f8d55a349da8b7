"""The report of a study, from its run directories: Markdown, CSV files, and pictures.

write_report(Path("runs/quick"))    # runs/quick/report/report.md, and what it shows
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from experiments.files import draft_folder
from experiments.reporting.best import at_best, best_section
from experiments.reporting.cost import cost
from experiments.reporting.epochs import epochs_factor, epochs_section
from experiments.reporting.findings import answer, counted, escape, listed
from experiments.reporting.plots import draw
from experiments.reporting.reported import read_reported, sections
from experiments.reporting.score_tables import (
    chance_tables,
    contrast_tables,
    reading,
    robustness,
    score_table,
    table_note,
    tested,
)
from experiments.reporting.setting import setting
from experiments.reporting.summary import Row, compared, contrasted, summarize
from experiments.reporting.tables import (
    markdown,
    table,
    write_runs,
    write_summary,
)
from experiments.running.records import Run, StudyRecord, read_runs
from experiments.study import Study

__all__ = ["make_report", "rewrite_report", "summarize", "table", "write_report"]

CAPTIONS = {
    "scores": "Each seed is a point. On the left are the accuracies; on the right, the paired "
    "differences.",
    "factors": "Means; the points are the seeds. The dashed line is the baseline; other conditions "
    "that are not in the grid are left out. Differences are paired by seed, which is not shown "
    "here: see the tables.",
    "chance": "Means over the seeds, a replica minus an earlier one. Intervals have 95 %, p is not "
    "corrected; filled where it is below .05.",
    "epochs": "Means; the points are the seeds.",
    "robustness": "Differences to the baseline on the changed test images; marks as above.",
    "learning": "Means over the seeds, while training: with the regularizers on, and on the labels "
    "trained with.",
    "validation": "After every epoch, in evaluation mode: lines are means over the seeds, bands "
    "reach from the lowest seed to the highest. Validation images count with the labels that are "
    "trained with.",
    "rates": "Means over the seeds and those sites that have both a nominal and a realized rate.",
}
OVER_EPOCHS = ("learning", "validation", "rates")
INTERVALS = {
    "scores": " Intervals have 95 %: on the left those of the means, on the right those of the "
    "differences, which are what is tested.",
    "factors": " Intervals are those of the means, 95 %, not what is tested.",
    "epochs": " Intervals are those of the means, 95 %, not what is tested.",
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
    with _replacing(out) as new:
        pictures = draw(rows, new, best=at_best(record, rows), study=record.name)
        (new / "report.md").write_text(make_report(record, rows, pictures), encoding="utf-8")
        write_runs(rows, new / "runs.csv")
        write_summary(rows, new / "summary.csv")
    _remove_pictures(out, CAPTIONS.keys() - pictures.keys())
    return out / "report.md"


def rewrite_report(folder: Path, study: Study) -> Path:
    """Make a report again from its own `runs.csv`, where the runs themselves are gone.

    Tables, sentences, `summary.csv` and the pictures of scores are new. What was run, what it cost
    and the pictures over the epochs are not in `runs.csv`: they stay as they were.

    Args:
        folder: of the report.
        study: that it reports; it may ask for other contrasts than before.

    Raises:
        ValueError: if the runs are not those of the study.
        OSError: if a file can't be read or written.
    """
    old = (folder / "report.md").read_text(encoding="utf-8")
    record, runs = read_reported(folder / "runs.csv", study)
    rows = summarize(record, runs)
    with _replacing(folder) as new:
        best, of_scores = at_best(record, rows), CAPTIONS.keys() - {*OVER_EPOCHS}
        pictures = {*draw(rows, new, of_scores, best, record.name)}
        gone = of_scores - pictures
        pictures |= {name for name in OVER_EPOCHS if (folder / f"{name}.png").is_file()}
        text = make_report(record, rows, pictures, sections(old))
        (new / "report.md").write_text(text, encoding="utf-8")
        write_summary(rows, new / "summary.csv")
    _remove_pictures(folder, gone)
    return folder / "report.md"


def _remove_pictures(folder: Path, names: Iterable[str]) -> None:
    """Of an earlier state of the study, which the report no longer shows."""
    for name in names:
        (folder / f"{name}.png").unlink(missing_ok=True)


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A folder whose files take the place of those of another one, if nothing fails."""
    with draft_folder(folder) as draft:
        yield draft
        for path in sorted(draft.iterdir()):
            os.replace(path, folder / path.name)


def make_report(
    record: StudyRecord,
    rows: Sequence[Row],
    pictures: Iterable[str] = (),
    kept: Mapping[str, str] | None = None,
) -> str:
    """The report as Markdown.

    Args:
        record: of the study.
        rows: its summary.
        pictures: names of those that lie beside it.
        kept: title -> text of sections of an earlier report: what runs.csv does not tell.
    """
    pictures = list(pictures)
    splits = list(rows[0].scores) if rows else []
    best = at_best(record, rows)
    parts = [f"# {escape(record.name)}", f"**Question.** {' '.join(record.question.split())}"]
    parts += [_extent(record, rows)]
    if splits:
        contrasts = contrasted(record, rows)
        parts += ["## Answer", *answer(rows, contrasts), _equal_epochs(rows, bool(best))]
        parts += ["## Clean accuracy", score_table(rows, "clean")]
        parts += [*table_note(rows, "clean"), reading(rows, contrasts)]
        for name in ("scores", "factors"):
            parts += _picture(name, pictures, INTERVALS[name] if tested(rows, "clean") else "")
        parts += [*contrast_tables(contrasts), *chance_tables(rows)]
        parts += _picture("chance", pictures)
        if best:
            parts += [*best_section(record, best), *_picture("validation", pictures)]
        if epochs_factor(compared(rows)) is not None:
            parts += epochs_section(rows, best)
            parts += _picture("epochs", pictures, INTERVALS["epochs"])
    others = [split for split in splits if split != "clean"]
    if others:
        parts += ["## Robustness", *robustness(rows, others, contrasts)]
        parts += _picture("robustness", pictures)
    if "learning" in pictures:
        parts += ["## Training", *_picture("learning", pictures)]
        parts += [] if best else _picture("validation", pictures)
    if any(row.nominal is not None for row in rows):
        parts += ["## Rates", _rate_table(rows), *_picture("rates", pictures)]
    parts += _absent(rows)
    last: dict[str, Callable[[], list[str]]] = {"What was run": lambda: setting(record, rows)}
    if splits:
        last["Cost"] = lambda: cost(rows)
    for title, make in last.items():
        parts += [f"## {title}", *([kept[title]] if kept and title in kept else make())]
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


def _equal_epochs(rows: Sequence[Row], has_best: bool) -> str:
    """After how many epochs the conditions are compared, and that this was not chosen."""
    base = rows[0].config.epochs
    unlike = [f"{row.condition} ({row.config.epochs})" for row in rows if row.config.epochs != base]
    text = f"All are tested after their last epoch, {base}; no epoch was chosen by its score."
    if has_best:
        text = (
            f"Here, all are tested after their last epoch, {base}; no epoch was chosen by its "
            "score. The [best epochs by validation](#best-epoch-by-validation) are a second "
            "reading; none was chosen by a test score."
        )
    if not unlike:
        return text
    return text.replace(f", {base};", f", {base} but for {listed(unlike)};")


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
    if run.status == "diverged" and run.result is None:
        return "diverged (the loss was no longer finite)"
    if run.status == "diverged":
        after = len(run.result.epochs) if run.result else 0
        return f"diverged after {counted(after, 'whole epoch')} (the loss was no longer finite)"
    error = " ".join((run.error or "").split())
    return f"failed: {escape(error)}" if run.status == "failed" else "not run, or not to the end"


def _picture(name: str, pictures: Sequence[str], more: str = "") -> list[str]:
    return [f"![{name}]({name}.png)", CAPTIONS[name] + more] if name in pictures else []
