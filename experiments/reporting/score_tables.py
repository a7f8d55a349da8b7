"""The parts of a report that compare: the table of clean accuracy, contrasts, robustness."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from experiments.contrasts import plain_contrasts
from experiments.reporting.chance import chances
from experiments.reporting.comparisons import Family
from experiments.reporting.findings import (
    alarms,
    counted,
    escape,
    listed,
    margin_text,
    on_tests,
    overview,
    share,
    spread_note,
)
from experiments.reporting.statistics import Difference
from experiments.reporting.summary import Row, compared, is_tested
from experiments.reporting.tables import (
    accuracy_text,
    correlation_text,
    detectable_text,
    difference_text,
    holm_text,
    markdown,
    p_text,
)

_TESTED = ("r", "80 % power", "Holm p")


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
        "difference”: the end of the interval that is farther from zero says how large one may be. "
        "r is the correlation of the two over the seeds; pairing buys nothing where the interval "
        "is no shorter than that of Welch's t-test, which takes both for independent. The "
        "column of power has the true difference, in points, that such a test finds with 80 % "
        "chance."
    )


def _correction(heads: Sequence[Row], contrasts: Sequence[Family]) -> str:
    """Over what p is corrected in the table of clean accuracy."""
    rest = len(heads) - 1
    if not (elsewhere := _elsewhere(heads, contrasts, "clean")):
        over = f"the {rest} comparisons of this table"
        return f", corrected after Holm over {over}" if rest > 1 else ""
    return f", corrected after Holm: {_over(elsewhere, rest, 'below')}"


def _elsewhere(heads: Sequence[Row], contrasts: Sequence[Family], split: str) -> list[str]:
    """The conditions whose difference to the baseline stands in a family on the same images."""
    on_split = [family for family in contrasts if family.test == split]
    done = {one.pair for family in on_split for one in family.comparisons}
    base = heads[0].baseline
    return [row.condition for row in heads[1:] if frozenset((row.condition, base)) in done]


def _over(elsewhere: Sequence[str], count: int, where: str) -> str:
    """Over what p is corrected, of `count` comparisons, where some stand in a family."""
    rest = count - len(elsewhere)
    text = f"for {listed(elsewhere)} over all comparisons of their family, {where}"
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
    names = ("condition", "n", "accuracy, %", *tested_names(rows))
    return markdown(names, score_lines(rows, split))


def tested_names(rows: Sequence[Row]) -> tuple[str, ...]:
    """The columns of the comparisons with the baseline."""
    return (f"minus {escape(rows[0].baseline)} [95 %]", *_TESTED)


def score_lines(rows: Sequence[Row], split: str) -> list[tuple[object, ...]]:
    """The same line by line, as cells."""
    lines: list[tuple[object, ...]] = []
    for row in compared(rows):
        score = row.scores[split]
        found, n = score.difference, len(score.values)
        text = difference_text(found)
        if found is not None and found.n not in (n, 0):
            text += f" ({counted(found.n, 'pair')})"
        cells = (accuracy_text(score), text, *_tested_cells(found))
        lines.append((escape(row.condition), n, *cells))
    return lines


def table_note(rows: Sequence[Row], split: str) -> list[str]:
    """What pairing buys in that table, and what it would find."""
    scores = [row.scores[split] for row in compared(rows)]
    return spread_note([score.difference for score in scores if score.difference])


def _tested_cells(found: Difference | None) -> tuple[str, str, str]:
    return correlation_text(found), detectable_text(found), holm_text(found)


def robustness(
    rows: Sequence[Row], splits: Sequence[str], contrasts: Sequence[Family] = ()
) -> list[str]:
    """For each split of changed test images a table, and what it shows in a sentence."""
    heads = compared(rows)
    corrected = len(heads) > 2 and any(tested(rows, split) for split in splits)
    note = "; each table is corrected for itself" if corrected else ""
    shared = {split: _elsewhere(heads, contrasts, split) for split in splits}
    if note and any(shared.values()):
        note += ", but for what stands in a family on its images"
    parts = [f"The same networks on changed test images{note}."]
    for split in splits:
        parts.append(f"### {escape(split.capitalize())}")
        parts += [text for text in [*alarms(rows, split), overview(rows, split)] if text]
        parts += [score_table(rows, split), *table_note(rows, split)]
        if shared[split] and tested(rows, split):
            over = _over(shared[split], len(heads) - 1, "above")
            parts.append(f"Here, p is corrected after Holm: {over}.")
    return parts


def contrast_tables(contrasts: Sequence[Family]) -> list[str]:
    """A table for each family of comparisons; primary ones in a section of their own."""
    primary = [family for family in contrasts if family.is_primary]
    rest = [family for family in contrasts if not family.is_primary]
    parts = _contrast_section("Primary contrasts", primary) if primary else []
    return parts + _contrast_section("Exploratory contrasts" if primary else "Contrasts", rest)


def _contrast_section(title: str, contrasts: Sequence[Family]) -> list[str]:
    if not contrasts:
        return []
    asked = "\n".join(_as_yaml(family) for family in contrasts)
    equality = ""
    if any(family.margin is not None for family in contrasts):
        equality = (
            " Where a margin (±) is given, two one-sided tests (TOST) ask whether the difference "
            "is within it; their p is corrected likewise, for itself."
        )
    clean = ""
    if any(family.test != "clean" for family in contrasts):
        clean = " A table whose title names no test images is of the clean ones."
    parts = [
        f"## {title}",
        "What the question asks for, besides the comparisons with the baseline:",
        f"```yaml\n{asked}\n```",
        "Each is the first condition, or level, minus the second, paired by seed. p is corrected "
        f"after Holm over the comparisons of its table.{equality}{clean}",
    ]
    return parts + family_tables(contrasts)


def family_tables(contrasts: Sequence[Family], kinds: bool = False) -> list[str]:
    """The tables alone, each under its name, and what pairing buys in each.

    Args:
        contrasts: of the study.
        kinds: whether the names say which families are primary, where some are.
    """
    parts = []
    told = kinds and any(family.is_primary for family in contrasts)
    for family in contrasts:
        margin = [] if family.margin is None else [f"TOST {margin_text(family.margin)}, Holm p"]
        lines = []
        for one in family.comparisons:
            found = one.difference
            tost = ["" if found.tost is None else p_text(found.tost)] if margin else []
            cells = (found.n, difference_text(found), *_tested_cells(found), *tost)
            lines.append((f"{escape(one.left)} − {escape(one.right)}", *cells))
        names = ("contrast", "n", "points [95 %]", *_TESTED, *margin)
        kind = "Primary: " if family.is_primary else "Exploratory: "
        title = f"{kind if told else ''}{escape(family.title)}"
        title += f",{on_tests(family)}" if on_tests(family) else ""
        parts += [f"### {title}", markdown(names, lines)]
        parts += spread_note([one.difference for one in family.comparisons])
    return parts


def _as_yaml(family: Family) -> str:
    """A family as a study's file has it, an entry to a line."""
    ((name, asked),) = plain_contrasts([family.asked]).items()
    options = asked if isinstance(asked, dict) else {}
    lines = [f"{_flow(name)}:"]
    lines += [f"  {option}: {_flow(options[option])}" for option in options if option != "compare"]
    lines += ["  compare:"] if options else []
    return "\n".join([*lines, *(f"  - {_flow(entry)}" for entry in family.asked.plain)])


def _flow(data: object) -> str:
    """Plain data in one line of YAML."""
    text = yaml.safe_dump(
        data, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6
    )
    return text.removesuffix("...\n").strip()


def chance_tables(rows: Sequence[Row]) -> list[str]:
    """All pairs of replicas, where a condition has several."""
    found = chances(rows, "clean")
    parts = ["## A/A"] if found else []
    for one in found:
        lines = [
            (
                f"{escape(later)} − {escape(earlier)}",
                difference.n,
                difference_text(difference),
                correlation_text(difference),
                "" if difference.p is None else p_text(difference.p),
            )
            for (later, earlier), difference in one.differences.items()
        ]
        parts += [
            share(one),
            f"The {len(one.replicas)} replicas have other initial weights, order, augmentation and "
            f"masks each; *{escape(one.condition)}* is their mean everywhere else. The interval is "
            "that of the binomial distribution, 95 % (Clopper and Pearson), and too narrow: pairs "
            "that share a replica are not independent. p is not corrected.",
            markdown(("pair", "n", "points [95 %]", "r", "p"), lines),
        ]
    return parts
