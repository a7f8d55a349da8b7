"""What a report says in sentences: which conditions differ, by how much, and what is not shown."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.reporting.statistics import Difference
from experiments.reporting.summary import Row, is_replica
from experiments.reporting.tables import difference_text, p_text

MOST_NAMES = 4  # of conditions about which there is little to say


def escape(text: str) -> str:
    r"""A name as Markdown shows it: what would be markup is not.

    Example:
        >>> print(escape("layer[34].* | <all>"))
        layer\[34].\* \| \<all>
    """
    return "".join(f"\\{letter}" if letter in "\\`*_[|<#" else letter for letter in text)


def listed(names: Sequence[str]) -> str:
    """Names one after the other; those of a grid have commas of their own."""
    return "; ".join(f"*{escape(name)}*" for name in names)


def counted(number: int, what: str) -> str:
    """A number of things: 1 seed, 2 seeds."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def answer(rows: Sequence[Row], split: str = "clean") -> list[str]:
    """The answer in paragraphs: what is shown, each condition, and the A/A check."""
    base = next(row for row in rows if row.is_baseline)
    checks = [row for row in rows if is_replica(row, base)]
    others = [row for row in rows if row is not base and not is_replica(row, base)]
    if not others:
        return ["Nothing is compared.", *(check(row, split) for row in checks)]
    paragraphs = [overview(rows, split), "\n".join(f"- {finding(row, split)}" for row in others)]
    if checks:
        return [*paragraphs, *(check(row, split) for row in checks)]
    missing = (
        "There is no A/A condition, which would differ from the baseline only in its `replica` and "
        "show how large a difference chance alone makes."
    )
    return [*paragraphs, missing]


def overview(rows: Sequence[Row], split: str) -> str:
    """Which conditions are higher, lower, or not shown to differ; without A/A checks."""
    base = next(row for row in rows if row.is_baseline)
    others = [row for row in rows if row is not base and not is_replica(row, base)]
    name = escape(base.condition)
    titles = {
        "higher": f"Higher than {name}",
        "lower": f"Lower than {name}",
        "not shown": f"No difference from {name} shown",
        "identical": f"Identical to {name}",
        "constant": f"The same difference from {name} with every seed",
        "too few": "Too few seeds for a test",
        "no pairs": f"No seed in common with {name}",
    }
    sentences = []
    for verdict, title in titles.items():
        names = [row.condition for row in others if _difference(row, split).verdict == verdict]
        if names:
            many = len(names) > MOST_NAMES and verdict not in ("higher", "lower")
            shown = f"{len(names)} conditions" if many else listed(names)
            sentences.append(f"**{title}:** {shown}.")
    return " ".join(sentences)


def finding(row: Row, split: str) -> str:
    """A condition's difference to the baseline, in a sentence."""
    found, base = _difference(row, split), escape(row.baseline)
    name, text = f"**{escape(row.condition)}**", _points(found)
    pairs = counted(found.n, "seed")
    tested = "" if found.holm is None else f", Holm p {p_text(found.holm)}"
    return {
        "higher": f"{name}: {text}{tested}: higher than {base}.",
        "lower": f"{name}: {text}{tested}: lower than {base}.",
        "not shown": f"{name}: {text}{tested}: no difference shown.",
        "identical": f"{name}: identical to {base} ({pairs}).",
        "constant": f"{name}: {text} with each of {pairs}; without any spread, there is no test.",
        "too few": f"{name}: {text} over {pairs}: too few for an interval or a test.",
        "no pairs": f"{name}: no finished run has a seed in common with one of {base}.",
    }[found.verdict]


def check(row: Row, split: str) -> str:
    """How much chance alone does: the A/A condition."""
    found = _difference(row, split)
    start = (
        f"**Check.** {escape(row.condition)} differs from {escape(row.baseline)} only in its "
        "`replica`, that is by chance (initial weights, order, augmentation, masks)"
    )
    if found.verdict == "no pairs":
        return f"{start}; no pair of its runs is finished."
    if found.verdict == "identical":
        return f"{start}, and its scores are identical."
    text = f"{start}. It differed by {_points(found)}: "
    if found.verdict in ("higher", "lower") and found.holm is not None:
        return (
            f"{text}even this passes for a difference (Holm p {p_text(found.holm)}), which is a "
            "false alarm. Trust the other comparisons the less."
        )
    return f"{text}a difference of that size can be chance."


def _points(difference: Difference) -> str:
    """Mean and interval, in percentage points."""
    mean, _, interval = difference_text(difference).partition(" ")
    return f"{mean} points {interval}".removesuffix("(constant)").strip()


def _difference(row: Row, split: str) -> Difference:
    score = row.scores.get(split)
    return score.difference if score and score.difference else Difference(0, None)
