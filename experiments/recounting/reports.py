"""Every table and sentence of a report.md, line by line, against what its runs.csv gives.

What is said is parsed into lines with a key each (section, names); what should be said is made for
each key from `numbers`. Lines without a key must be among the sentences that claim no number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import numpy as np

from experiments.recounting.families import Family, families_of
from experiments.recounting.numbers import Fault, Study, plain
from experiments.recounting.paired import Test, compare, p_says
from experiments.recounting.sentences import (
    COLUMNS,
    Key,
    bullet,
    cells,
    chance_lines,
    family_lines,
    hidden,
    note,
)

_CELLS = re.compile(r"(?<!\\)\|")
_PROSE = (  # sentences that are so, whatever the runs are
    r"!\[\w+\]\(\w+\.png\)",
    r"(Each seed is a point|Means; the points are the seeds|Differences to the baseline on the "
    r"changed test images; marks)[^0-9]*(Intervals (have|are)[^0-9]*95 %[^0-9]*)?",
    r"What the question asks for, besides the comparisons with the baseline:",
    r"Each is the first condition, or level, minus the second, paired by seed\. p is corrected "
    r"after Holm over the comparisons of its table\.( Where a margin \(±\) is given, two one-sided "
    r"tests \(TOST\) ask whether the difference is within it; their p is corrected likewise, for "
    r"itself\.)?",
    r"Nothing is compared\.",
    r"The same networks on changed test images(; each table is corrected for itself)?\.",
    r"Means over (the )?seeds[^0-9]*",
    r"Means over the seeds; ratios are over those that have a finished run of .+, too\. Unlike the "
    r"rest of this report, these numbers depend on what else the machine did\. Memory is the most "
    r"that a process held at a time, all that it had loaded included; on a GPU, that torch "
    r"allocated there\.( By their starts and seconds, at most \d+ runs? of this study (was|were) "
    r"at work at once on one machine\.)?",
)


def recount_report(study: Study) -> list[Fault]:
    """Everything in a study's report that is not so.

    Args:
        study: read from the folder of the report.
    """
    path = study.folder / "report.md"
    expected = _expected(study)
    faults, seen = [], set()
    for number, key, said in _lines(path.read_text(encoding="utf-8")):
        if key in expected:
            seen.add(key)
            if said != expected[key]:
                faults.append(Fault(path, number, said, expected[key]))
        elif not any(re.fullmatch(pattern, said) for pattern in _PROSE):
            faults.append(Fault(path, number, said, "nothing that the runs tell"))
    faults += [Fault(path, 1, "nothing", text) for key, text in expected.items() if key not in seen]
    return faults


def _lines(text: str) -> Iterator[tuple[int, Key, str]]:
    """Number, key and text of each line whose section is recounted; tables as their cells."""
    section, below, within, code = "", "", "", False
    for number, raw in enumerate(text.splitlines(), start=1):
        line = plain(raw)
        if line.startswith("```"):
            code = not code
        elif code or not line.strip():
            continue
        elif raw.startswith("## "):
            section, below, within = line[3:], "", "baseline"
        elif raw.startswith("### "):
            below = line[4:]
            if section.lower().endswith("contrasts"):
                yield number, (section, "title", below), below
        elif raw.startswith("# ") or (section in ("", "Training") and "Question" in raw):
            continue
        elif raw.startswith("| "):
            cells = [plain(cell).strip() for cell in _CELLS.split(raw)[1:-1]]
            if set(cells[0]) != {"-"}:
                yield number, (section, below, "row", cells[0]), " | ".join(cells)
        elif section == "What was run":
            if line.startswith("Seeds: "):
                yield number, (section, "seeds"), line.split(", the same")[0]
        else:
            key, within = _key(line, within)
            yield number, (section, below, *key), line


def _key(line: str, within: str) -> tuple[Key, str]:
    """What a sentence is about, and in whose list the next ones stand."""
    if line.startswith("- **"):
        return (within, line.split(": ")[0]), within
    if line.startswith(("**Pairing:**", "**Power:**")):
        return ("note",), within
    if found := re.match(r"\*\*A/A\.\*\* .*replicas of \*(.+?)\*", line):
        return ("share", found[1]), within
    if found := re.match(r"The \d+ replicas have .+ each; \*(.+?)\* is their mean", line):
        return ("replicas", found[1]), within
    if found := re.match(r"\*\*(?:Primary: )?(.+?)\*\* \(\d+ comparison", line):
        return ("family", found[1]), found[1]
    if found := re.match(r"\*\*(?:Check\.|Warning: a false alarm\.)\*\* (.+?) differs", line):
        return ("check", found[1]), within
    if line.startswith("**"):
        return ("overview",), "baseline"
    return (line.split(" ")[0],), within


@cache
def _expected(study: Study) -> dict[Key, str]:
    """Key -> what a report of these runs says."""
    families = families_of(study)
    lines: dict[Key, str] = {("", "", _extent(study).split(" ")[0]): _extent(study)}
    for split in study.splits:
        title = "Clean accuracy" if split == "clean" else "Robustness"
        below = "" if split == "clean" else split.capitalize()
        found = _against(study, split, families if split == "clean" else {})
        head = f"condition | n | accuracy, % | minus {study.baseline} [95 %] | {COLUMNS}"
        lines[title, below, "row", "condition"] = head
        for name in study.heads:
            lines[title, below, "row", name] = _score_row(study, name, split, found.get(name))
        where = ("Answer", "") if split == "clean" else (title, below)
        if found:
            lines[*where, "overview"] = _overview(study, found)
            lines[title, below, "note"] = note([*found.values()])
        for name in _alone(study):
            text, alarm = _check(study, name, split)
            if split == "clean" or alarm:
                lines[*where, "check", name] = text
        if split == "clean":
            for name, test in found.items():
                key, text = bullet(name, study.baseline, test)
                lines["Answer", "", "baseline", key] = text
            lines["Clean accuracy", "", "Means"] = _reading(study, families)
    lines["Answer", "", "All"] = _after(study)
    primary = any(one.is_primary for one in families.values())
    if primary:
        lines["Answer", "", "What"] = "What is not primary is exploratory."
    for title, one in families.items():
        rest = "Exploratory contrasts" if primary else "Contrasts"
        lines |= family_lines(title, one, "Primary contrasts" if one.is_primary else rest)
    return lines | chance_lines(study) | _rates(study) | _costs(study)


def _alone(study: Study) -> list[str]:
    """Replicas that are the only one of their condition."""
    firsts = list(study.repeats.values())
    return [name for name, first in study.repeats.items() if firsts.count(first) == 1]


def _against(study: Study, split: str, families: dict[str, Family]) -> dict[str, Test]:
    """Each other condition minus the baseline; corrected where it stands first."""
    others = [name for name in study.heads if name != study.baseline]
    base = study.values(study.baseline, split)
    elsewhere: dict[frozenset[str], Test] = {}
    for one in families.values():
        for sides, pair in one.pairs.items():
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
            alone = compare([(study.values(name, split), base)])[0]
            there = vars(elsewhere[pairs[name]])
            shared = {part: there[part] for part in ("holm", "family", "tost", "margin")}
            found[name] = Test(**{**vars(alone), **shared})
    return found


@cache
def score_of(study: Study, split: str = "clean") -> dict[str, Test]:
    """Each other condition minus the baseline, with the p that the study's report gives."""
    return _against(study, split, families_of(study) if split == "clean" else {})


