"""The parts of a report that compare: the table of clean accuracy, contrasts, robustness."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.reporting.comparisons import Family
from experiments.reporting.findings import alarms, counted, escape, listed, overview
from experiments.reporting.summary import Row, compared, is_tested
from experiments.reporting.tables import accuracy_text, difference_text, holm_text, markdown


def reading(rows: Sequence[Row], contrasts: Sequence[Family]) -> str:
    """How the table is to be read."""
    heads = compared(rows)
    spread = any(len(row.scores["clean"].values) > 1 for row in heads)
    text = "Means ± standard deviations over n seeds." if spread else "Each is of one seed."
    for row in heads:
        if row.replicas:
            text += f" {escape(row.condition)} is, seed by seed, the mean of its replicas: "
            text += f"{listed([row.condition, *row.replicas])}."
    if len(heads) == 1:
        return text
    text += " Differences are in percentage points, paired by seed"
    if not tested(rows, "clean"):
        return text + _untested(rows)
    return (
        f"{text}, with the 95 % interval of the paired t-test; there is none below three pairs. "
        f"p is that of the two-sided test{_correction(heads, contrasts)}; the intervals are not "
        "corrected, nor is anything over several tables. “No difference shown” is not “no "
        "difference”: the end of the interval that is farther from zero says how large one may be."
    )


def _correction(heads: Sequence[Row], contrasts: Sequence[Family]) -> str:
    """Over what p is corrected."""
    base = heads[0].baseline
    done = [
        {one.left, one.right} for family in contrasts if family.single for one in family.comparisons
    ]
    others = [row.condition for row in heads[1:]]
    elsewhere = [name for name in others if {name, base} in done]
    rest = len(others) - len(elsewhere)
    if not elsewhere:
        over = f"the {rest} comparisons of this table"
        return f", corrected after Holm over {over}" if rest > 1 else ""
    text = f", corrected after Holm: for {listed(elsewhere)} over all comparisons of their table "
    text += "under [Contrasts](#contrasts)"
    return text + (f", else over the {counted(rest, 'other comparison')} here" if rest else "")


def _untested(rows: Sequence[Row]) -> str:
    """Why there is no test."""
    pairs = [found.n for row in compared(rows) if (found := row.scores["clean"].difference)]
    if max(pairs, default=0) < 3:
        return "; with fewer than three pairs, there is no interval and no test."
    return "; where they have no spread, or fewer than three pairs, there is no test."


def tested(rows: Sequence[Row], split: str) -> bool:
    """Whether anything is."""
    return any(is_tested(row.scores[split]) for row in compared(rows))


def score_table(rows: Sequence[Row], split: str) -> str:
    """A line per condition: n, accuracy, difference to the baseline, corrected p."""
    names = ("condition", "n", "accuracy, %", f"minus {escape(rows[0].baseline)} [95 %]", "Holm p")
    return markdown(names, score_lines(rows, split))


def score_lines(rows: Sequence[Row], split: str) -> list[tuple[object, ...]]:
    """The same line by line, as cells."""
    lines: list[tuple[object, ...]] = []
    for row in compared(rows):
        score = row.scores[split]
        found, n = score.difference, len(score.values)
        text = difference_text(found)
        if found is not None and found.n not in (n, 0):
            text += f" ({counted(found.n, 'pair')})"
        lines.append((escape(row.condition), n, accuracy_text(score), text, holm_text(found)))
    return lines


def robustness(rows: Sequence[Row], splits: Sequence[str]) -> list[str]:
    """For each split of changed test images a table, and what it shows in a sentence."""
    heads = compared(rows)
    corrected = len(heads) > 2 and any(tested(rows, split) for split in splits)
    note = "; each table is corrected for itself" if corrected else ""
    parts = [f"The same networks on changed test images{note}."]
    for split in splits:
        parts.append(f"### {escape(split.capitalize())}")
        parts += [text for text in [*alarms(rows, split), overview(rows, split)] if text]
        parts.append(score_table(rows, split))
    return parts


def contrast_tables(contrasts: Sequence[Family]) -> list[str]:
    """A table for each family of comparisons."""
    if not contrasts:
        return []
    parts = [
        "## Contrasts",
        "What the question asks for, besides the comparisons with the baseline. Each is the first "
        "condition, or level, minus the second, paired by seed. p is corrected after Holm over the "
        "comparisons of its table.",
    ]
    for family in contrasts:
        lines = [
            (
                f"{escape(one.left)} − {escape(one.right)}",
                one.difference.n,
                difference_text(one.difference),
                holm_text(one.difference),
            )
            for one in family.comparisons
        ]
        names = ("contrast", "n", "points [95 %]", "Holm p")
        parts += [f"### {escape(family.title)}", markdown(names, lines)]
    return parts
