"""The comparisons that a report says it was asked for, made again from its runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from experiments.recounting.numbers import Study, mean_of_cells
from experiments.recounting.paired import Test, compare

Sides = tuple[tuple[str, tuple[str, ...]], ...]  # of each its name and its conditions


@dataclass(frozen=True)
class Family:
    """Comparisons that are corrected together.

    Args:
        tests: (left, right) -> test, in the order of the report.
        pairs: likewise -> both conditions, where each side is one and no mean over some.
        margin: in points, if there is one.
        is_primary: whether the study is made for it.
        test: the name of the test images that it is about.
    """

    tests: dict[tuple[str, str], Test]
    pairs: dict[tuple[str, str], frozenset[str]]
    margin: float | None
    is_primary: bool
    test: str = "clean"

    @property
    def on_tests(self) -> str:
        """What is said of them; nothing of the clean ones."""
        return f" on {self.test} test images" if self.test != "clean" else ""


@cache
def families_of(study: Study, best: bool = False) -> dict[str, Family]:
    """Name -> family, in the order of the report; of the best epochs by validation, if so."""
    return {name: _family(study, asked, best) for name, asked in study.asked.items()}


def _family(study: Study, asked: Any, best: bool) -> Family:
    options = asked if isinstance(asked, dict) else {"compare": asked}
    found = [sides for entry in options["compare"] for sides in _compared(study, entry)]
    names = [(left[0], right[0]) for left, right in found]
    margin, test = options.get("margin"), options.get("test", "clean")
    column = f"best_{test}" if best else test
    values = [tuple(mean_of_cells(study, side[1], column) for side in sides) for sides in found]
    return Family(
        dict(zip(names, compare(values, margin), strict=True)),  # type: ignore[arg-type]
        {
            name: frozenset((*left[1], *right[1]))
            for name, (left, right) in zip(names, found, strict=True)
            if len(left[1]) == len(right[1]) == 1
        },
        margin,
        options.get("primary", False),
        test,
    )


def _compared(study: Study, entry: Mapping[str, Any]) -> Iterator[Sides]:
    within = entry.get("within", [])
    factors = within if isinstance(within, list) else [within]
    for levels in product(*(_levels(study, factor) for factor in factors)):
        place = dict(zip(factors, levels, strict=True))
        if "take" in entry:
            yield _side(study, entry["take"], place), _side(study, entry["minus"], place)
            continue
        pairs = entry["pairs"]
        if isinstance(pairs, str):
            pairs = [{pairs: level} for level in _levels(study, pairs)]
        sides = [_side(study, one, place) for one in pairs]
        for number, earlier in enumerate(sides):
            yield from ((later, earlier) for later in sides[number + 1 :])


def _levels(study: Study, factor: str) -> list[str]:
    return list(dict.fromkeys(study.factors[factor].values()))


def _side(study: Study, asked: Any, place: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    if not isinstance(asked, dict):
        names = [_says(name) for name in (asked if isinstance(asked, list) else [asked])]
        title = names[0] if len(names) == 1 else f"mean of {'; '.join(names)}"
        return title, tuple(name for name in names if name in study.heads)
    chosen = {
        factor: [_says(level) for level in (wanted if isinstance(wanted, list) else [wanted])]
        for factor, wanted in {**asked, **place}.items()
    }
    crossed = next(iter(study.factors.values()))
    every = [
        name
        for name in crossed
        if all(study.factors[factor][name] in levels for factor, levels in chosen.items())
    ]
    heads = tuple(name for name in every if name in study.heads)
    if len(every) == 1:
        return every[0], heads
    said = [" and ".join(chosen[factor]) for factor in study.factors if factor in chosen]
    rest = [factor for factor in study.factors if factor not in chosen]
    over = f" over {' and '.join(rest)}" if rest else ""
    return f"{', '.join(said)} (mean{over})", heads


def _says(name: object) -> str:
    """A name as YAML writes it, which may have read it as a number."""
    if isinstance(name, bool) or name is None:
        return {True: "true", False: "false", None: "null"}[name]
    return str(name)
