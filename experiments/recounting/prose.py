"""The numbers that a README says about studies: claims in a few forms, each of them recounted.

    *stage 2* minus *stage 3*: +5.7 [+4.1, +7.3], n 6, Holm p .0033
    *Pairs of placement*: 5 of 15 shown to differ, in the others up to 7.4 points may be hidden
    no difference from *none* shown for *a*, *b* (up to 3.4 points may be hidden)
    higher than *none*: *c*, *d*
    *timm* drops .467 where .25 is asked for
    *DropBlock2d* minus *none* in share: +4.1 points [+1.2, +7.0], n 12, Holm p .003
    *a* minus *b*: +0.1 [-0.2, +0.4], Holm p .5, TOST Holm p .003: equal within ±1 point
    *Pairs of rate*: 6 seeds find differences of 2.7 to 14.2 points with 80 % chance
    *Pairs of rate*: r is -.84 to .82, pairing buys nothing in 4 of 12
    2 of 21 pairs of replicas of *none* have p < .05 (9.5 % [1.2, 30.4])
    *a* minus *b* on occluded images: +1.2 [+0.3, +2.1], Holm p .03

Where a claim names no test images, it is of the clean ones. "on occluded images" stands after the
sides of a comparison, the name of a family, or the names in a list (of "higher than", after that
of the baseline); a family on other images can't be cited without them.

The study is the last one that was linked in the paragraph or line of a table, or is named: `*none*
of [rate](...)`. "Holm p" is that of the report's family of comparisons, "p" that of the test alone.
"in entropy" and "in share" are about where networks look, by the study's `saliency/saliency.csv`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from experiments.recounting.claims import chance, cited, pairing, power
from experiments.recounting.families import families_of
from experiments.recounting.numbers import Fault, Study
from experiments.recounting.overall import checks, correlation, distinct, shared
from experiments.recounting.paired import Test, compare, p_says, two
from experiments.recounting.rounding import p_rounds, rounds
from experiments.recounting.saliency_runs import of_saliency
from experiments.recounting.scores import score_of

_NUMBER = r"[+-]?\d*\.?\d+"
_SIDE = r"\*(?P<{0}>[^*]+)\*(?: of \[(?P<{0}_study>\w+)\]\([^)]*\))?"
_TEST = r"(?: on (?P<test>\w+) (?:test )?images)?"
_HIDDEN = rf"up to (?P<hidden>{_NUMBER}) points may be hidden"
_FORMS = {
    "claim": rf"{_SIDE.format('left')} minus {_SIDE.format('right')}"
    rf"(?:{_TEST}| in (?P<measure>entropy|share)): "
    rf"(?P<mean>{_NUMBER})(?: points)? \[(?P<low>{_NUMBER}), (?P<high>{_NUMBER})\]"
    r"(?:, n (?P<n>\d+))?, (?P<holm>Holm )?p (?P<p><?\.?\d+)(?:, TOST Holm p (?P<tost><?\.?\d+))?"
    r"(?P<verdict>: no difference shown)?(?:: equal within ±(?P<margin>\d*\.?\d+) points?)?",
    "family": rf"\*(?P<title>[^*]+)\*{_TEST}: (?P<shown>\d+) of (?P<all>\d+) shown to differ"
    r"(?:, (?P<equal>\d+) shown to be equal within ±(?P<margin>\d*\.?\d+) points?)?"
    rf"(?:, in the others {_HIDDEN})?",
    "power": rf"\*(?P<title>[^*]+)\*{_TEST}: (?P<n>\d+) seeds find (?:a difference|differences) of "
    rf"(?P<low>{_NUMBER})(?: to (?P<high>{_NUMBER}))? points with 80 % chance",
    "pairing": rf"\*(?P<title>[^*]+)\*{_TEST}: r is (?P<low>{_NUMBER})"
    rf"(?: to (?P<high>{_NUMBER}))?, pairing buys nothing in (?P<idle>\d+) of (?P<all>\d+)",
    "chance": r"(?P<alarms>\d+) of (?P<pairs>\d+) pairs of replicas of \*(?P<name>[^*]+)\* "
    rf"(?:has|have) p < \.05 \((?P<share>{_NUMBER}) % \[(?P<low>{_NUMBER}), "
    rf"(?P<high>{_NUMBER})\]\)",
    "same": r"no difference from \*(?P<base>[^*]+)\* shown for "
    rf"(?P<names>\*[^*]+\*(?:, \*[^*]+\*)*){_TEST} \({_HIDDEN}\)",
    "differ": rf"(?P<verdict>higher|lower) than \*(?P<base>[^*]+)\*{_TEST}: "
    r"(?P<names>\*[^*]+\*(?:, \*[^*]+\*)*)",
    "rate": rf"\*(?P<name>[^*]+)\* drops (?P<realized>{_NUMBER}) where "
    rf"(?P<nominal>{_NUMBER}) is asked for",
    "distinct": r"(?P<runs>\d+) runs of (?P<studies>\w+) studies are "
    r"(?P<distinct>\d+) distinct ones",
    "shared": r"(?P<studies>\w+) studies share the same (?P<runs>\w+) runs "
    r"of \*(?P<name>[^*]+)\*",
    "checks": rf"(?P<checks>\w+) different A/A checks, of which the smallest p is (?P<p>{_NUMBER})",
    "correlation": rf"mean correlation between the conditions of a study is (?P<low>{_NUMBER}) to "
    rf"(?P<high>{_NUMBER}) \(quick: (?P<quick>{_NUMBER})\)",
}
_LOOSE = re.compile(  # what claims something outside of the forms
    r"(?<![\w.])[+-]\d*\.?\d+|\bp [<=≤.]|no difference|none shown|\bbeats?\b|may be hidden|"
    r"equal within|80 % chance|buys nothing|(?:higher|lower) than|drops \."
)
_LINK = re.compile(r"results/(\w+)/(?:report|saliency/saliency)\.md")


def recount_prose(path: Path, titles: tuple[str, ...], studies: Mapping[str, Study]) -> list[Fault]:
    """Everything in some sections of a document that is not so.

    Args:
        path: of the document.
        titles: of its second-level sections that are about studies.
        studies: name -> study.

    Raises:
        OSError: if the document can't be read.
    """
    found: set[str] = set()
    faults: list[Fault] = []
    linked: list[str] = []
    for title, number, text, is_code in _paragraphs(path.read_text(encoding="utf-8")):
        if title not in found:
            linked = []
        found.add(title)
        if title not in titles:
            continue
        if not is_code:  # code is about what was linked before it
            linked = _LINK.findall(text)
        for place, said, recounted in _faults(text, linked, is_code, studies):
            line = number + text[:place].count("\n")
            faults.append(Fault(path, line, " ".join(said.split()), recounted))
    faults += [Fault(path, 1, "nothing", f"## {title}") for title in titles if title not in found]
    return faults


def _paragraphs(text: str) -> Iterator[tuple[str, int, str, bool]]:
    """Section, first line, text, and whether it is code; each line of a table for itself."""
    title, start, block, code = "", 1, list[str](), False
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        fence = line.startswith("```")
        table = line.startswith("|") and not code
        if (
            block
            and (fence or table or line.startswith(("- ", "#")) or not line)
            and not (code and not fence)
        ):
            yield title, start, "\n".join(block), code
            block = []
        if fence:
            code = not code
        elif table:
            yield title, number, line, False
        elif line.startswith("## ") and not code:
            title = line[3:]
        elif line or code:
            start = start if block else number
            block.append(line)


def _faults(
    text: str, linked: list[str], is_code: bool, studies: Mapping[str, Study]
) -> Iterator[tuple[int, str, str]]:
    """Where, what is said, what is so."""
    if is_code:
        if linked and text.startswith("condition "):
            yield from _table_faults(text, studies[linked[-1]])
        return
    rest = text
    for form, pattern in _FORMS.items():
        for match in re.finditer(pattern.replace(" ", r"\s+"), text):
            before = _LINK.findall(text[: match.start()])
            study = studies.get(before[-1] if before else linked[0] if linked else "")
            said = {name: value for name, value in match.groupdict().items() if value is not None}
            said = {name: " ".join(value.split()) for name, value in said.items()}
            so = _RECOUNT[form](said, study, studies)
            if so is not None:
                yield match.start(), match[0], so
            rest = rest.replace(match[0], re.sub(r"[^\n]", "_", match[0]))
    for match in _LOOSE.finditer(rest):
        yield match.start(), rest[match.start() :].split("\n")[0][:80], "a claim in no known form"


def _claim(said: dict[str, str], study: Study | None, studies: Mapping[str, Study]) -> str | None:
    sides = []
    for side in ("left", "right"):
        of = studies.get(said[f"{side}_study"]) if f"{side}_study" in said else study
        if of is None:
            return "no study is linked"
        sides.append((of, said[side]))
    split = said.get("test", "clean")
    if any(split not in of.splits for of, _ in sides):
        return f"no {split} test images"
    if "measure" in said:
        same = sides[0][0] is sides[1][0]
        asked = (said["measure"], said["left"], said["right"], "holm" not in said)
        test = of_saliency(sides[0][0], *asked) if same else None
    elif "holm" in said:
        test = _of_report(sides[0][0], said["left"], said["right"], split)
    elif any(name not in of.heads for of, name in sides):
        return "no such condition"
    else:
        values = tuple(of.values(name, split) for of, name in sides)
        test = compare([values])[0]  # type: ignore[list-item]
    if test is None:
        return f"no comparison of {'saliency.md' if 'measure' in said else 'the report'}"
    p = test.holm if "holm" in said else test.p
    so = all(rounds(said[key], 100 * getattr(test, key)) for key in ("mean", "low", "high"))
    so &= int(said.get("n", test.n)) == test.n and p_rounds(said["p"], p)
    so &= "verdict" not in said or p >= 0.05
    tost = test.tost if "holm" in said else None
    so &= "tost" not in said or (tost is not None and p_rounds(said["tost"], tost))
    equal = f"equal within ±{test.margin:g}" if test.verdict == "equal" else "not shown to be equal"
    so &= "margin" not in said or (equal.endswith(f"±{said['margin']}") and "holm" in said)
    more = "" if tost is None else f", TOST Holm p {p_says(tost)}: {equal}"
    return None if so else f"{test.points}, n {test.n}, p {p_says(p)}{more}"


def _of_report(study: Study, left: str, right: str, split: str) -> Test | None:
    """A comparison of the study's report, whichever way round it stands there.

    Of several families that have it, the first one of the report rules.
    """
    families = [one for one in families_of(study).values() if one.test == split]
    found = {pair: t for family in reversed(families) for pair, t in family.tests.items()}
    found |= {(name, study.baseline): test for name, test in score_of(study, split).items()}
    if (left, right) in found:
        return found[left, right]
    test = found.get((right, left))
    turned = test and {"mean": -test.mean, "low": -test.high, "high": -test.low}
    return turned and Test(**{**vars(test), **turned})


def _family(said: dict[str, str], study: Study | None, _: object) -> str | None:
    family = cited(said, study)
    if isinstance(family, str):
        return family
    found = list(family.tests.values())
    rest = [test.hidden for test in found if test.verdict == "no"]
    equal = [test for test in found if test.verdict == "equal"]
    shown = len(found) - len(rest) - len(equal)
    so = (int(said["shown"]), int(said["all"])) == (shown, len(found))
    so &= int(said.get("equal", 0)) == len(equal)
    so &= "margin" not in said or said["margin"] == f"{found[0].margin or 0:g}"
    so &= ("hidden" in said) == bool(rest)
    so &= not rest or rounds(said.get("hidden", ""), 100 * max(rest))
    most = f", up to {100 * max(rest):.2f}" if rest else ""
    return None if so else f"{shown} of {len(found)}, {len(equal)} equal{most}"


def _listed(said: Mapping[str, str], study: Study | None) -> tuple[list[str], list[Test | None]]:
    """The names in a list, and of each its comparison with what is said to be the baseline."""
    names, split = re.findall(r"\*([^*]+)\*", said["names"]), said.get("test", "clean")
    if study is None or split not in study.splits:
        return names, [None] * len(names)
    return names, [_of_report(study, name, said["base"], split) for name in names]


def _same(said: dict[str, str], study: Study | None, _: object) -> str | None:
    names, found = _listed(said, study)
    known = [test for test in found if test]
    if len(known) < len(names):
        return "no comparison of the report"
    differ = [name for name, test in zip(names, known, strict=True) if test.holm < 0.05]
    if differ:
        return f"{', '.join(differ)} shown to differ"
    most = 100 * max(test.hidden for test in known)
    return None if rounds(said["hidden"], most) else f"up to {most:.2f}"


def _differ(said: dict[str, str], study: Study | None, _: object) -> str | None:
    sign = 1 if said["verdict"] == "higher" else -1
    wrong = [
        name
        for name, test in zip(*_listed(said, study), strict=True)
        if not test or test.holm >= 0.05 or test.mean * sign < 0
    ]
    return f"{', '.join(wrong)} not shown to be {said['verdict']}" if wrong else None


def _rate(said: dict[str, str], study: Study | None, _: object) -> str | None:
    if study is None or said["name"] not in study.conditions:
        return "no such condition"
    for column in ("realized", "nominal"):
        rate = study.mean(said["name"], column)
        if rate is None or not rounds(said[column], rate):
            return f"{column} {rate}"
    return None


_RECOUNT = {
    "claim": _claim,
    "family": _family,
    "same": _same,
    "differ": _differ,
    "power": power,
    "pairing": pairing,
    "chance": chance,
    "rate": _rate,
    "distinct": distinct,
    "shared": shared,
    "checks": checks,
    "correlation": correlation,
}


def _table_faults(text: str, study: Study) -> Iterator[tuple[int, str, str]]:
    """What is wrong with a table as the terminal shows it."""
    so = dict(_table_lines(study))
    place, seen = 0, set()
    for line in text.splitlines():
        key = re.split(r" {2,}|, by chance: ", line)[0]
        cells = " | ".join(re.split(r" {2,}", line.strip()))
        if key in so:
            seen.add(key)
            if cells != so[key]:
                yield place, cells, so[key]
        elif key.strip("─"):
            yield place, cells, "no condition of the study"
        place += len(line) + 1
    yield from ((0, "nothing", line) for key, line in so.items() if key not in seen)


def _table_lines(study: Study) -> Iterator[tuple[str, str]]:
    head = ("condition", "n", "accuracy, %", f"minus {study.baseline} [95 %]", "Holm p")
    yield "condition", " | ".join([*head, "rate", "realized", "s"])
    found = score_of(study)
    for name in study.heads:
        values = 100 * np.array(list(study.values(name).values()))
        cells = [name, str(len(values)), f"{two(values.mean())} ± {two(values.std(ddof=1))}"]
        if test := found.get(name):
            cells += [test.points, p_says(test.holm)]
        for column in ("nominal", "realized"):
            if (rate := study.mean(name, column)) is not None:
                cells.append(f"{rate:.4f}")
        yield name, " | ".join([*cells, f"{study.mean(name, 'seconds'):.1f}"])
    for name, first in study.repeats.items():
        test = compare([(study.own(name, "clean"), study.own(first, "clean"))])[0]
        text = f"{name} minus {first}, by chance: {test.points}, p {p_says(test.p)} "
        yield f"{name} minus {first}", f"{text}({first}: their mean)"