def _extent(study: Study) -> str:
    count = len(study.lines)
    return (
        f"{len(study.conditions)} conditions, {len(study.seeds)} seeds: {count} runs, all finished."
    )


def _score_row(study: Study, name: str, split: str, test: Test | None) -> str:
    values = 100 * np.array(list(study.values(name, split).values()))
    score = f"{name} | {len(values)} | {values.mean():.2f} ± {values.std(ddof=1):.2f}"
    return f"{score} |  |  |  | " if test is None else f"{score} | {test.points} | {cells(test)}"


def _overview(study: Study, found: dict[str, Test]) -> str:
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


def _check(study: Study, name: str, split: str) -> tuple[str, bool]:
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


def _reading(study: Study, families: dict[str, Family]) -> str:
    base = study.baseline
    others = [name for name in study.heads if name != base]
    pairs = {pair for one in families.values() for pair in one.pairs.values()}
    elsewhere = [name for name in others if frozenset((name, base)) in pairs]
    rest = len(others) - len(elsewhere)
    mean = ""
    for head in (name for name in study.heads if name in study.repeats.values()):
        names = "; ".join([f"*{head}*", *(f"*{n}*" for n, o in study.repeats.items() if o == head)])
        mean += f" {head} is, seed by seed, the mean of its replicas: {names}."
    if not others:
        return f"Means ± standard deviations over n seeds.{mean}"
    over = f", corrected after Holm over the {rest} comparisons of this table" if rest > 1 else ""
    if elsewhere:
        names = "; ".join(f"*{name}*" for name in elsewhere)
        over = f", corrected after Holm: for {names} over all comparisons of their family, below"
        more = "" if rest == 1 else "s"
        over += f", else over the {rest} other comparison{more} here" if rest else ""
    return (
        f"Means ± standard deviations over n seeds.{mean} Differences "
        "are in percentage points, paired by seed, with the 95 % interval of the paired t-test; "
        "there is none below three pairs. p is that of the two-sided test"
        f"{over}; the intervals are not corrected, nor is anything over several tables. “No "
        "difference shown” is not “no difference”: the end of the interval that is farther from "
        "zero says how large one may be. r is the correlation of the two over the seeds; pairing "
        "buys nothing where the interval is no shorter than that of Welch's t-test, which takes "
        "both for independent. The column of power has the true difference, in points, that such a "
        "test finds with 80 % chance."
    )


