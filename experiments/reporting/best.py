"""A second reading of a study: of each run its best epoch by validation, and not the last one.

best = at_best(record, rows)    # rows again: the same comparisons, of the scores of those epochs
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from experiments.reporting.findings import alarms, overview
from experiments.reporting.score_tables import (
    family_tables,
    score_lines,
    table_note,
    tested_names,
)
from experiments.reporting.summary import Row, compared, contrasted, summarize
from experiments.reporting.tables import markdown, percent
from experiments.results import Best
from experiments.running.records import Run, StudyRecord

TITLE = "Best epoch by validation"
NOTE = (
    "A second reading: of each run the weights after the epoch with the highest accuracy on its "
    "validation images, the first of equals, on the clean test images. All else in this report is "
    "about the last epoch. Validation images count with the labels that are trained with, wrong "
    "ones included. Accuracies, differences and p are made and read as those of the last epoch; "
    "each table is corrected for itself."
)


OTHER_TESTS = "Tables whose titles name other test images are of those, after the same epochs."


def at_best(record: StudyRecord, rows: Sequence[Row]) -> list[Row]:
    """The rows of the best epochs; runs without validation do not count. Empty if all have none."""
    if not any(result.best for row in rows for result in row.results.values()):
        return []
    return summarize(record, [_chosen(run) for row in rows for run in row.runs])


def _chosen(run: Run) -> Run:
    """The run with the scores of its best epoch; missing without one."""
    if run.status != "finished" or run.result is None or run.result.best is None:
        return replace(run, status="missing", result=None)
    return replace(run, result=replace(run.result, scores=run.result.best.scores))


def best_section(record: StudyRecord, rows: Sequence[Row]) -> list[str]:
    """What the report says of the best epochs.

    Args:
        record: of the study.
        rows: of the best epochs.
    """
    contrasts = contrasted(record, rows)
    found = [*alarms(rows, "clean"), overview(rows, "clean")]
    others = any(family.test != "clean" for family in contrasts)
    return [
        f"## {TITLE}",
        NOTE,
        *([OTHER_TESTS] if others else []),
        *(text for text in found if text),
        _table(rows),
        *table_note(rows, "clean"),
        *family_tables(contrasts, kinds=True),
    ]


def _table(rows: Sequence[Row]) -> str:
    lines = [
        (*line[:2], *_taken(row, rows), *line[2:])
        for line, row in zip(score_lines(rows, "clean"), compared(rows), strict=True)
    ]
    names = ("condition", "n", "epochs, mean", "validation, %", "accuracy, %")
    return markdown((*names, *tested_names(rows)), lines)


def _taken(row: Row, rows: Sequence[Row]) -> tuple[str, str]:
    """How many epochs were taken of how many, and the accuracy on validation, in the mean."""
    names = (row.condition, *row.replicas)
    runs = [result for one in rows if one.condition in names for result in one.results.values()]
    best: list[Best] = [result.best for result in runs if result.best is not None]
    if not best:
        return "", ""
    epochs = statistics.fmean(one.epoch + 1 for one in best)
    validation = statistics.fmean(one.validation for one in best)
    return f"{epochs:.1f} of {row.config.epochs}", percent(validation)
