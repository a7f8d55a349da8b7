"""Families of comparisons: what a study's question asks for, each corrected after Holm.

One family is that of the baseline; the others are the study's `contrasts`. A comparison has one
corrected p: that of the first of the contrasts that it stands in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from experiments.contrasts import Pairs
from experiments.reporting.statistics import Difference, compare, compare_pairs


@dataclass(frozen=True)
class Comparison:
    """One minus another: conditions, or levels of a factor."""

    left: str
    right: str
    difference: Difference


@dataclass(frozen=True)
class Family:
    """Comparisons whose p-values are corrected together.

    Args:
        title: what is compared, such as "Pairs of rate, within regularizer".
        comparisons: in the order of the study; the later one minus the earlier one.
        single: whether each side is one condition, and no mean over some.
    """

    title: str
    comparisons: tuple[Comparison, ...]
    single: bool


def families(
    values: Mapping[str, Mapping[int, float]],
    factors: Mapping[str, Mapping[str, str]],
    contrasts: Sequence[Pairs],
) -> list[Family]:
    """The families of a study's contrasts, in their order.

    Args:
        values: condition -> seed -> score, averaged over replicas; without those.
        factors: condition -> factor -> name of its level.
        contrasts: of the study; conditions that have no values are left out.

    Example:
        >>> values = {"a": {1: 0.5, 2: 0.6, 3: 0.5}, "b": {1: 0.6, 2: 0.7, 3: 0.64}}
        >>> levels = {"a": {"size": "1"}, "b": {"size": "2"}}
        >>> family = families(values, levels, [Pairs("size")])[0]
        >>> family.title, [(one.left, one.right) for one in family.comparisons]
        ('Pairs of size', [('b', 'a')])
    """
    found = []
    for pairs in contrasts:
        if isinstance(pairs.of, str):
            groups = _levels(pairs.of, pairs.within, {name: factors[name] for name in values})
        else:
            groups = [{name: [name] for name in pairs.of if name in values}]
        cells = {name: conditions for group in groups for name, conditions in group.items()}
        sides = {name: _mean([values[one] for one in ones]) for name, ones in cells.items()}
        chosen = [(later, earlier) for group in groups for earlier, later in combinations(group, 2)]
        differences = compare_pairs(sides, chosen)
        made = tuple(Comparison(*pair, d) for pair, d in zip(chosen, differences, strict=True))
        if made:
            single = all(len(ones) == 1 for ones in cells.values())
            found.append(Family(_title(pairs, factors), made, single))
    return found


def against_baseline(
    values: Mapping[str, Mapping[int, float]], baseline: str, others: Sequence[Family]
) -> dict[str, Difference]:
    """Each other condition minus the baseline.

    A comparison that stands in another family has the corrected p of that one; the p-values of
    the rest are corrected over the rest, so that no comparison is counted twice.
    """
    corrected = {
        frozenset((one.left, one.right)): one.difference.holm
        for family in reversed(others)  # the first one that has it rules
        if family.single
        for one in family.comparisons
    }
    rest = {name: v for name, v in values.items() if frozenset((name, baseline)) not in corrected}
    found = compare(values, baseline) | compare(rest, baseline)
    return {
        name: one if name in rest else replace(one, holm=corrected[frozenset((name, baseline))])
        for name, one in found.items()
    }


def _levels(
    factor: str, within: str | None, factors: Mapping[str, Mapping[str, str]]
) -> list[dict[str, list[str]]]:
    """For each level of `within` (or for all): name of a level -> the conditions that have it."""
    crossed = {name: levels for name, levels in factors.items() if factor in levels}
    names = list(dict.fromkeys(levels[factor] for levels in crossed.values()))
    places = [None] if within is None else list(dict.fromkeys(v[within] for v in crossed.values()))
    groups: list[dict[str, list[str]]] = [{} for _ in places]
    for (group, place), name in product(zip(groups, places, strict=True), names):
        ones = [
            condition
            for condition, levels in crossed.items()
            if levels[factor] == name and (within is None or levels[within] == place)
        ]
        shown = name if place is None else f"{name} ({place})"
        if ones:
            group[ones[0] if len(ones) == 1 else shown] = ones
    return groups


def _mean(cells: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Seed -> the mean over the cells, of the seeds that all of them have."""
    seeds = [seed for seed in cells[0] if all(seed in cell for cell in cells)]
    return {seed: sum(cell[seed] for cell in cells) / len(cells) for seed in seeds}


def _title(pairs: Pairs, factors: Mapping[str, Mapping[str, str]]) -> str:
    if not isinstance(pairs.of, str):
        return f"Pairs among {'; '.join(pairs.of)}"
    names = list(dict.fromkeys(name for levels in factors.values() for name in levels))
    rest = [name for name in names if name not in (pairs.of, pairs.within)]
    within = "" if pairs.within is None else f", within {pairs.within}"
    mean = f", mean over {' and '.join(rest)}" if rest else ""
    return f"Pairs of {pairs.of}{within}{mean}"
