"""Every table and sentence of a report.md, line by line, against what its runs.csv gives.

What is said is parsed into lines with a key each (section, names); what should be said is made for
each key from `numbers`. Lines without a key must be among the sentences that claim no number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache

from experiments.recounting.epochs import BEST_EPOCH, best_lines, length_lines
from experiments.recounting.families import Family, families_of
from experiments.recounting.numbers import Fault, Study, cells_of, plain
from experiments.recounting.scores import (
    alone,
    check,
    corrected_over,
    overview,
    score_of,
    score_row,
)
from experiments.recounting.sentences import (
    COLUMNS,
    Key,
    bullet,
    chance_lines,
    family_lines,
    family_table,
    note,
)

_FAMILY = re.compile(r"\*\*(?:Primary: )?(.+?)\*\*(?: on .+ test images)? \(\d+ comparison")
_PROSE = (  # sentences that are so, whatever the runs are
    r"!\[\w+\]\(\w+\.png\)",
    r"(Each seed is a point|Means; the points are the seeds|Differences to the baseline on the "
    r"changed test images; marks)[^0-9]*(Intervals (have|are)[^0-9]*95 %[^0-9]*)?",
    r"What the question asks for, besides the comparisons with the baseline:",
    r"Nothing is compared\.",
    r"A second reading: of each run the weights after the epoch with the highest accuracy on its "
    r"validation images, the first of equals, on the clean test images\. All else in this report "
    r"is about the last epoch\. Validation images count with the labels that are trained with, "
    r"wrong ones included\. Accuracies, differences and p are made and read as those of the last "
    r"epoch; each table is corrected for itself\.",
    r"After every epoch, in evaluation mode: lines are means over the seeds, bands reach from the "
    r"lowest seed to the highest\. Validation images count with the labels that are trained with\.",
    r"Clean accuracy in percent, means ± standard deviations over the seeds\. Each number of "
    r"epochs is a training of its own, with its own schedules\.",
    r"Means over (the )?seeds[^0-9]*",
    r"Means over the seeds, a replica minus an earlier one\. Intervals have 95 %, p is not "
    r"corrected; filled where it is below \.05\.",
    r"Means over the seeds; ratios are over those that have a finished run of .+, too\. Unlike the "
    r"rest of this report, these numbers depend on what else the machine did\. Memory is the most "
    r"that a process held at a time, all that it had loaded included; on a GPU, that torch "
    r"allocated there\.( By their starts and seconds, at most \d+ runs? of this study (was|were) "
    r"at work at once on one machine\.)?( The first run was begun [\d:T+-]+\.)?",
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
            if section.lower().endswith("contrasts") or section == BEST_EPOCH:
                yield number, (section, "title", below), below
        elif raw.startswith("# ") or (section in ("", "Training") and "Question" in raw):
            continue
        elif raw.startswith("| "):
            if cells := cells_of(raw):
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
    if found := _FAMILY.match(line):
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
        found = score_of(study, split)
        head = f"condition | n | accuracy, % | minus {study.baseline} [95 %] | {COLUMNS}"
        lines[title, below, "row", "condition"] = head
        for name in study.heads:
            lines[title, below, "row", name] = score_row(study, name, split, found.get(name))
        where = ("Answer", "") if split == "clean" else (title, below)
        if found:
            lines[*where, "overview"] = overview(study, found)
            lines[title, below, "note"] = note([*found.values()])
        for name in alone(study):
            text, alarm = check(study, name, split)
            if split == "clean" or alarm:
                lines[*where, "check", name] = text
        over = "" if split == "clean" else corrected_over(study, split, "above")
        if over:
            lines[title, below, "Here,"] = f"Here, p is corrected after Holm: {over}."
        if split == "clean":
            for name, test in found.items():
                key, text = bullet(name, study.baseline, test)
                lines["Answer", "", "baseline", key] = text
            lines["Clean accuracy", "", "Means"] = _reading(study)
    if not study.repeats and len(study.heads) > 1:
        lines["Answer", "", "There"] = (
            f"There is no A/A condition, which would differ from {study.baseline} only in its "
            "`replica` and show how large a difference chance alone makes."
        )
    after = _after(study)
    lines["Answer", "", after.split(" ")[0]] = after
    primary = any(one.is_primary for one in families.values())
    if primary:
        lines["Answer", "", "What"] = "What is not primary is exploratory."
    for title, one in families.items():
        lines |= family_lines(title, one)
        section = _section(one.is_primary, primary)
        lines |= family_table(title, one, section)
        alike = [other for other in families.values() if other.is_primary == one.is_primary]
        lines[section, "", "Each"] = _how_compared(alike)
    if len(study.splits) > 1:
        lines["Robustness", "", "The"] = _how_changed(study)
    lines |= best_lines(study) | length_lines(study)
    return lines | chance_lines(study) | _rates(study) | _costs(study)


def _section(is_primary: bool, any_primary: bool) -> str:
    rest = "Exploratory contrasts" if any_primary else "Contrasts"
    return "Primary contrasts" if is_primary else rest


def _how_compared(families: Sequence[Family]) -> str:
    text = (
        "Each is the first condition, or level, minus the second, paired by seed. p is corrected "
        "after Holm over the comparisons of its table."
    )
    if any(one.margin is not None for one in families):
        text += (
            " Where a margin (±) is given, two one-sided tests (TOST) ask whether the difference "
            "is within it; their p is corrected likewise, for itself."
        )
    if any(one.on_tests for one in families):
        text += " A table whose title names no test images is of the clean ones."
    return text


def _how_changed(study: Study) -> str:
    note = "; each table is corrected for itself" if len(study.heads) > 2 else ""
    if note and any(corrected_over(study, split, "") for split in study.splits[1:]):
        note += ", but for what stands in a family on its images"
    return f"The same networks on changed test images{note}."


def _extent(study: Study) -> str:
    count = len(study.lines)
    return (
        f"{len(study.conditions)} conditions, {len(study.seeds)} seeds: {count} runs, all finished."
    )


def _reading(study: Study) -> str:
    others = len(study.heads) - 1
    mean = ""
    for head in (name for name in study.heads if name in study.repeats.values()):
        names = "; ".join([f"*{head}*", *(f"*{n}*" for n, o in study.repeats.items() if o == head)])
        mean += f" {head} is, seed by seed, the mean of its replicas: {names}."
    if not others:
        return f"Means ± standard deviations over n seeds.{mean}"
    over = f", corrected after Holm over the {others} comparisons of this table"
    if shared := corrected_over(study, "clean", "below"):
        over = f", corrected after Holm: {shared}"
    elif others == 1:
        over = ""
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
    text = f"ll are tested after their last epoch, {base}{but}; no epoch was chosen by its score."
    if not study.has_best:
        return f"A{text}"
    return (
        f"Here, a{text} The [best epochs by validation](#best-epoch-by-validation) are a second "
        "reading; none was chosen by a test score."
    )


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
