"""The table of single classes on the page of benchmarks, from the files of the measurements.

python -m experiments.overhead.page      # writes it anew into docs/benchmarks.md
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pandas as pd

from experiments.report import insert

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/benchmarks.md"
FILES = ROOT / "docs/benchmarks"
NOT_YET = "not measured yet"


class Line(NamedTuple):
    """A line of the table.

    Attributes:
        title: what the line is called.
        file: the measurements that it is from.
        work: the name of the work.
        variant: what was measured.
        reference: what it was compared with.
    """

    title: str
    file: str
    work: str
    variant: str
    reference: str


_ON = "penalties and clamps"
_UPDATE = "resnet50, update by SGD"
_WATCH = "resnet18, training step under watch"
_OBSERVED = "observed activation"
LINES = [
    Line("`ActivityL1`", "others", _ON, "ActivityL1", "floor"),
    Line("`ActivityL2`", "others", _ON, "ActivityL2", "floor"),
    Line("`ClampActivation(min, max)`", "others", _ON, "ClampActivation", "torch.clamp"),
    Line("`ClampActivation(cap=...)`", "others", _ON, "ClampActivation, cap", "floor"),
    Line("`FreezeNorm`", "others", "FreezeNorm", "FreezeNorm", "eval()"),
    Line("`ZLoss`", "others", "ZLoss", "ZLoss", "log_softmax"),
    Line("`NEFTune`", "others", "NEFTune", "NEFTune", "bare"),
    Line("`AdaGC`", "others", _UPDATE, "AdaGC", "clip_grad_norm_"),
    Line("`ZClip`", "others", _UPDATE, "ZClip", "clip_grad_norm_"),
    Line("`SkipUpdate`", "others", _UPDATE, "SkipUpdate", "clip_grad_norm_"),
    Line("`ClipGradNorm(group=True)`", "others", _UPDATE, "ClipGradNorm", "clip_grad_norm_"),
    Line('`L2SP(when="accumulated")`', "others", _UPDATE, "L2SP", "bare"),
    Line(
        "`ActivationStats(outliers=True)`",
        "observers",
        _OBSERVED,
        "ActivationStats, outliers",
        "floor",
    ),
    Line(
        "`ActivationStats(residual=True)`",
        "observers",
        _OBSERVED,
        "ActivationStats, residual",
        "floor",
    ),
    Line("`watch`", "observers", _WATCH, "watch", "bare"),
    Line("`watch(every=1)`", "observers", _WATCH, "watch, every=1", "bare"),
]
"""One line for each class, and the best reference for it."""


def table() -> str:
    """The table in Markdown."""
    frames = {name: pd.read_csv(FILES / f"{name}.csv") for name in ("others", "observers")}
    rows = ["| class | reference | ratio | shape |", "| --- | --- | --- | --- |"]
    for line in LINES:
        rows += _rows(line, frames[line.file])
    return "\n".join(rows)


def _rows(line: Line, frame: pd.DataFrame) -> list[str]:
    """The rows of a line: one for each shape that was measured."""
    is_it = (
        frame["work"].eq(line.work)
        & frame["variant"].eq(line.variant)
        & frame["reference"].eq(line.reference)
    )
    measured = frame[is_it & frame["ratio"].notna()]
    start = f"| {line.title} | {line.reference} |"
    if measured.empty:
        return [f"{start} {NOT_YET} | |"]

    rows = []
    for _, row in measured.iterrows():
        ratio, low, high = (_digits(row[name]) for name in ("ratio", "q25", "q75"))
        shape = "" if pd.isna(row["shape"]) else str(row["shape"]).replace("x", "×")
        rows.append(f"{start} {ratio} ({low} to {high}) | {shape} |")
    return rows


def _digits(number: float) -> str:
    """Two digits of a number, without a zero before the point.

    Example:
        >>> _digits(0.6189), _digits(12.34)
        ('.62', '12')
    """
    return f"{number:.2g}".replace("0.", ".", 1) if abs(number) < 1 else f"{number:.2g}"


def page() -> str:
    """The page as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    return insert(text, {"classes": f"\n\n{table()}\n\n"})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
