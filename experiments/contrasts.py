"""What a study's question asks for, besides the comparisons with its baseline: named families.

    contrasts:
      does it help:                    # the name of a family: p is corrected over its comparisons
        - {take: Dropout2d, minus: none}                           # one condition minus another
        - {take: [Dropout2d, DropBlock2d], minus: none}            # the mean of several
      maps or blocks:                  # levels of a factor: means over the other factors
        - {take: {kind: Dropout2d}, minus: {kind: DropBlock2d}}
      maps or blocks at each rate:     # the same within each level of another factor
        - {take: {kind: Dropout2d}, minus: {kind: DropBlock2d}, within: rate}
      which rate:
        primary: true                  # what the study is made for; all else is exploratory
        margin: 1.5                    # points of accuracy: is the difference shown to be smaller?
        test: occluded                 # on these test images; on the clean ones by default
        compare:
          - {pairs: rate, within: kind}                            # all pairs of a factor's levels
          - {pairs: [none, Dropout2d]}                             # or of conditions

Means are taken seed by seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

from experiments.grid import name_problems, unknown

Factors = Mapping[str, Mapping[str, str]]  # name of a condition -> factor -> name of its level
_ENTRY = "{take: this, minus: that} or {pairs: factor}"


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a condition, or the mean of several, under the name it is shown."""

    name: str
    conditions: tuple[str, ...]


@dataclass(frozen=True)
class Contrast:
    """One side minus another."""

    left: Side
    right: Side


@dataclass(frozen=True)
class Asked:
    """A family of comparisons whose p-values are corrected together.

    Args:
        name: of the family.
        contrasts: its comparisons, at least one.
        margin: in points of accuracy: tested is, too, whether each difference is within it.
        primary: whether the study is made for it.
        test: the name of the test images that it is about.
        plain: the comparisons as they were asked for.
    """

    name: str
    contrasts: tuple[Contrast, ...]
    margin: float | None = None
    primary: bool = False
    test: str = "clean"
    plain: Sequence[Any] = field(default=(), compare=False, repr=False)


def read_contrasts(
    data: object, factors: Factors, baseline: str | None = None
) -> tuple[tuple[Asked, ...], list[str]]:
    """The families in plain data that can be read, and all that is wrong with them.

    Args:
        data: a mapping as above; None is none.
        factors: of all conditions, in order; of a pair, the later one minus the earlier one.
        baseline: the condition that comes first, wherever it stands.

    Example:
        >>> factors = {"0.1": {"rate": "0.1"}, "0.3": {"rate": "0.3"}, "none": {}}
        >>> (family,), problems = read_contrasts({"rates": [{"pairs": "rate"}]}, factors)
        >>> [(one.left.name, one.right.name) for one in family.contrasts]
        [('0.3', '0.1')]
        >>> read_contrasts({"rates": [{"pairs": "rates"}]}, factors)[1]
        ["contrasts: rates: factor 'rates' is unknown (closest: rate)"]
    """
    if data is None or data == []:
        return (), []
    if not isinstance(data, dict):
        return (), [f"contrasts must map names of families to lists of {_ENTRY}, got {data!r}"]
    first = {name: factors[name] for name in (baseline,) if name in factors}
    found: dict[str, Asked | None] = {}
    problems: list[str] = []
    for name, asked in data.items():
        named = name_problems(name, "contrasts: the name of a family")
        if not named and any(other.split() == name.split() for other in found):
            named = [f"contrasts: {name!r} stands twice"]
        family, wrong = _family(name, asked, {**first, **factors})
        problems += named + [f"contrasts: {name}: {one}" for one in dict.fromkeys(wrong)]
        found[str(name)] = None if named else family
    return tuple(family for family in found.values() if family is not None), problems


def plain_contrasts(families: Sequence[Asked]) -> dict[str, object]:
    """The families as plain data, such as JSON's; `read_contrasts` reads them back."""
    plain: dict[str, object] = {}
    for one in families:
        options: dict[str, object] = {"primary": True} if one.primary else {}
        options |= {} if one.margin is None else {"margin": one.margin}
        options |= {} if one.test == "clean" else {"test": one.test}
        plain[one.name] = {**options, "compare": list(one.plain)} if options else list(one.plain)
    return plain