def _after(study: Study) -> str:
    base = study.epochs[study.baseline]
    unlike = [f"*{name} ({n})*" for name, n in study.epochs.items() if n != base]
    but = f" but for {'; '.join(unlike)}" if unlike else ""
    return f"All are tested after their last epoch, {base}{but}; no epoch was chosen by its score."


def _rates(study: Study) -> dict[Key, str]:
    lines: dict[Key, str] = {
        ("What was run", "seeds"): f"Seeds: {', '.join(map(str, study.seeds))}"
    }
    for name in study.conditions:
        asked, dropped = study.mean(name, "nominal"), study.mean(name, "realized")
        if asked is not None:
            lines["Rates", "", "row", name] = f"{name} | {asked:.4f} | {dropped:.4f}"
    if len(lines) > 1:
        lines["Rates", "", "row", "condition"] = "condition | nominal | realized"
    return lines


def _costs(study: Study) -> dict[Key, str]:
    ratio = f"ratio to {study.baseline}"
    head = f"condition | s a run | s an epoch | {ratio} | MB | {ratio}"
    lines: dict[Key, str] = {("Cost", "", "row", "condition"): head}
    seconds = {name: study.mean(name, "seconds") or 0.0 for name in study.conditions}
    memory = {name: study.mean(name, "memory") or 0.0 for name in study.conditions}
    for name in study.conditions:
        lines["Cost", "", "row", name] = (
            f"{name} | {seconds[name]:.1f} | {seconds[name] / study.epochs[name]:.2f} | "
            f"{seconds[name] / seconds[study.baseline]:.2f} | {memory[name] / 1e6:.0f} | "
            f"{memory[name] / memory[study.baseline]:.2f}"
        )
    return lines
