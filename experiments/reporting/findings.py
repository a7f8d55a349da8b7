"""What a report says in sentences: which conditions differ, by how much, and what is not shown."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.reporting.chance import Chance, chances
from experiments.reporting.comparisons import Family
from experiments.reporting.statistics import Difference
from experiments.reporting.summary import Row, checks, compared
from experiments.reporting.tables import difference_text, one_line, p_text, percent

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
    """The answer in paragraphs: warnings, what is shown, each condition, and the A/A checks.

    Primary families stand before the comparisons with the baseline, the others after them.
    """
    others = compared(rows)[1:]
    warnings = alarms(rows, split)
    quiet = [check(row, rows, split) for row in _alone(rows) if not _is_alarm(row, split)]
    if not others:
        nothing = [] if chances(rows, split) else ["Nothing is compared."]
        return [*warnings, *nothing, *quiet]
    lines = "\n".join(f"- {finding(row, split)}" for row in others)
    if not checks(rows):
        quiet = [
            f"There is no A/A condition, which would differ from {escape(rows[0].baseline)} only "
            "in its `replica` and show how large a difference chance alone makes."
        ]
    primary = [text for one in contrasts if one.is_primary for text in family_findings(one)]
    if primary:
        primary.append("What is not primary is exploratory.")
    more = [text for one in contrasts if not one.is_primary for text in family_findings(one)]
    return [*warnings, *primary, overview(rows, split), lines, *more, *quiet]


def alarms(rows: Sequence[Row], split: str) -> list[str]:
    """A/A: the share of pairs that pass for a difference; where there is one pair, a warning."""
    return [
        *(share(chance) for chance in chances(rows, split)),
        *(check(row, rows, split) for row in _alone(rows) if _is_alarm(row, split)),
    ]


def _alone(rows: Sequence[Row]) -> list[Row]:
    """The A/A conditions that are the only one of theirs; of others all pairs are looked at."""
    many = {name for row in rows if len(row.replicas) > 1 for name in row.replicas}
    return [row for row in checks(rows) if row.condition not in many]


def share(chance: Chance) -> str:
    """How many pairs of replicas pass for a difference, in a sentence."""
    name = escape(chance.condition)
    start = f"**A/A.** Of {len(chance.differences)} pairs of replicas of *{name}*"
    untested = len(chance.differences) - chance.tested
    if not chance.tested:
        return f"{start}, none can be tested."
    low, high = chance.interval
    return (
        f"{start}, {f'{untested} can not be tested; of the others, ' if untested else ''}"
        f"{chance.alarms} {'has' if chance.alarms == 1 else 'have'} p < .05: "
        f"{100 * chance.alarms / chance.tested:.1f} % [{100 * low:.1f}, {100 * high:.1f}], where "
        "5 % are expected of chance alone."
    )


def overview(rows: Sequence[Row], split: str) -> str:
    """Which conditions are higher, lower, or not shown to differ; without A/A checks."""
    name = escape(rows[0].baseline)
    others = compared(rows)[1:]
    titles = {
        "higher": f"Higher than {name}",
        "lower": f"Lower than {name}",
        "not shown": f"No difference from {name} shown",
        "equal": f"Equal to {name} within the margin",
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


def on_tests(family: Family) -> str:
    """What follows the name of a family, or of its comparisons: its test images, if not clean."""
    return "" if family.test == "clean" else f" on {escape(family.test)} test images"


def sentence(left: str, right: str, found: Difference, on_images: str = "") -> str:
    """A difference in a sentence that names the comparison, its test images, n and p."""
    base = escape(right)
    name = f"**{escape(left)}** minus {base}{on_images}"
    text, pairs = _points(found), counted(found.n, "seed")
    tested = f"{text}, n {found.n}"
    tested += "" if found.holm is None else f", Holm p {p_text(found.holm)}"
    tested += "" if found.tost is None else f", TOST Holm p {p_text(found.tost)}"
    margin = "" if found.margin is None else margin_text(100 * found.margin)
    but = f", but within {margin}" if found.is_within else ""
    nor = f", nor equality within {margin}" if margin else ""
    return {
        "higher": f"{name}: {tested}: higher{but}.",
        "lower": f"{name}: {tested}: lower{but}.",
        "equal": f"{name}: {tested}: equal within {margin}.",
        "not shown": f"{name}: {tested}: no difference shown{nor}; {_hidden([found])}.",
        "identical": f"{name}: the same scores ({pairs}).",
        "constant": f"{name}: {text} with each of {pairs}; without any spread, there is no test.",
        "too few": f"{name}: {text} over {pairs}: too few for an interval or a test.",
        "no pairs": f"{name}: no finished run has a seed in common with one of {base}.",
    }[found.verdict]


def family_findings(family: Family) -> list[str]:
    """What a family of comparisons shows; all of them are in its table.

    Of a primary family, each comparison is told; else those that show something.
    """
    verdicts = [one.difference.verdict for one in family.comparisons]
    differ = sum(verdict in ("higher", "lower") for verdict in verdicts)
    equal = verdicts.count("equal")
    rest = [c.difference for c in family.comparisons if c.difference.verdict == "not shown"]
    untested = len(verdicts) - differ - equal - len(rest)
    title = f"{'Primary: ' if family.is_primary else ''}{escape(family.title)}"
    text = f"**{title}**{on_tests(family)} ({counted(len(verdicts), 'comparison')}):"
    text += f" {differ or 'none'} shown to differ"
    if family.margin is not None:
        text += f", {equal or 'none'} shown to be equal within {margin_text(family.margin)}"
    text += f", {len(rest)} not ({_hidden(rest)})" if rest else ""
    text += f", {untested} without a test" if untested else ""
    lines = "\n".join(
        f"- {sentence(c.left, c.right, c.difference, on_tests(family))}"
        for c in family.comparisons
        if family.is_primary or c.difference.verdict in ("higher", "lower", "equal")
    )
    return [f"{text}{':' if lines else '.'}", *([lines] if lines else [])]


def spread_note(differences: Sequence[Difference]) -> list[str]:
    """What pairing buys, and how large a difference has to be to be found; [] without a test."""
    tested = [one for one in differences if one.detectable is not None]
    if not tested:
        return []
    known = [one for one in tested if one.pays is not None]
    parts = []
    if known:
        idle = sum(not one.pays for one in known)
        buys = f"buys nothing in {idle} of {len(known)} comparisons"
        if len(known) == 1:
            buys = "buys nothing" if idle else "shortens the interval"
        r = _range([one.correlation or 0.0 for one in known], "+.2f")
        parts.append(f"**Pairing:** r is {r}; pairing by seed {buys}.")
    sizes = {one.family for one in tested}
    level = ".05" if sizes == {1} else "Holm's strictest level"
    level += f", .05/{max(sizes)}" if len(sizes) == 1 and sizes != {1} else ""
    seeds = _range([one.n for one in tested], "d")
    found = _range([100 * (one.detectable or 0.0) for one in tested], ".2f")
    parts.append(
        f"**Power:** {seeds} seeds with this spread find a difference of {found} points with 80 % "
        f"chance, at {level}."
    )
    return [" ".join(parts)]


def _range(numbers: Sequence[float], form: str) -> str:
    least, most = (f"{number:{form}}" for number in (min(numbers), max(numbers)))
    return least if least == most else f"{least} to {most}"


def margin_text(margin: float) -> str:
    """A margin, given in points."""
    return f"±{margin:g} point{'' if margin == 1 else 's'}"


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
    return f"up to {percent(most)} points may be hidden"


def _is_alarm(row: Row, split: str) -> bool:
    return _difference(row, split).verdict in ("higher", "lower")


def _points(difference: Difference) -> str:
    """Mean and interval, in percentage points."""
    mean, _, interval = difference_text(difference).partition(" ")
    return f"{mean} points {interval}".removesuffix("(constant)").strip()


def _difference(row: Row, split: str) -> Difference:
    score = row.scores.get(split)
    return score.difference if score and score.difference else Difference(0, None)
