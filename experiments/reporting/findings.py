"""What a report says in sentences: which conditions differ, by how much, and what is not shown."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.reporting.comparisons import Family
from experiments.reporting.statistics import Difference
from experiments.reporting.summary import Row, checks, compared
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


def answer(
    rows: Sequence[Row], contrasts: Sequence[Family] = (), split: str = "clean"
) -> list[str]:
    """The answer in paragraphs: warnings, what is shown, each condition, and the A/A checks."""
    others = compared(rows)[1:]
    warnings = alarms(rows, split)
    quiet = [check(row, rows, split) for row in checks(rows) if not _is_alarm(row, split)]
    if not others:
        return [*warnings, "Nothing is compared.", *quiet]
    lines = "\n".join(f"- {finding(row, split)}" for row in others)
    if not checks(rows):
        quiet = [
            f"There is no A/A condition, which would differ from {escape(rows[0].baseline)} only "
            "in its `replica` and show how large a difference chance alone makes."
        ]
    families = [text for family in contrasts for text in family_findings(family)]
    return [*warnings, overview(rows, split), lines, *families, *quiet]


def alarms(rows: Sequence[Row], split: str) -> list[str]:
    """A warning for each A/A condition that passes for a difference."""
    return [check(row, rows, split) for row in checks(rows) if _is_alarm(row, split)]


def overview(rows: Sequence[Row], split: str) -> str:
    """Which conditions are higher, lower, or not shown to differ; without A/A checks."""
    name = escape(rows[0].baseline)
    others = compared(rows)[1:]
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
        found = [row for row in others if _difference(row, split).verdict == verdict]
        if found:
            many = len(found) > MOST_NAMES and verdict not in ("higher", "lower")
            names = listed([row.condition for row in found])
            shown = f"{len(found)} conditions" if many else names
            if verdict == "not shown":
                shown += f" ({_hidden([_difference(row, split) for row in found])})"
            sentences.append(f"**{title}:** {shown}.")
    return " ".join(sentences)


def finding(row: Row, split: str) -> str:
    """A condition's difference to the baseline, in a sentence."""
    return sentence(row.condition, row.baseline, _difference(row, split))


def sentence(left: str, right: str, found: Difference) -> str:
    """A difference in a sentence that names the comparison, n and p."""
    name, base = f"**{escape(left)}** minus {escape(right)}", escape(right)
    text, pairs = _points(found), counted(found.n, "seed")
    tested = f"{text}, n {found.n}"
    tested += "" if found.holm is None else f", Holm p {p_text(found.holm)}"
    return {
        "higher": f"{name}: {tested}: higher.",
        "lower": f"{name}: {tested}: lower.",
        "not shown": f"{name}: {tested}: no difference shown; {_hidden([found])}.",
        "identical": f"{name}: the same scores ({pairs}).",
        "constant": f"{name}: {text} with each of {pairs}; without any spread, there is no test.",
        "too few": f"{name}: {text} over {pairs}: too few for an interval or a test.",
        "no pairs": f"{name}: no finished run has a seed in common with one of {base}.",
    }[found.verdict]


def family_findings(family: Family) -> list[str]:
    """What a family of comparisons shows; all of them are in its table."""
    shown = [c for c in family.comparisons if c.difference.verdict in ("higher", "lower")]
    rest = [c.difference for c in family.comparisons if c.difference.verdict == "not shown"]
    untested = len(family.comparisons) - len(shown) - len(rest)
    text = f"**{escape(family.title)}** ({counted(len(family.comparisons), 'comparison')}):"
    text += f" {len(shown) or 'no'} shown to differ"
    text += f", {len(rest)} not ({_hidden(rest)})" if rest else ""
    text += f", {untested} without a test" if untested else ""
    lines = "\n".join(f"- {sentence(c.left, c.right, c.difference)}" for c in shown)
    return [f"{text}{':' if shown else '.'}", *([lines] if shown else [])]


def check(row: Row, rows: Sequence[Row], split: str) -> str:
    """How much chance alone does: the A/A condition; a warning where it passes for more."""
    found = _difference(row, split)
    first = next(other for other in rows if other.condition == row.repeats)
    title = "Warning: a false alarm." if _is_alarm(row, split) else "Check."
    start = (
        f"**{title}** {escape(row.condition)} differs from {escape(first.condition)} only in its "
        "`replica`, that is by chance (initial weights, order, augmentation, masks)"
    )
    end = f" *{escape(first.condition)}* is the mean of both everywhere else."
    if len(first.replicas) > 1:
        end = f" *{escape(first.condition)}* is the mean of all its replicas everywhere else."
    if found.verdict == "no pairs":
        return f"{start}; no pair of its runs is finished."
    if found.verdict == "identical":
        return f"{start}, and its scores are the same.{end}"
    text = f"{start}. It differed by {_points(found)}"
    if found.verdict == "too few":
        return f"{text} over {counted(found.n, 'seed')}: too few seeds to test.{end}"
    if found.verdict == "constant":
        return f"{text} with each of {counted(found.n, 'seed')}; without any spread, no test.{end}"
    p = "" if found.p is None else f", p {p_text(found.p)}"
    text = f"{text}, n {found.n}{p}"
    if found.verdict == "not shown":
        return f"{text}: no difference shown; {_hidden([found])}.{end}"
    return (
        f"{text}, which passes for a difference though there is none. Trust what is "
        f"said of the other conditions less.{end}"
    )


def _hidden(differences: Sequence[Difference]) -> str:
    """How large a difference may be where none is shown."""
    most = max(found.hidden or 0.0 for found in differences)
    return f"up to {100 * most:.2f} points may be hidden"


def _is_alarm(row: Row, split: str) -> bool:
    return _difference(row, split).verdict in ("higher", "lower")


def _points(difference: Difference) -> str:
    """Mean and interval, in percentage points."""
    mean, _, interval = difference_text(difference).partition(" ")
    return f"{mean} points {interval}".removesuffix("(constant)").strip()


def _difference(row: Row, split: str) -> Difference:
    score = row.scores.get(split)
    return score.difference if score and score.difference else Difference(0, None)
