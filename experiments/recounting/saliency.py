"""Each line of a saliency.md against what its saliency.csv gives, and which runs that has to hold.

The numbers of the runs themselves would need their networks, which are not committed; from them on,
everything is made again: means, differences, tests, and the sentences about settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from experiments.recounting.numbers import Fault, Study, cells_of, plain
from experiments.recounting.paired import Test, Values, p_says, two
from experiments.recounting.saliency_runs import DUST, Looked, read_saliency
from experiments.recounting.sentences import COLUMNS, Key, bullet, note

MEASURES = {"entropy": "entropy, % of log(h w)", "share": "objects touched, %"}
_ABSENT = "Runs without a finished network, which do not count:"


def recount_saliency(study: Study) -> list[Fault]:
    """Everything in a study's saliency/saliency.md that is not so; [] without that folder.

    Args:
        study: read from the folder of its report.

    Raises:
        OSError: if a file can't be read.
    """
    folder = study.folder / "saliency"
    if not folder.is_dir():
        return []
    path = folder / "saliency.md"
    for file in (path, folder / "saliency.csv"):
        if not file.is_file():
            return [Fault(file, 1, "nothing", "it stands beside the other")]
    text = path.read_text(encoding="utf-8")
    looked = read_saliency(study)
    if looked is None:
        return [Fault(path, 1, "runs", "saliency.csv has none")]
    faults = [Fault(folder / "saliency.csv", *one) for one in _run_faults(looked, study)]
    expected, seen = _expected(looked), set()
    for number, key, said in _lines(text):
        so = "once" if key in seen else expected.get(key, "nothing that the runs tell")
        seen.add(key)
        if said != so:
            faults.append(Fault(path, number, said, so))
    return faults + [
        Fault(path, 1, "nothing", said) for key, said in expected.items() if key not in seen
    ]


def _run_faults(looked: Looked, study: Study) -> Iterator[tuple[int, str, str]]:
    """Line, what it says, what is so: lines of runs that the study has not, or not finished."""
    finished = {
        (line["condition"], line["seed"])
        for line in study.lines
        if line["status"] == "finished" and line["condition"] in looked.conditions
    }
    for number, line in enumerate(looked.lines, start=2):
        run = (line["condition"], line["seed"])
        if run not in finished:
            yield (
                number,
                f"{run[0]}, seed {run[1]}",
                "a finished run of runs.csv, once",
            )
        finished.discard(run)
    for name, seed in sorted(finished):
        yield 1, "nothing", f"{name}, seed {seed}"
    for column in ("layer", "images", "threshold", "number"):
        found = sorted({line[column] for line in looked.lines})
        if len(found) > 1:
            yield 1, f"{column}: {', '.join(found)}", "one for all runs"


def _lines(text: str) -> Iterator[tuple[int, Key, str]]:
    """Number, key and text of each line; tables as their cells."""
    section = ""
    for number, raw in enumerate(text.splitlines(), start=1):
        line = plain(raw)
        if raw.startswith("# ") and number == 1:
            yield number, ("title",), re.sub(r"^# .+:", "# NAME:", line)
        elif raw.startswith("## "):
            section = line[3:].lower()
            yield number, (section, "title"), line
        elif raw.startswith("| "):
            if cells := cells_of(raw):
                yield number, (section, "row", cells[0]), " | ".join(cells)
        elif raw.startswith("- **"):
            yield number, (section, line.split(": ")[0]), line
        elif raw.startswith("- "):
            yield number, (line,), line
        elif line.startswith(("Means ", "**")):
            yield number, (section, line.split(" ")[0]), line
        elif line.strip():
            yield number, _sentence_key(line), line


def _sentence_key(line: str) -> Key:
    """What a sentence outside of the tables is about."""
    starts = {
        r"\d+ finished runs?,": "extent",
        r"\*Entropy\*": "definitions",
        r"None of the|\d+ of \d+ maps": "empty",
        r"Seed -?\d+ and": "caption",
    }
    return next(((key,) for start, key in starts.items() if re.match(start, line)), (line,))


def _expected(looked: Looked) -> dict[Key, str]:
    """Key -> what a text on these runs says."""
    runs, first = len(looked.lines), looked.lines[0]
    images = int(first["images"])
    lines: dict[Key, str] = {
        ("title",): "# NAME: how far Grad-CAM spreads",
        ("extent",): f"{_many(runs, 'finished run')}, {_many(images, 'clean test image')} each; "
        f"Grad-CAM at `{first['layer']}`, of the image's own class, in evaluation mode.",
        ("definitions",): "*Entropy*: of the map divided by its sum, in nats, divided by that of a "
        "map that is the same everywhere: from 0, one place, to 1.",
        ("empty",): _empty(looked),
    }
    measured = [name for name in MEASURES if any(line[name] for line in looked.lines)]
    if "share" in measured:
        percent = 100 * float(first["threshold"])
        lines["definitions",] += (
            " *Share*: of an image's objects, those in whose box the map is on average at least "
            f"{percent:g} % of its largest value."
        )
    for measure in measured:
        lines |= _measure_lines(looked, measure)
    if looked.absent:
        lines |= {(text,): text for text in (_ABSENT, *(f"- {one}" for one in looked.absent))}
    return lines | _picture_lines(looked, "share" in measured)


def _measure_lines(looked: Looked, measure: str) -> dict[Key, str]:
    """Table and sentences of one measure."""
    base, *others = looked.conditions
    tests = looked.tests(measure)
    head = f"condition | n | {MEASURES[measure]}"
    head += f" | minus {base} [95 %] | {COLUMNS}" if others else ""
    lines: dict[Key, str] = {
        (measure, "title"): f"## {measure.capitalize()}",
        (measure, "row", "condition"): head,
        (measure, "Means"): _reading(len(others)),
    }
    for name in looked.conditions:
        values = 100 * np.array([*looked.values(name, measure).values()])
        mean = two(values.mean()) if len(values) else ""
        mean += f" ± {two(values.std(ddof=1))}" if len(values) > 1 else ""
        row = f"{name} | {len(values)} | {mean}"
        if name == base:
            lines[measure, "row", name] = row + (" |  |  |  | " if others else "")
            continue
        shared = looked.values(base, measure)
        own = looked.values(name, measure)
        cells, key, said = _told(name, base, own, shared, tests[name])
        lines[measure, "row", name] = f"{row} | {cells}"
        lines[measure, key] = said
    if known := [test for test in tests.values() if test is not None]:
        text = note(known)
        lines[measure, text.split(" ")[0]] = text
    return lines


def _told(
    name: str, base: str, own: Values, other: Values, test: Test | None
) -> tuple[str, str, str]:
    """Cells of a comparison, how its sentence begins, and all of it."""
    key = f"- **{name}** minus {base}"
    differences = [100 * (own[seed] - other[seed]) for seed in own if seed in other]
    n = len(differences)
    pairs = f" ({_many(n, 'pair')})" if n not in (len(own), 0) else ""
    if test is not None:
        r = "" if test.r is None else f"{test.r:+.2f}"
        cells = f"{test.points}{pairs} | {r} | {two(100 * test.found)} | {p_says(test.holm)}"
        return cells, *bullet(name, base, test)
    if not n:
        said = f"no finished run has a seed in common with one of {base}."
        return " |  |  | ", key, f"{key}: {said}"
    seeds, mean = _many(n, "seed"), two(np.mean(differences), "+")
    if np.ptp(differences) > 100 * DUST:
        said = f"{mean} points over {seeds}: too few for an interval or a test."
    elif abs(np.mean(differences)) <= 100 * DUST:
        mean, said = "same scores", f"the same scores ({seeds})."
    elif n < 3:
        said = f"{mean} points over {seeds}: too few for an interval or a test."
    else:
        said = f"{mean} points with each of {seeds}; without any spread, there is no test."
        mean += " (constant)"
    return f"{mean}{pairs} |  |  | ", key, f"{key}: {said}"


def _reading(comparisons: int) -> str:
    text = (
        "Means over the images of a run, in percent, then over the seeds (± standard deviation "
        "over these)."
    )
    if not comparisons:
        return text
    over = f", corrected after Holm over the {comparisons} comparisons of this table"
    return (
        f"{text} Differences are in percentage points, paired by seed, with the 95 % interval of "
        "the paired t-test; there is none below three pairs. p is that of the two-sided test"
        f"{over if comparisons > 1 else ''}; the intervals are not corrected. r is the correlation "
        "of the two over the seeds; the column of power has the true difference, in points, that "
        "such a test finds with 80 % chance."
    )


def _empty(looked: Looked) -> str:
    each: dict[str, int] = {}
    for line in looked.lines:
        each[line["condition"]] = each.get(line["condition"], 0) + int(line["empty"])
    images, total = sum(int(line["images"]) for line in looked.lines), sum(each.values())
    if not total:
        return f"None of the {images} maps is zero everywhere."
    return (
        f"{total} of {images} maps are zero everywhere, where no place speaks for the class: "
        f"{', '.join(f'{name} {count}' for name, count in each.items())}. They are no part of the "
        "means; where conditions differ in their number, the means are over unlike images."
    )


def _picture_lines(looked: Looked, has_boxes: bool) -> dict[Key, str]:
    """What stands below the picture: of runs of one seed, one of each condition."""
    pictured = [line for line in looked.lines if line["shown"]]
    if not pictured:
        return {}
    count = len(pictured[0]["shown"].split())
    text = (
        f"Seed {pictured[0]['seed']} and {_many(count, 'image')}, drawn by the number "
        f"{pictured[0]['number']}, not chosen. Each map goes from zero to its own largest value; "
        "below it stands its entropy"
    )
    if has_boxes:
        text += ", and how many boxes it touches: those that are solid, not dotted"
    picture = "![saliency](saliency.png)"
    return {(picture,): picture, ("caption",): f"{text}."}


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
