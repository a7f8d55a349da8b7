"""What was measured, as text, as a CSV file with a line for each run, and with the picture."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from experiments.files import draft_folder
from experiments.reporting.findings import counted, escape, sentence, spread_note
from experiments.reporting.plot_style import own_settings, save
from experiments.reporting.statistics import Difference, compare
from experiments.reporting.tables import (
    correlation_text,
    detectable_text,
    difference_text,
    holm_text,
    markdown,
    percent,
)
from experiments.saliency.measure import Measured, Saliency
from experiments.saliency.picture import plot_saliency

NAMES = {"entropy": "entropy, % of log(h w)", "share": "objects touched, %"}


def write(measured: Measured, folder: Path) -> Path:
    """Write `saliency.md`, which is returned, `saliency.csv` and `saliency.png`.

    Raises:
        OSError: if a file can't be written; what was there is then left as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with draft_folder(folder) as new:
        write_csv(measured, new / "saliency.csv")
        if measured.picture is not None:
            with own_settings():
                figure = plot_saliency(measured.picture, measured.threshold, measured.study)
                save(figure, new / "saliency.png")
        else:
            (folder / "saliency.png").unlink(missing_ok=True)  # of an earlier state of the study
        (new / "saliency.md").write_text(describe(measured), encoding="utf-8")
        for path in sorted(new.iterdir()):
            path.replace(folder / path.name)
    return folder / "saliency.md"


def write_csv(measured: Measured, path: Path) -> None:
    """One line for each run: what was found, and what it was asked with.

    `threshold` and `number` are those of the command; `shown` has the numbers of the test images
    in the picture, for the runs whose networks it shows.
    """
    picture, shown = measured.picture, ""
    if picture is not None:
        shown = " ".join(map(str, picture.numbers))
    names = [*(field.name for field in fields(Saliency)), "threshold", "number", "shown"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for run in measured.runs:
            seen = shown if picture is not None and run.seed == picture.seed else ""
            asked = {"threshold": measured.threshold, "number": measured.drawn_by, "shown": seen}
            writer.writerow({**asdict(run), **asked})


def describe(measured: Measured) -> str:
    """The text, in Markdown."""
    runs = measured.runs
    images = {run.images for run in runs}
    parts = [
        f"# {escape(measured.study)}: how far Grad-CAM spreads",
        f"{counted(len(runs), 'finished run')}, {counted(max(images), 'clean test image')} each; "
        f"Grad-CAM at `{runs[0].layer}`, of the image's own class, in evaluation mode.",
        _definitions(runs, measured.threshold),
        *(part for name in NAMES for part in _table(measured, name)),
        _empty(runs),
    ]
    if measured.absent:
        absent = "\n".join(f"- {escape(text)}" for text in measured.absent)
        parts += [f"Runs without a finished network, which do not count:\n\n{absent}"]
    if measured.picture is not None:
        parts += ["![saliency](saliency.png)", _caption(measured)]
    return "\n\n".join(parts) + "\n"


def _definitions(runs: Sequence[Saliency], threshold: float) -> str:
    text = (
        "*Entropy*: of the map divided by its sum, in nats, divided by that of a map that is the "
        "same everywhere: from 0, one place, to 1."
    )
    if any(run.share is not None for run in runs):
        text += (
            " *Share*: of an image's objects, those in whose box the map is on average at least "
            f"{100 * threshold:g} % of its largest value."
        )
    return text


def _table(measured: Measured, name: str) -> list[str]:
    """Means over the seeds, and paired differences to the first condition, as of accuracies."""
    scores = {
        condition: {
            run.seed: value
            for run in measured.runs
            if run.condition == condition and (value := getattr(run, name)) is not None
        }
        for condition in measured.conditions
    }
    if not any(scores.values()):
        return []
    first = measured.conditions[0]
    found = compare(scores, first)
    columns = (f"minus {escape(first)} [95 %]", "r", "80 % power", "Holm p") if found else ()
    lines = [
        (escape(condition), len(values), _mean(list(values.values())))
        + (_cells(found.get(condition), len(values)) if found else ())
        for condition, values in scores.items()
    ]
    parts = [f"## {name.capitalize()}"]
    if found:
        parts.append("\n".join(f"- {sentence(one, first, found[one])}" for one in found))
    parts += [markdown(("condition", "n", NAMES[name], *columns), lines), _reading(len(found))]
    return parts + spread_note([*found.values()])


def _reading(comparisons: int) -> str:
    """How the table is to be read."""
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


def _mean(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {percent(statistics.stdev(values))}" if len(values) > 1 else ""
    return f"{percent(statistics.fmean(values))}{spread}"


def _cells(found: Difference | None, n: int) -> tuple[str, str, str, str]:
    """Difference, correlation, power and corrected p, as text."""
    text = difference_text(found)
    if found is not None and found.n not in (n, 0):
        text += f" ({counted(found.n, 'pair')})"
    return text, correlation_text(found), detectable_text(found), holm_text(found)


def _empty(runs: Sequence[Saliency]) -> str:
    """How many maps have no numbers."""
    total, images = sum(run.empty for run in runs), sum(run.images for run in runs)
    if not total:
        return f"None of the {images} maps is zero everywhere."
    by_condition: dict[str, int] = {}
    for run in runs:
        by_condition[run.condition] = by_condition.get(run.condition, 0) + run.empty
    each = ", ".join(f"{escape(name)} {number}" for name, number in by_condition.items())
    return (
        f"{total} of {images} maps are zero everywhere, where no place speaks for the class: "
        f"{each}. They are no part of the means; where conditions differ in their number, the "
        "means are over unlike images."
    )


def _caption(measured: Measured) -> str:
    picture = measured.picture
    assert picture is not None
    text = (
        f"Seed {picture.seed} and {counted(len(picture.numbers), 'image')}, drawn by the number "
        f"{measured.drawn_by}, not chosen. Each map goes from zero to its own largest value; below "
        "it stands its entropy"
    )
    if picture.boxes:
        text += ", and how many boxes it touches: those that are solid, not dotted"
    text += "."
    return text
