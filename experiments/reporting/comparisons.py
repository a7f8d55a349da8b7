"""Families of comparisons: what a study's question asks for, each corrected after Holm.

One family is that of the baseline; the others are the study's `contrasts`. A comparison has one
corrected p: that of the first of the contrasts that it stands in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.contrasts import Asked, Side
from experiments.reporting.statistics import Difference, compare, compare_pairs


@dataclass(frozen=True)
class Comparison:
    """One side minus another.

    Args:
        left: name of a condition, or of a mean of several.
        right: likewise.
        difference: between them.
        pair: both conditions, where each side is one.
    """

    left: str
    right: str
    difference: Difference
    pair: frozenset[str] | None = None


@dataclass(frozen=True)
class Family:
    """Comparisons whose p-values are corrected together.

    Args:
        title: its name.
        comparisons: in the order of the study.
        asked: as the study asks for it.
    """

    title: str
    comparisons: tuple[Comparison, ...]
    asked: Asked

    @property
    def margin(self) -> float | None:
        """In points: whether each difference is within it is tested."""
        return self.asked.margin

    @property
    def is_primary(self) -> bool:
        """Whether the study is made for it."""
        return self.asked.primary

    @property
    def test(self) -> str:
        """The name of the test images that it is about."""
        return self.asked.test


def families(values: Mapping[str, Mapping[int, float]], contrasts: Sequence[Asked]) -> list[Family]:
    """Families of a study's contrasts that are about the same test images, primary ones first.

    Args:
        values: condition -> seed -> score on those images, averaged over replicas; without those.
        contrasts: of the study.

    Example:
        >>> from experiments.contrasts import read_contrasts
        >>> values = {"a": {1: 0.5, 2: 0.6, 3: 0.5}, "b": {1: 0.6, 2: 0.7, 3: 0.64}}
        >>> sizes = {"sizes": [{"take": "b", "minus": "a"}]}
        >>> (family,) = families(values, read_contrasts(sizes, {"a": {}, "b": {}})[0])
        >>> round(family.comparisons[0].difference.mean, 3)
        0.113
    """
    return [_family(values, asked) for asked in sorted(contrasts, key=lambda one: not one.primary)]


def _family(values: Mapping[str, Mapping[int, float]], asked: Asked) -> Family:
    cells = {
        side: [name for name in side.conditions if name in values]
        for one in asked.contrasts
        for side in (one.left, one.right)
    }
    means = {side: _mean([values[name] for name in names]) for side, names in cells.items()}
    chosen: list[tuple[Side, Side]] = [(one.left, one.right) for one in asked.contrasts]
    margin = None if asked.margin is None else asked.margin / 100
    found = compare_pairs(means, chosen, margin)
    return Family(
        asked.name,
        tuple(
            Comparison(left.name, right.name, difference, _pair(cells[left], cells[right]))
            for (left, right), difference in zip(chosen, found, strict=True)
        ),
        asked,
    )


def _pair(left: Sequence[str], right: Sequence[str]) -> frozenset[str] | None:
    return frozenset((*left, *right)) if len(left) == len(right) == 1 else None


def against_baseline(
    values: Mapping[str, Mapping[int, float]], baseline: str, others: Sequence[Family]
) -> dict[str, Difference]:
    """Each other condition minus the baseline; all are of the same test images.

    A comparison that stands in another family has the corrected p of that one, and its margin;
    the p-values of the rest are corrected over the rest, so that no comparison is counted twice.
    """
    elsewhere = {
        one.pair: one.difference
        for family in reversed(others)  # the first one that has it rules
        for one in family.comparisons
    }
    rest = {name: v for name, v in values.items() if frozenset((name, baseline)) not in elsewhere}
    found = compare(values, baseline) | compare(rest, baseline)
    for name in found.keys() - rest.keys():
        there = elsewhere[frozenset((name, baseline))]  # minus may stand the other way round
        shared = {part: getattr(there, part) for part in ("holm", "family", "margin", "tost")}
        found[name] = replace(found[name], **shared)
    return found


def _mean(cells: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Seed -> the mean over the cells, of the seeds that all of them have."""
    seeds = [seed for seed in cells[0] if all(seed in cell for cell in cells)]
    return {seed: sum(cell[seed] for cell in cells) / len(cells) for seed in seeds}
