"""Scores against those of the baseline: their tests, lines of tables, and what is said of them."""

from __future__ import annotations

from functools import cache

import numpy as np

from experiments.recounting.families import families_of
from experiments.recounting.numbers import Study
from experiments.recounting.paired import Test, compare, p_says, two
from experiments.recounting.sentences import cells, hidden

BEST = "best_clean"  # the column of the best epochs by validation


def alone(study: Study) -> list[str]:
    """Replicas that are the only one of their condition."""
    firsts = list(study.repeats.values())
    return [name for name, first in study.repeats.items() if firsts.count(first) == 1]


@cache
def score_of(study: Study, split: str = "clean") -> dict[str, Test]:
    """Each other condition minus the baseline; corrected where it stands first.

    That may be in a family on the same images.
    """
    others = [name for name in study.heads if name != study.baseline]
    base = study.values(study.baseline, split)
    elsewhere: dict[frozenset[str], Test] = {}
    best, test = split.startswith("best_"), split.removeprefix("best_")
    for one in families_of(study, best).values():
        for sides, pair in one.pairs.items() if one.test == test else ():
            elsewhere.setdefault(pair, one.tests[sides])
    pairs = {name: frozenset((name, study.baseline)) for name in others}
    rest = [name for name in others if pairs[name] not in elsewhere]
    corrected = dict(
        zip(rest, compare([(study.values(name, split), base) for name in rest]), strict=True)
    )
    found = {}
    for name in others:
        if name in corrected:
            found[name] = corrected[name]
        else:
            single = compare([(study.values(name, split), base)])[0]
            there = vars(elsewhere[pairs[name]])
            shared = {part: there[part] for part in ("holm", "family", "tost", "margin")}
            found[name] = Test(**{**vars(single), **shared})
    return found


def corrected_over(study: Study, split: str, where: str) -> str:
    """Over what p is corrected, where comparisons with the baseline stand in families; else ""."""
    others = [name for name in study.heads if name != study.baseline]
    on_split = [one for one in families_of(study).values() if one.test == split]
    pairs = {pair for one in on_split for pair in one.pairs.values()}
    elsewhere = [name for name in others if frozenset((name, study.baseline)) in pairs]
    if not elsewhere:
        return ""
    names = "; ".join(f"*{name}*" for name in elsewhere)
    rest = len(others) - len(elsewhere)
    more = f", else over the {rest} other comparison{'' if rest == 1 else 's'} here"
    text = f"for {names} over all comparisons of their family, {where}"
    return f"{text}{more if rest else ''}"


def score_row(study: Study, name: str, split: str, test: Test | None) -> str:
    """A line of the table."""
    values = 100 * np.array(list(study.values(name, split).values()))
    score = f"{name} | {len(values)} | {two(values.mean())} ± {two(values.std(ddof=1))}"
    return f"{score} |  |  |  | " if test is None else f"{score} | {test.points} | {cells(test)}"


def overview(study: Study, found: dict[str, Test]) -> str:
    """Which are higher, lower or not shown to differ, in sentences."""
    groups: dict[str, list[str]] = {"higher": [], "lower": [], "no": [], "equal": []}
    for name, test in found.items():
        groups[test.verdict].append(name)
    sentences = [
        f"**{title} {study.baseline}:** {'; '.join(f'*{name}*' for name in groups[verdict])}."
        for verdict, title in (("higher", "Higher than"), ("lower", "Lower than"))
        if groups[verdict]
    ]
    if none := groups["no"]:
        most = hidden([found[name] for name in none])
        base = study.baseline
        sentences.append(f"**No difference from {base} shown:** {_many(none)} ({most}).")
    if equal := groups["equal"]:
        sentences.append(f"**Equal to {study.baseline} within the margin:** {_many(equal)}.")
    return " ".join(sentences)


def _many(names: list[str]) -> str:
    """Their names, or their number."""
    return f"{len(names)} conditions" if len(names) > 4 else "; ".join(f"*{n}*" for n in names)


def check(study: Study, name: str, split: str) -> tuple[str, bool]:
    """What is said of an A/A condition, and whether that is a warning."""
    first = study.repeats[name]
    test = compare([(study.own(name, split), study.own(first, split))])[0]
    alarm = test.p < 0.05
    start = (
        f"**{'Warning: a false alarm.' if alarm else 'Check.'}** {name} differs from {first} only "
        "in its `replica`, that is by chance (initial weights, order, augmentation, masks). It "
        f"differed by {test.points.replace(' [', ' points [')}, n {test.n}, p {p_says(test.p)}"
    )
    end = f" *{first}* is the mean of both everywhere else."
    if alarm:
        said = ", which passes for a difference though there is none. Trust what is said of the "
        return f"{start}{said}other conditions less.{end}", True
    return f"{start}: no difference shown; {hidden([test])}.{end}", False
