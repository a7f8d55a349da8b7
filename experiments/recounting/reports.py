"""Every table and sentence of a report.md, line by line, against what its runs.csv gives.

What is said is parsed into lines with a key each (section, names); what should be said is made for
each key from `numbers`. Lines without a key must be among the sentences that claim no number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import numpy as np

from experiments.recounting.numbers import (
    Family,
    Fault,
    Study,
    Test,
    family,
    p_says,
    plain,
    tests,
)

Key = tuple[str, ...]
BEST, LENGTHS = "Best epoch by validation", "Accuracy against number of epochs"
_CELLS = re.compile(r"(?<!\\)\|")
_PROSE = (  # sentences that are so, whatever the runs are
    r"!\[\w+\]\(\w+\.png\)",
    r"(Each seed is a point|Means; the points are the seeds|Differences to the baseline on the "
    r"changed test images; marks)[^0-9]*(Intervals (have|are)[^0-9]*95 %[^0-9]*)?",
    r"What the question asks for, besides the comparisons with the baseline\. Each is the first "
    r"condition, or level, minus the second, paired by seed\. p is corrected after Holm over the "
    r"comparisons of its table\.",
    r"A second reading: of each run the weights after the epoch with the highest accuracy on its "
    r"validation images, the first of equals, on the clean test images\. All else in this report "
    r"is about the last epoch\. Validation images count with the labels that are trained with, "
    r"wrong ones included\. Accuracies, differences and p are made and read as those of the last "
    r"epoch; each table is corrected for itself\.",
    r"After every epoch, in evaluation mode: lines are means over the seeds, bands reach from the "
    r"lowest seed to the highest\. Validation images count with the labels that are trained with\.",
    r"Clean accuracy in percent, means ± standard deviations over the seeds\. Each number of "
    r"epochs is a training of its own, with its own schedules\.",
    r"The same networks on changed test images; each table is corrected for itself\.",
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
            if section in ("Contrasts", BEST):
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
    if found := re.match(r"\*\*(Pairs .+?)\*\* \(", line):
        return ("family", found[1]), found[1]
    if found := re.match(r"\*\*(?:Check\.|Warning: a false alarm\.)\*\* (.+?) differs", line):
        return ("check", found[1]), within
    if line.startswith("**"):
        return ("overview",), within
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
        head = f"condition | n | accuracy, % | minus {study.baseline} [95 %] | Holm p"
        lines[title, below, "row", "condition"] = head
        for name in study.heads:
            lines[title, below, "row", name] = _score_row(study, name, split, found.get(name))
        where = ("Answer", "") if split == "clean" else (title, below)
        lines[*where, "overview"] = _overview(study, found)
        for name in study.repeats:
            text, alarm = _check(study, name, split)
            if split == "clean" or alarm:
                lines[*where, "check", name] = text
        if split == "clean":
            for name, test in found.items():
                key, text = _bullet(name, study.baseline, test)
                lines["Answer", "", "baseline", key] = text
            lines["Clean accuracy", "", "Means"] = _reading(study, families)
    after = _after(study)
    lines["Answer", "", after.split(" ")[0]] = after
    for title, one in families.items():
        lines |= _family_lines(title, one.tests)
    return lines | _best(study) | _lengths(study) | _rates(study) | _costs(study)


def _best(study: Study) -> dict[Key, str]:
    """The reading of the best epochs: the same comparisons, of other scores."""
    if not study.has_best:
        return {}
    split = "best_clean"
    families = {title: family(study, title, split) for title in families_of(study)}
    known = {title: one for title, one in families.items() if one is not None}
    found = _against(study, split, known)
    head = f"condition | n | epochs, mean | validation, % | accuracy, % | minus {study.baseline}"
    lines: dict[Key, str] = {
        (BEST, "", "row", "condition"): f"{head} [95 %] | Holm p",
        (BEST, "", "overview"): _overview(study, found),
    }
    for name in study.heads:
        row = _score_row(study, name, split, found.get(name))
        _, n, rest = row.removeprefix(name).split(" | ", 2)
        epochs = f"{study.pooled(name, 'best_epoch'):.1f} of {study.epochs[name]}"
        validation = f"{100 * study.pooled(name, 'validation'):.2f}"
        lines[BEST, "", "row", name] = f"{name} | {n} | {epochs} | {validation} | {rest}"
    for name in study.repeats:
        text, alarm = _check(study, name, split)
        if alarm:
            lines[BEST, "", "check", name] = text
    for title, one in known.items():
        lines |= _family_table(BEST, title, one.tests)
    return lines


def _lengths(study: Study) -> dict[Key, str]:
    """The tables of accuracy against the number of epochs."""
    factor = study.epochs_factor
    if factor is None:
        return {}
    crossed = study.factors[factor]
    numbers = sorted({study.epochs[name] for name in crossed})
    lines: dict[Key, str] = {}
    for below, split in (("", "clean"), ("After the best epoch by validation", "best_clean")):
        if split == "best_clean" and not study.has_best:
            continue
        lines[LENGTHS, below, "row", "epochs"] = " | ".join(map(str, ("epochs", *numbers)))
        cells: dict[str, dict[int, str]] = {}
        for name in crossed:
            others = [levels[name] for other, levels in study.factors.items() if other != factor]
            if name in study.heads:
                score = _score_row(study, name, split, None).removeprefix(name).split(" | ")[2]
                cells.setdefault(", ".join(others) or "all", {})[study.epochs[name]] = score
        for name, of in cells.items():
            row = [name, *(of.get(number, "") for number in numbers)]
            lines[LENGTHS, below, "row", name] = " | ".join(row)
    return lines


@cache
def families_of(study: Study) -> dict[str, Family]:
    """The families that the report has a table of; what has another title is a fault."""
    found = {title: family(study, title) for title in study.titles}
    return {title: one for title, one in found.items() if one is not None}


def _against(study: Study, split: str, families: dict[str, Family]) -> dict[str, Test]:
    """Each other condition minus the baseline; corrected where it stands first."""
    others = [name for name in study.heads if name != study.baseline]
    base = study.values(study.baseline, split)
    elsewhere: dict[frozenset[str], float] = {}
    for one in families.values():
        for pair, test in one.tests.items() if one.single else ():
            elsewhere.setdefault(frozenset(pair), test.holm)
    pairs = {name: frozenset((name, study.baseline)) for name in others}
    rest = [name for name in others if pairs[name] not in elsewhere]
    corrected = dict(
        zip(rest, tests([(study.values(name, split), base) for name in rest]), strict=True)
    )
    found = {}
    for name in others:
        if name in corrected:
            found[name] = corrected[name]
        else:
            alone = tests([(study.values(name, split), base)])[0]
            numbers = {**vars(alone), "holm": elsewhere[pairs[name]]}
            found[name] = Test(**numbers)
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
    return f"{score} |  | " if test is None else f"{score} | {test.points} | {p_says(test.holm)}"


def _verdict(test: Test) -> str:
    if test.holm >= 0.05:
        return f"no difference shown; {_hidden([test])}"
    return "higher" if test.mean > 0 else "lower"


def _hidden(found: list[Test]) -> str:
    return f"up to {100 * max(test.hidden for test in found):.2f} points may be hidden"


def _bullet(left: str, right: str, test: Test) -> tuple[str, str]:
    key = f"- **{left}** minus {right}"
    points = test.points.replace(" [", " points [")
    return key, f"{key}: {points}, n {test.n}, Holm p {p_says(test.holm)}: {_verdict(test)}."


def _overview(study: Study, found: dict[str, Test]) -> str:
    groups: dict[str, list[str]] = {"higher": [], "lower": [], "no": []}
    for name, test in found.items():
        groups[_verdict(test).split(" ")[0]].append(name)
    sentences = [
        f"**{title} {study.baseline}:** {'; '.join(f'*{name}*' for name in groups[verdict])}."
        for verdict, title in (("higher", "Higher than"), ("lower", "Lower than"))
        if groups[verdict]
    ]
    if none := groups["no"]:
        many = f"{len(none)} conditions" if len(none) > 4 else "; ".join(f"*{n}*" for n in none)
        hidden = _hidden([found[name] for name in none])
        sentences.append(f"**No difference from {study.baseline} shown:** {many} ({hidden}).")
    return " ".join(sentences)


def _check(study: Study, name: str, split: str) -> tuple[str, bool]:
    first = study.repeats[name]
    test = tests([(study.own(name, split), study.own(first, split))])[0]
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
    return f"{start}: no difference shown; {_hidden([test])}.{end}", False


def _reading(study: Study, families: dict[str, Family]) -> str:
    base = study.baseline
    others = [name for name in study.heads if name != base]
    pairs = {frozenset(pair) for one in families.values() if one.single for pair in one.tests}
    elsewhere = [name for name in others if frozenset((name, base)) in pairs]
    rest = len(others) - len(elsewhere)
    replicas = [base, *(name for name, first in study.repeats.items() if first == base)]
    mean = f" {base} is, seed by seed, the mean of its replicas: "
    mean += f"{'; '.join(f'*{name}*' for name in replicas)}."
    over = f" over the {rest} comparisons of this table"
    if elsewhere:
        over = f": for {'; '.join(f'*{name}*' for name in elsewhere)} over all comparisons of "
        over += "their table under [Contrasts](#contrasts)"
        more = "" if rest == 1 else "s"
        over += f", else over the {rest} other comparison{more} here" if rest else ""
    return (
        f"Means ± standard deviations over n seeds.{mean if len(replicas) > 1 else ''} Differences "
        "are in percentage points, paired by seed, with the 95 % interval of the paired t-test; "
        "there is none below three pairs. p is that of the two-sided test, corrected after Holm"
        f"{over}; the intervals are not corrected, nor is anything over several tables. “No "
        "difference shown” is not “no difference”: the end of the interval that is farther from "
        "zero says how large one may be."
    )


def _after(study: Study) -> str:
    base = study.epochs[study.baseline]
    unlike = [f"*{name} ({n})*" for name, n in study.epochs.items() if n != base]
    but = f" but for {'; '.join(unlike)}" if unlike else ""
    text = f"ll are tested after their last epoch, {base}{but}; no epoch was chosen by its score."
    if not study.has_best:
        return f"A{text}"
    return (
        f"Here, a{text} The [best epochs by validation](#best-epoch-by-validation) are a second "
        "reading; none was chosen by a test score."
    )


def _family_lines(title: str, comparisons: dict[tuple[str, str], Test]) -> dict[Key, str]:
    shown = {pair: test for pair, test in comparisons.items() if test.holm < 0.05}
    rest = [test for test in comparisons.values() if test.holm >= 0.05]
    plural = "" if len(comparisons) == 1 else "s"
    text = f"**{title}** ({len(comparisons)} comparison{plural}): {len(shown) or 'no'} shown to "
    text += f"differ{f', {len(rest)} not ({_hidden(rest)})' if rest else ''}"
    lines: dict[Key, str] = {
        ("Answer", "", "family", title): f"{text}{':' if shown else '.'}",
        **_family_table("Contrasts", title, comparisons),
    }
    for (left, right), test in shown.items():
        key, text = _bullet(left, right, test)
        lines["Answer", "", title, key] = text
    return lines


def _family_table(
    section: str, title: str, comparisons: dict[tuple[str, str], Test]
) -> dict[Key, str]:
    lines: dict[Key, str] = {
        (section, "title", title): title,
        (section, title, "row", "contrast"): "contrast | n | points [95 %] | Holm p",
    }
    for (left, right), test in comparisons.items():
        name = f"{left} − {right}"
        row = f"{name} | {test.n} | {test.points} | {p_says(test.holm)}"
        lines[section, title, "row", name] = row
    return lines


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
