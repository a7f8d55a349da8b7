"""What a report says in sentences: which conditions differ, by how much, and what is not shown."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.reporting.statistics import Difference
from experiments.reporting.summary import Row, is_replica
from experiments.reporting.tables import difference_text, one_line, p_text

MOST_NAMES = 4  # of conditions about which there is little to say


def escape(text: str) -> str:
    r"""A name as Markdown shows it, in one line: what would be markup is not.

    Example:
        >>> print(escape("layer[34].* | <all>"))
        layer\[34].\* \| \<all>
    """
    return "".join(
        f"\\{letter}" if letter in "\\`*_[|<#~$&" else letter for letter in one_line(text)
    )


def listed(names: Sequence[str]) -> str:
    """Names one after the other; those of a grid have commas of their own."""
    return "; ".join(f"*{escape(name)}*" for name in names)


def counted(number: int, what: str) -> str:
    """A number of things: 1 seed, 2 seeds."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def answer(rows: Sequence[Row], split: str = "clean") -> list[str]:
    """The answer in paragraphs: warnings, what is shown, each condition, and the A/A check."""
    others, checks = _others(rows), _checks(rows)
    warnings = alarms(rows, split)
    quiet = [check(row, split) for row in checks if not _is_alarm(row, split)]
    if not others:
        return [*warnings, "Nothing is compared.", *quiet]
    lines = "\n".join(f"- {finding(row, split)}" for row in others)
    if not checks:
        quiet = [
            f"There is no A/A condition, which would differ from {escape(rows[0].baseline)} only "
            "in its `replica` and show how large a difference chance alone makes."
        ]
    return [*warnings, overview(rows, split), lines, *quiet]


def alarms(rows: Sequence[Row], split: str) -> list[str]:
    """A warning for each A/A condition that passes for a difference."""
    return [check(row, split) for row in _checks(rows) if _is_alarm(row, split)]


def overview(rows: Sequence[Row], split: str) -> str:
    """Which conditions are higher, lower, or not shown to differ; without A/A checks."""
    others, name = _others(rows), escape(rows[0].baseline)
    titles = {
        "higher": f"Higher than {name}",
        "lower": f"Lower than {name}",
        "not shown": f"No difference from {name} shown",
        "identical": f"The same scores as {name}",
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
        "identical": f"{name}: the same scores as {base} ({pairs}).",
        "constant": f"{name}: {text} with each of {pairs}; without any spread, there is no test.",
        "too few": f"{name}: {text} over {pairs}: too few for an interval or a test.",
        "no pairs": f"{name}: no finished run has a seed in common with one of {base}.",
    }[found.verdict]


def check(row: Row, split: str) -> str:
    """How much chance alone does: the A/A condition; a warning where it passes for more."""
    found = _difference(row, split)
    title = "Warning: a false alarm." if _is_alarm(row, split) else "Check."
    start = (
        f"**{title}** {escape(row.condition)} differs from {escape(row.baseline)} only in its "
        "`replica`, that is by chance (initial weights, order, augmentation, masks)"
    )
    if found.verdict == "no pairs":
        return f"{start}; no pair of its runs is finished."
    if found.verdict == "identical":
        return f"{start}, and its scores are the same."
    text = f"{start}. It differed by {_points(found)}"
    if found.verdict == "too few":
        return f"{text} over {counted(found.n, 'seed')}: too few seeds to test."
    if found.verdict == "constant":
        return f"{text} with each of {counted(found.n, 'seed')}; without any spread, no test."
    if found.verdict == "not shown":
        return f"{text}: a difference of that size can be chance."
    p = "" if found.holm is None else f" (Holm p {p_text(found.holm)})"
    return (
        f"{text}, which passes for a difference{p} though there is none. Trust what is "
        "said of the other conditions less."
    )


def _is_alarm(row: Row, split: str) -> bool:
    return _difference(row, split).verdict in ("higher", "lower")


def _checks(rows: Sequence[Row]) -> list[Row]:
    """The A/A conditions."""
    base = next(row for row in rows if row.is_baseline)
    return [row for row in rows if is_replica(row, base)]


def _others(rows: Sequence[Row]) -> list[Row]:
    """What is neither the baseline nor an A/A condition."""
    base = next(row for row in rows if row.is_baseline)
    return [row for row in rows if row is not base and not is_replica(row, base)]


def _points(difference: Difference) -> str:
    """Mean and interval, in percentage points."""
    mean, _, interval = difference_text(difference).partition(" ")
    return f"{mean} points {interval}".removesuffix("(constant)").strip()


def _difference(row: Row, split: str) -> Difference:
    score = row.scores.get(split)
    return score.difference if score and score.difference else Difference(0, None)
