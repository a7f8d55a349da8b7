"""Claims about all studies together: None if what is said is so, else what is so."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from experiments.recounting.numbers import Study
from experiments.recounting.paired import compare, p_says
from experiments.recounting.rounding import counts, p_rounds, rounds

_COLUMNS = ("seed", "clean", "test_loss", "train_loss", "nominal", "realized")


def _run(line: Mapping[str, str]) -> tuple[str, ...]:
    """What is the same in two lines of one run."""
    return tuple(line[name] for name in _COLUMNS)


def distinct(said: dict[str, str], _: object, studies: Mapping[str, Study]) -> str | None:
    """How many runs all studies have, and how many of them are different ones."""
    lines = [line for study in studies.values() for line in study.lines]
    distinct = {_run(line) for line in lines}
    numbers = {"runs": len(lines), "studies": len(studies), "distinct": len(distinct)}
    return counts(said, numbers)


def shared(said: dict[str, str], _: object, studies: Mapping[str, Study]) -> str | None:
    """How many studies have the same runs of a condition, by whatever name, and how many runs."""
    groups: dict[frozenset[tuple[str, ...]], dict[str, set[str]]] = {}
    for study in studies.values():
        for name in study.conditions:
            runs = frozenset(_run(line) for line in study.lines if line["condition"] == name)
            groups.setdefault(runs, {}).setdefault(study.name, set()).add(name)
    named = {
        runs: places
        for runs, places in groups.items()
        if any(said["name"] in names for names in places.values())
    }
    if not named:
        return "no such condition"
    most = max(named, key=lambda runs: len(named[runs]))
    return counts(said, {"studies": len(named[most]), "runs": len(most)})


def checks(said: dict[str, str], _: object, studies: Mapping[str, Study]) -> str | None:
    """How many different A/A checks there are, and the smallest p of them."""
    found = {}
    for study in studies.values():
        for name, first in study.repeats.items():
            pair = (study.own(name, "clean"), study.own(first, "clean"))
            found[repr(pair)] = compare([pair])[0].p
    least = min(found.values(), default=1.0)
    if not p_rounds(said["p"], least):
        return f"the smallest p is {p_says(least)}"
    return counts(said, {"checks": len(found)})


def correlation(said: dict[str, str], _: object, studies: Mapping[str, Study]) -> str | None:
    """The mean correlation between the conditions of each study."""
    means = {}
    for name, study in studies.items():
        values = [list(study.own(one, "clean").values()) for one in study.conditions]
        means[name] = np.mean(np.corrcoef(values)[np.triu_indices(len(values), 1)])
    quick = means.pop("quick")
    low, high = min(means.values()), max(means.values())
    so = [rounds(said[key], v) for key, v in (("low", low), ("high", high), ("quick", quick))]
    return None if all(so) else f"{low:.3f} to {high:.3f} (quick: {quick:.3f})"
