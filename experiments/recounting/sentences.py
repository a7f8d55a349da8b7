"""What a report says of tests, in sentences and in cells of tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from scipy import stats

from experiments.recounting.families import Family
from experiments.recounting.numbers import Study
from experiments.recounting.paired import Test, compare, p_says, two

Key = tuple[str, ...]
COLUMNS = "r | 80 % power | Holm p"


def cells(test: Test) -> str:
    """r, what is found with 80 % chance, and the corrected p."""
    r = "" if test.r is None else f"{test.r:+.2f}"
    return f"{r} | {two(100 * test.found)} | {p_says(test.holm)}"


def hidden(found: Sequence[Test]) -> str:
    """How large a difference may be."""
    return f"up to {two(100 * max(test.hidden for test in found))} points may be hidden"


def bullet(left: str, right: str, test: Test, on_tests: str = "") -> tuple[str, str]:
    """How a sentence on a comparison begins, and all of it."""
    key = f"- **{left}** minus {right}{on_tests}"
    points = test.points.replace(" [", " points [")
    said = f"{key}: {points}, n {test.n}, Holm p {p_says(test.holm)}"
    within = "" if test.margin is None else f" within {_margin(test.margin)}"
    if test.tost is not None:
        said += f", TOST Holm p {p_says(test.tost)}"
    if test.verdict == "equal":
        return key, f"{said}: equal{within}."
    if test.verdict == "no":
        nor = f", nor equality{within}" if within else ""
        return key, f"{said}: no difference shown{nor}; {hidden([test])}."
    but = f", but{within}" if test.tost is not None and test.tost < 0.05 else ""
    return key, f"{said}: {test.verdict}{but}."


def note(found: Sequence[Test]) -> str:
    """What pairing buys, and how large a difference has to be to be found."""
    r = [test.r for test in found if test.r is not None]
    text = ""
    if r:
        paid = [test.pays for test in found if test.r is not None]
        buys = f"buys nothing in {paid.count(False)} of {len(r)} comparisons"
        if len(r) == 1:
            buys = "shortens the interval" if paid[0] else "buys nothing"
        text = f"**Pairing:** r is {_span(r, '+.2f')}; pairing by seed {buys}. "
    sizes = {test.family for test in found}
    level = ".05" if sizes == {1} else "Holm's strictest level"
    if len(sizes) == 1 and sizes != {1}:
        level += f", .05/{min(sizes)}"
    seeds = _span([test.n for test in found], "d")
    power = _span([100 * test.found for test in found], ".2f")
    return (
        f"{text}**Power:** {seeds} seeds with this spread find a difference of {power} points with "
        f"80 % chance, at {level}."
    )


def _span(numbers: Sequence[float], form: str) -> str:
    ends = [format(number, form) for number in (min(numbers), max(numbers))]
    return " to ".join(dict.fromkeys(ends))


def _margin(margin: float) -> str:
    return f"±{margin:g} point" if margin == 1 else f"±{margin:g} points"


def family_lines(title: str, family: Family) -> dict[Key, str]:
    """What the answer says of a family."""
    verdicts = {pair: test.verdict for pair, test in family.tests.items()}
    rest = [family.tests[pair] for pair, verdict in verdicts.items() if verdict == "no"]
    equal = [pair for pair, verdict in verdicts.items() if verdict == "equal"]
    count, many = len(verdicts), len(verdicts) - len(rest) - len(equal)
    told = [pair for pair in verdicts if family.is_primary or verdicts[pair] != "no"]
    text = f"**{'Primary: ' if family.is_primary else ''}{title}**{family.on_tests} "
    text += f"({count} comparison{'' if count == 1 else 's'}): {many or 'none'} shown to differ"
    if family.margin is not None:
        text += f", {len(equal) or 'none'} shown to be equal within {_margin(family.margin)}"
    text += f", {len(rest)} not ({hidden(rest)})" if rest else ""
    lines: dict[Key, str] = {
        ("Answer", "", "family", title): f"{text}{':' if told else '.'}",
    }
    for left, right in told:
        key, text = bullet(left, right, family.tests[left, right], family.on_tests)
        lines["Answer", "", title, key] = text
    return lines


def family_table(title: str, family: Family, section: str, kind: str = "") -> dict[Key, str]:
    """The table of a family, whose title may begin with its kind."""
    title = f"{kind}{title},{family.on_tests}" if family.on_tests else f"{kind}{title}"
    head = f"contrast | n | points [95 %] | {COLUMNS}"
    if family.margin is not None:
        head += f" | TOST {_margin(family.margin)}, Holm p"
    lines: dict[Key, str] = {
        (section, "title", title): title,
        (section, title, "note"): note([*family.tests.values()]),
        (section, title, "row", "contrast"): head,
    }
    for (left, right), test in family.tests.items():
        name = f"{left} − {right}"
        row = f"{name} | {test.n} | {test.points} | {cells(test)}"
        row += "" if test.tost is None else f" | {p_says(test.tost)}"
        lines[section, title, "row", name] = row
    return lines


def of_replicas(study: Study, first: str, split: str) -> dict[tuple[str, str], Test]:
    """All pairs of the replicas of a condition, itself included, each tested alone."""
    names = [first, *(name for name, other in study.repeats.items() if other == first)]
    pairs = [(later, earlier) for earlier, later in combinations(names, 2)]
    found = compare([(study.own(one, split), study.own(other, split)) for one, other in pairs])
    return dict(zip(pairs, found, strict=True))


def share(found: Sequence[Test]) -> tuple[int, float, float, float]:
    """How many have p < .05; the share of them in percent, and its interval."""
    alarms, count = sum(test.p < 0.05 for test in found), len(found)
    low = 100 * stats.beta.ppf(0.025, alarms, count - alarms + 1) if alarms else 0.0
    high = 100 * stats.beta.ppf(0.975, alarms + 1, count - alarms) if alarms < count else 100.0
    return alarms, 100 * alarms / count, low, high


def chance_lines(study: Study) -> dict[Key, str]:
    """What is said of the replicas of a condition, where there are several."""
    lines: dict[Key, str] = {}
    firsts = list(study.repeats.values())
    for first in repeated(study):
        for split in study.splits:
            if split != "clean":
                said = share_text(study, first, split)
                lines["Robustness", split.capitalize(), "share", first] = said
        pairs = of_replicas(study, first, "clean")
        lines["Answer", "", "share", first] = share_text(study, first, "clean")
        lines["A/A", "", "share", first] = lines["Answer", "", "share", first]
        lines["A/A", "", "replicas", first] = (
            f"The {firsts.count(first) + 1} replicas have other initial weights, order, "
            f"augmentation and masks each; *{first}* is their mean everywhere else. The interval "
            "is that of the binomial distribution, 95 % (Clopper and Pearson), and too narrow: "
            "pairs that share a replica are not independent. p is not corrected."
        )
        lines["A/A", "", "row", "pair"] = "pair | n | points [95 %] | r | p"
        for (later, earlier), test in pairs.items():
            name, r = f"{later} − {earlier}", "" if test.r is None else f"{test.r:+.2f}"
            row = f"{name} | {test.n} | {test.points} | {r} | {p_says(test.p)}"
            lines["A/A", "", "row", name] = row
    return lines


def repeated(study: Study) -> list[str]:
    """The conditions that several others repeat."""
    firsts = list(study.repeats.values())
    return list(dict.fromkeys(first for first in firsts if firsts.count(first) > 1))


def share_text(study: Study, name: str, split: str) -> str:
    """How many pairs of the replicas of a condition have p < .05, in a sentence."""
    pairs = of_replicas(study, name, split)
    alarms, percent, low, high = share([*pairs.values()])
    return (
        f"**A/A.** Of {len(pairs)} pairs of replicas of *{name}*, {alarms} "
        f"{'has' if alarms == 1 else 'have'} p < .05: {percent:.1f} % [{low:.1f}, {high:.1f}], "
        "where 5 % are expected of chance alone."
    )
