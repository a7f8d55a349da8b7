"""Claims about power, pairing and A/A pairs: None if what is said is so, else what is so."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.recounting.families import Family, families_of
from experiments.recounting.numbers import Study
from experiments.recounting.rounding import counts, rounds
from experiments.recounting.sentences import of_replicas, share


def cited(said: Mapping[str, str], study: Study | None) -> Family | str:
    """The family that a claim names, or what is wrong with the claim.

    A claim that names no test images is of the clean ones.
    """
    families = families_of(study) if study else {}
    found = families.get(said["title"])
    if found is None:
        return f"one of {', '.join(families) or 'no families'}"
    if said.get("test", "clean") != found.test:
        return f"*{said['title']}* on {found.test} images"
    return found


def power(said: dict[str, str], study: Study | None, _: object) -> str | None:
    """What a family's seeds find with 80 % chance."""
    family = cited(said, study)
    if isinstance(family, str):
        return family
    found = [100 * test.found for test in family.tests.values()]
    so = {test.n for test in family.tests.values()} == {int(said["n"])}
    return None if so and _spans(said, found) else f"{min(found):.2f} to {max(found):.2f}"


def pairing(said: dict[str, str], study: Study | None, _: object) -> str | None:
    """The correlations of a family, and in how many comparisons pairing buys nothing."""
    family = cited(said, study)
    if isinstance(family, str):
        return family
    known = [test for test in family.tests.values() if test.r is not None]
    if not known:
        return "no correlation in this family"
    r = [test.r or 0.0 for test in known]
    numbers = {"idle": sum(not test.pays for test in known), "all": len(known)}
    if not _spans(said, r):
        return f"r is {min(r):.2f} to {max(r):.2f}"
    return counts(said, numbers)


def chance(said: dict[str, str], study: Study | None, _: object) -> str | None:
    """How many pairs of replicas have p < .05."""
    pairs = of_replicas(study, said["name"], "clean") if study else {}
    if not pairs:
        return "no such replicas"
    alarms, *shares = share([*pairs.values()])
    wrong = counts(said, {"alarms": alarms, "pairs": len(pairs)})
    parts = zip(("share", "low", "high"), shares, strict=True)
    so = all(rounds(said[name], number) for name, number in parts)
    return wrong or (None if so else "{:.1f} % [{:.1f}, {:.1f}]".format(*shares))


def _spans(said: Mapping[str, str], numbers: list[float]) -> bool:
    low, high = said["low"], said.get("high", said["low"])
    return rounds(low, min(numbers)) and rounds(high, max(numbers))