def replica_problems(families: Sequence[Asked], repeats: Mapping[str, str]) -> list[str]:
    """A problem for each replica that is compared without the condition whose mean it is part of.

    Args:
        families: read before.
        repeats: name of a replica -> that of the condition that it repeats.
    """
    return [
        f"contrasts: {family.name}: {name!r} repeats {repeats[name]!r}, which is the mean of both: "
        "compare that"
        for family in families
        for name in dict.fromkeys(
            name
            for one in family.contrasts
            for side in (one.left, one.right)
            for name in side.conditions
            if name in repeats and repeats[name] not in side.conditions
        )
    ]


def split_problems(
    families: Sequence[Asked], splits: Mapping[str, tuple[str, Sequence[str]]]
) -> list[str]:
    """A problem for each family that is about test images that its conditions do not all have.

    Args:
        families: read before.
        splits: name of a condition -> its data, and the names of the tests that those have.

    Example:
        >>> asked = {"x": {"test": "clutter", "compare": [{"take": "b", "minus": "a"}]}}
        >>> splits = dict.fromkeys("ab", ("digits", ("clean", "occluded", "noisy")))
        >>> split_problems(read_contrasts(asked, {"a": {}, "b": {}})[0], splits)
        ["contrasts: x: test must be one of clean, occluded, noisy (of digits), got 'clutter'"]
    """
    problems = []
    for family in families:
        sides = [side for one in family.contrasts for side in (one.left, one.right)]
        names = [name for side in sides for name in side.conditions if name in splits]
        known = [splits[name][1] for name in names]
        if not known:
            continue  # none of them can be made, which is told elsewhere
        shared = [test for test in known[0] if all(test in of_one for of_one in known)]
        if family.test not in shared:
            data = " and ".join(dict.fromkeys(splits[name][0] for name in names))
            problems.append(
                f"contrasts: {family.name}: test must be one of {', '.join(shared)} (of {data}), "
                f"got {family.test!r}"
            )
    return problems


def _family(name: str, asked: object, factors: Factors) -> tuple[Asked | None, list[str]]:
    """A family, or None, and what is wrong with it."""
    options = asked if isinstance(asked, dict) else {"compare": asked}
    problems = unknown(options, ["compare", "margin", "primary", "test"], "field")
    entries, margin = options.get("compare"), options.get("margin")
    primary, test = options.get("primary", False), options.get("test", "clean")
    if margin is not None and (type(margin) not in (int, float) or not 0 < margin < math.inf):
        problems.append(f"margin must be a number of points above 0, got {margin!r}")
    if not isinstance(primary, bool):
        problems.append(f"primary must be true or false, got {primary!r}")
    if not isinstance(test, str):
        problems.append(f"test must be the name of test images, such as occluded, got {test!r}")
    if not isinstance(entries, list) or not entries:
        return None, [*problems, f"it must list at least one of {_ENTRY}, got {entries!r}"]
    contrasts: list[Contrast] = []
    for entry in entries:
        try:
            contrasts += _contrasts(entry, factors)
        except ValueError as error:
            problems.append(str(error))
    problems += _side_problems(contrasts)
    if problems:
        return None, problems
    return Asked(name, tuple(contrasts), margin, primary, test, entries), []


def _side_problems(contrasts: Sequence[Contrast]) -> Iterator[str]:
    """What can't be compared, and what stands twice."""
    seen: set[frozenset[frozenset[str]]] = set()
    for one in contrasts:
        left, right = set(one.left.conditions), set(one.right.conditions)
        both = [name for name in one.left.conditions if name in right]
        sides = frozenset((frozenset(left), frozenset(right)))
        if left == right:
            yield f"{one.left.name!r} is compared to itself"
        elif both:
            yield (
                f"{both[0]!r} is part of both {one.left.name!r} and {one.right.name!r}, which are "
                "compared"
            )
        elif sides in seen:
            yield f"{one.left.name!r} minus {one.right.name!r} stands twice"
        seen.add(sides)


