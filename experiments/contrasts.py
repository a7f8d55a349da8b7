"""The comparisons that a study's question asks for, besides those with its baseline.

    contrasts:
      - {pairs: placement}                    # all pairs of a factor's levels: its main effect
      - {pairs: rate, within: regularizer}    # all pairs of rates, within each regularizer
      - {pairs: [none, Dropout2d]}            # all pairs of these conditions

A level is the mean over the other factors' levels, seed by seed. Each entry is a family of
comparisons, for which p-values are corrected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.grid import unknown


@dataclass(frozen=True)
class Pairs:
    """All pairs of a factor's levels, or of conditions.

    Args:
        of: a factor, or names of conditions.
        within: another factor: pairs at each of its levels, never across them.
    """

    of: str | tuple[str, ...]
    within: str | None = None


def read_contrasts(
    data: object, factors: Mapping[str, Mapping[str, str]]
) -> tuple[tuple[Pairs, ...], list[str]]:
    """The contrasts in plain data, and what is wrong with them.

    Args:
        data: a list as above; None is none.
        factors: name of a condition -> factor -> name of its level.

    Example:
        >>> factors = {"0.1": {"rate": "0.1"}, "0.3": {"rate": "0.3"}, "none": {}}
        >>> read_contrasts([{"pairs": "rate"}], factors)
        ((Pairs(of='rate', within=None),), [])
        >>> read_contrasts([{"pairs": "rates"}], factors)[1]
        ["contrasts: factor 'rates' is unknown (closest: rate)"]
    """
    if data is None:
        return (), []
    if not isinstance(data, list):
        return (), [f"contrasts must be a list of mappings such as {{pairs: factor}}, got {data!r}"]
    problems = [problem for entry in data for problem in _problems(entry, factors)]
    if problems:
        return (), problems
    found = [_read(entry) for entry in data]
    twice = [entry for place, entry in enumerate(found) if entry in found[:place]]
    if twice:
        return (), [f"contrasts: {entry.of!r} stands twice" for entry in twice]
    return tuple(found), []


def plain_contrasts(contrasts: tuple[Pairs, ...]) -> list[dict[str, object]]:
    """The contrasts as plain data, such as JSON's; `read_contrasts` reads them back."""
    plain: list[dict[str, object]] = []
    for one in contrasts:
        of = one.of if isinstance(one.of, str) else list(one.of)
        plain.append({"pairs": of} if one.within is None else {"pairs": of, "within": one.within})
    return plain


def _read(entry: Mapping[str, object]) -> Pairs:
    of, within = entry["pairs"], entry.get("within")
    return Pairs(
        of if isinstance(of, str) else tuple(of),  # type: ignore[arg-type]
        within if isinstance(within, str) else None,
    )


def _problems(entry: object, factors: Mapping[str, Mapping[str, str]]) -> list[str]:
    if not isinstance(entry, dict) or "pairs" not in entry:
        return [f"contrasts: an entry must be such as {{pairs: factor}}, got {entry!r}"]
    problems = unknown(entry, ["pairs", "within"], "contrasts: field")
    of, within = entry["pairs"], entry.get("within")
    known = list(dict.fromkeys(name for levels in factors.values() for name in levels))
    if isinstance(of, list):
        problems += _condition_problems(of, within, list(factors))
        return problems
    if not isinstance(of, str) or not isinstance(within, str | None):
        problems.append(
            f"contrasts: pairs must name a factor or list conditions, within name a factor, "
            f"got {entry!r}"
        )
        return problems
    if not known:
        problems.append(f"contrasts: there is no grid, so {of!r} is no factor")
        return problems
    named = [of] if within is None else [of, within]
    problems += unknown(named, known, "contrasts: factor")
    if within == of:
        problems.append(f"contrasts: pairs of {of!r} within itself are none")
    levels = {of_one[of] for of_one in factors.values() if of in of_one}
    if of in known and len(levels) < 2:
        problems.append(f"contrasts: {of!r} has one level, of which there is no pair")
    return problems


def _condition_problems(names: list[object], within: object, conditions: list[str]) -> list[str]:
    if within is not None:
        return [f"contrasts: within {within!r} does not go with a list of conditions"]
    problems = unknown(names, conditions, "contrasts: condition")
    if not problems and len(set(names)) < max(2, len(names)):
        problems.append(f"contrasts: pairs must list two conditions or more, each once: {names!r}")
    return problems