def _contrasts(entry: object, factors: Factors) -> Iterator[Contrast]:
    """The comparisons that one entry of a list asks for."""
    if not isinstance(entry, dict) or not ("pairs" in entry or {"take", "minus"} <= entry.keys()):
        raise ValueError(f"a comparison must be {_ENTRY}, got {entry!r}")
    fields = ["pairs"] if "pairs" in entry else ["take", "minus"]
    _know(entry, [*fields, "within"], "field")
    sides, pairs = [entry[name] for name in reversed(fields)], entry.get("pairs")
    if isinstance(pairs, str):
        sides = [{pairs: level} for level in _levels(pairs, factors)]
    elif isinstance(pairs, list):
        sides = pairs
    if len(sides) < 2:
        raise ValueError(
            f"pairs must name a factor, or list what is compared: two or more; got {pairs!r}"
        )
    within = entry.get("within", [])
    places = within if isinstance(within, list) else [within]
    if places and not any(isinstance(side, dict) for side in sides):
        raise ValueError(f"within {within!r} goes with levels, such as {{factor: level}}")
    for levels in product(*(_levels(factor, factors) for factor in places)):
        place = dict(zip(places, levels, strict=True))
        made = _sides(sides, place, factors)
        yield from (Contrast(later, earlier) for earlier, later in combinations(made, 2))


def _sides(data: Sequence[object], place: Mapping[str, str], factors: Factors) -> list[Side]:
    """All sides, or a ValueError of all that is wrong with them."""
    made, problems = [], []
    for one in data:
        try:
            made.append(_side(one, place, factors))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; ".join(dict.fromkeys(problems)))
    return made


def _side(data: object, place: Mapping[str, str], factors: Factors) -> Side:
    """A condition, a list of them, or a mapping of factors to a level or several."""
    if not isinstance(data, dict):
        names = [_text(name) for name in (data if isinstance(data, list) else [data])]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a mean is of conditions, each once; got {data!r}")
        _know(names, list(factors), "condition")
        return Side(names[0] if len(names) == 1 else f"mean of {'; '.join(names)}", tuple(names))
    twice = [factor for factor in data if factor in place]
    if twice:
        raise ValueError(f"{twice[0]!r} is named both by {data!r} and by within")
    if not data:
        raise ValueError("a side that is {} names no level")
    order = _known_factors(data, factors)
    chosen = {factor: _chosen(factor, {**data, **place}, factors) for factor in order}
    conditions = tuple(
        name
        for name, levels in factors.items()
        if levels and all(levels[factor] in chosen[factor] for factor in levels)
    )
    if len(conditions) == 1:
        return Side(conditions[0], conditions)
    named = [" and ".join(chosen[factor]) for factor in order if factor in data or factor in place]
    rest = [factor for factor in order if factor not in data and factor not in place]
    over = f" over {' and '.join(rest)}" if rest else ""
    return Side(f"{', '.join(named)} (mean{over})", conditions)


def _chosen(factor: str, asked: Mapping[str, object], factors: Factors) -> list[str]:
    """The levels of a factor that are asked for; all, if it is not spoken of."""
    known = _levels(factor, factors)
    if factor not in asked:
        return known
    wanted = asked[factor] if isinstance(asked[factor], list) else [asked[factor]]
    names = [_text(level) for level in wanted]  # type: ignore[union-attr]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{factor!r} must have a level, or several, each once; got {wanted!r}")
    _know(names, known, f"level of {factor!r}")
    return names


def _known_factors(names: Iterable[object], factors: Factors) -> list[str]:
    """All factors, in order; ValueError if one of the names is none."""
    known = list(dict.fromkeys(factor for levels in factors.values() for factor in levels))
    if not known:
        raise ValueError(f"there is no grid, so {next(iter(names))!r} is no factor")
    _know(names, known, "factor")
    return known


def _levels(factor: object, factors: Factors) -> list[str]:
    _known_factors([factor], factors)
    return list(dict.fromkeys(levels[factor] for levels in factors.values() if factor in levels))  # type: ignore[index]


def _text(name: object) -> str:
    """The name of a condition or level, which YAML may have read as a number."""
    if not isinstance(name, str | int | float | None):
        raise ValueError(
            f"a side must be a condition, a list of them, or {{factor: level}}, got {name!r}"
        )
    return name if isinstance(name, str) else json.dumps(name)


def _know(names: Any, known: list[str], what: str) -> None:
    """Raise ValueError if there are names that are not known."""
    problems = unknown(names, known, what)
    if problems:
        raise ValueError("; ".join(problems))
