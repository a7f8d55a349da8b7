"""The numbers of the benchmarks on the pages, from the files of the measurements.

python -m experiments.overhead.page      # writes them anew, for example into docs/benchmarks.md
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from experiments.overhead import gpu_page
from experiments.report import insert

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/benchmarks.md"
FILES = ROOT / "docs/benchmarks"
OF_OTHER_PAGES = {
    ROOT / "docs/guide/faq.md": ("cost", "cost_small", "outliers", "cap", "sample"),
    ROOT / "docs/limits.md": ("sample",),
    ROOT / "docs/limits_in_detail.md": ("sample",),
}
NOT_YET = "not measured yet"


class Line(NamedTuple):
    """A line of a table.

    Attributes:
        title: what the line is called.
        file: the measurements that it is from.
        work: the name of the work.
        variant: what was measured.
        reference: what it was compared with.
        shown: how the table names the reference, if it has another name there.
    """

    title: str
    file: str
    work: str
    variant: str
    reference: str
    shown: str = ""


_PENALTIES = "penalties and clamps"
_UPDATE = "resnet50, update by SGD"
_STEP = "resnet18, training step"
_WATCH = "resnet18, training step under watch"
_OBSERVED = "observed activation"
LINES = [
    Line("`ActivityL1`", "others", _PENALTIES, "ActivityL1", "floor"),
    Line("`ActivityL2`", "others", _PENALTIES, "ActivityL2", "floor"),
    Line("`ClampActivation(min, max)`", "others", _PENALTIES, "ClampActivation", "torch.clamp"),
    Line("`ClampActivation(cap=...)`", "others", _PENALTIES, "ClampActivation, cap", "floor"),
    Line("`FreezeNorm`", "others", "FreezeNorm", "FreezeNorm", "eval()"),
    Line("`ZLoss`", "others", "ZLoss", "ZLoss", "log_softmax"),
    Line("`NEFTune`", "others", "NEFTune", "NEFTune", "bare"),
    Line("`AdaGC`", "others", _UPDATE, "AdaGC", "clip_grad_norm_"),
    Line("`ZClip`", "others", _UPDATE, "ZClip", "clip_grad_norm_"),
    Line("`SkipUpdate`", "others", _UPDATE, "SkipUpdate", "clip_grad_norm_"),
    Line("`ClipGradNorm(group=True)`", "others", _UPDATE, "ClipGradNorm", "clip_grad_norm_"),
    Line('`L2SP(when="accumulated")`', "others", _UPDATE, "L2SP", "bare"),
    Line("`L2SP`", "others", _STEP, "L2SP", "bare"),
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
    Line("`watch(keep=3)`", "observers", _WATCH, "watch, keep=3", "bare"),
]
"""One line for each class, and the best reference for it."""

_RATE_10 = "drop_block2d p=0.1"
_RATE_25 = "drop_block2d p=0.25"
_RATE_50 = "drop_block2d p=0.5"
_LAST = f"{_RATE_10} channels_last"
_BFLOAT16 = f"{_RATE_10} bfloat16"
DROP_BLOCK = [
    Line("functional, p = 0.1", "kernels", _RATE_10, "functional", "floor"),
    Line("the same", "kernels", _RATE_10, "functional", "torchvision"),
    Line("the same", "kernels", _RATE_10, "functional", "timm"),
    Line("functional, p = 0.25", "kernels", _RATE_25, "functional", "floor"),
    Line("functional, p = 0.5", "kernels", _RATE_50, "functional", "floor"),
    Line(
        "attached - functional, p = 0.1",
        "kernels",
        _RATE_10,
        "attached - functional",
        "floor",
    ),
    Line("`share_channels`, p = 0.1", "kernels", _RATE_10, "share_channels", "timm shared"),
    Line("`share_channels`, p = 0.25", "kernels", _RATE_25, "share_channels", "timm shared"),
    Line("`share_channels`, p = 0.5", "kernels", _RATE_50, "share_channels", "timm shared"),
    Line("functional in channels_last, p = 0.1", "formats", _LAST, "functional", "floor"),
    Line("the same", "formats", _LAST, "functional", "torchvision"),
    Line("functional in bfloat16, p = 0.1", "formats", _BFLOAT16, "functional", "floor"),
    Line("the same", "formats", _BFLOAT16, "functional", "torchvision"),
]
OTHERS = [
    Line("Dropout2d, p = 0.1", "others", "Dropout2d", "functional", "peer", "`F.dropout2d`"),
    Line("DropPath, p = 0.1", "others", "DropPath", "functional", "peer", "timm"),
    Line(
        "GaussianNoise, std = 0.1",
        "others",
        "GaussianNoise",
        "functional",
        "peer",
        "`x + std * torch.randn_like(x)`",
    ),
]
OBSERVERS = [
    Line("`ActivationStats`, forward", "observers", _OBSERVED, "ActivationStats", "floor"),
    Line("`Watchdog`, forward", "observers", _OBSERVED, "Watchdog", "floor"),
    Line("`Capture`, forward", "observers", _OBSERVED, "Capture", "floor"),
    Line(
        "`GradientStats`, forward and backward",
        "observers",
        "observed gradient",
        "GradientStats",
        "floor",
    ),
]
SHAPES = ("32x256x28x28", "32x1024x14x14")
SMALL = {
    "functional / floor": ("functional", "floor"),
    "functional / torchvision": ("functional", "torchvision"),
    "functional / timm": ("functional", "timm"),
    "`share_channels` / timm shared": ("share_channels", "timm shared"),
}
"""The columns of the table of small blocks: a variant, and its reference."""


@cache
def _measured(file: str) -> pd.DataFrame:
    """Return the rows of a file that have a ratio."""
    frame = pd.read_csv(FILES / f"{file}.csv")
    return frame[frame["ratio"].notna()]


def _rows_of(line: Line, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the measurements of a line: one for each shape."""
    is_it = (
        frame["work"].eq(line.work)
        & frame["variant"].eq(line.variant)
        & frame["reference"].eq(line.reference)
    )
    return frame[is_it]


def by_class(lines: Iterable[Line]) -> str:
    """Return a table with one row for each line and shape."""
    rows = ["| class | reference | ratio | shape |", "| --- | --- | --- | --- |"]
    for line in lines:
        rows += _class_rows(line, _measured(line.file))
    return "\n".join(rows)


def _class_rows(line: Line, frame: pd.DataFrame) -> list[str]:
    measured = _rows_of(line, frame)
    start = f"| {line.title} | {line.reference} |"
    if measured.empty:
        return [f"{start} {NOT_YET} | |"]

    rows = []
    for _, row in measured.iterrows():
        shape = "" if pd.isna(row["shape"]) else _title(row["shape"])
        rows.append(f"{start} {_cell(row)} | {shape} |")
    return rows


def by_shape(head: str, lines: Iterable[Line]) -> str:
    """Return a table with one row for each line, and one column for each of two shapes."""
    shapes = [_title(shape) for shape in SHAPES]
    rows = [f"| {head} | reference | {' | '.join(shapes)} |", "| --- | --- | --- | --- |"]
    for line in lines:
        measured = _rows_of(line, _measured(line.file)).set_index("shape")
        cells = [line.title, line.shown or line.reference]
        cells += [_cell(measured.loc[shape]) for shape in SHAPES]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def of_small_blocks() -> str:
    """Return a table with one row for each shape and block."""
    rows = [f"| p = 0.1 | {' | '.join(SMALL)} |", "| --- |" + " --- |" * len(SMALL)]
    frame = _measured("blocks")
    of_peers = frame[frame["work"].str.startswith(_RATE_10)]
    for (work, shape), measured in of_peers.groupby(["work", "shape"], sort=False):
        by_pair = measured.set_index(["variant", "reference"])
        cells = [f"{_title(shape)}, blocks of {work.split()[-1]}"]
        cells += [_cell(by_pair.loc[pair]) for pair in SMALL.values()]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def of_sites() -> str:
    """Return a table of the time of a site that does nothing, for three numbers of sites."""
    frame = _measured("sites").set_index(["work", "variant"])
    above = "in addition to the empty hook"
    lines = {
        "an empty forward hook, for each site": ("evaluation", "no-op hook - bare"),
        f"a site in evaluation mode, {above}": ("evaluation", "attached - no-op hook"),
        f"a site in training at a rate of 0, {above}": ("rate 0", "attached - no-op hook"),
    }
    rows = [
        "| sites on layers that do nothing | 1 site | 10 sites | 100 sites |",
        "| --- | --- | --- | --- |",
    ]
    for title, (state, variant) in lines.items():
        ratios = [frame.loc[(f"{state} of {n} sites", variant), "ratio"] for n in (1, 10, 100)]
        cells = [f"{_digits(ratio)} µs" for ratio in ratios]  # here a difference, not a ratio
        rows.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _attaching() -> str:
    """Return the times of `attach` and `remove` together."""
    frame = _measured("sites")
    texts = []
    for _, row in frame[frame["variant"].eq("attach and remove")].iterrows():
        words = [f"{int(word):,}" if word.isdigit() else word for word in row["work"].split()]
        texts.append(f"{_digits(1e3 * row['ratio'])} ms for {' '.join(words)}")
    return f"{', '.join(texts[:-1])}, and {texts[-1]}"


def _cell(row: pd.Series) -> str:
    """Return a median with its quartiles, such as `1.2 (0.91 to 12)`."""
    ratio, low, high = (_digits(row[name]) for name in ("ratio", "q25", "q75"))
    return f"{ratio} ({low} to {high})"


def _title(shape: str) -> str:
    return shape.replace("x", "×")


def _digits(number: float) -> str:
    """Write two digits of a number.

    Example:
        >>> _digits(0.6189), _digits(12.34), _digits(1.0), _digits(166.2)
        ('0.62', '12', '1.0', '170')
    """
    if abs(number) >= 100:
        return f"{float(f'{number:.1e}'):.0f}"
    return f"{number:#.2g}".removesuffix(".")


def _percent(number: float) -> str:
    """Write a share in percent, such as `0.22 %`."""
    percent = f"{100 * number:.2g}"
    if "e" in percent:
        percent = f"{float(percent):f}".rstrip("0")
    return f"{percent} %"


def _range(texts: Iterable[str]) -> str:
    """Return the smallest and the largest of some numbers, or one number.

    Example:
        >>> _range(["2.4", "1.7", "2"]), _range(["2", "2"])
        ('1.7 to 2.4', '2')
    """
    ordered = sorted(texts, key=lambda text: float(text.removesuffix(" %")))
    low = ordered[0]
    high = ordered[-1]
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def _select(
    files: Sequence[str], variant: str, reference: str = "floor", work: str = ""
) -> pd.DataFrame:
    """Return the measurements of a variant in some files, of works that begin with some words."""
    frame = pd.concat([_measured(file) for file in files])
    is_it = frame["variant"].eq(variant) & frame["reference"].eq(reference)
    return frame[is_it & frame["work"].str.startswith(work)]


def _faster(files: Sequence[str], work: str) -> str:
    """Return how many times faster this package is than torchvision."""
    rows = _select(files, "functional", "torchvision", work)
    return _range(_digits(1 / ratio) for ratio in rows["ratio"])


def _kept(file: str, variant: str, work: str) -> str:
    """Return the memory that is kept for the backward pass, as a share of the activation."""
    rows = _select([file], variant, work=work)
    return _range(_percent(share) for share in rows["kept"])


def _ratios(file: str, variant: str, reference: str = "floor", work: str = "") -> str:
    rows = _select([file], variant, reference, work)
    return _range(_digits(ratio) for ratio in rows["ratio"])


def _slower_by_default(file: str) -> str:
    """Return how many times longer this package takes than timm, each with its default."""
    ours = _select([file], "functional", work=_RATE_10)
    theirs = _select([file], "timm shared", work=_RATE_10)
    return _range(_digits(a / b) for a, b in zip(ours["ratio"], theirs["ratio"], strict=True))


def _kept_by_shape(variant: str) -> str:
    """Return the memory that a variant with one mask for all channels keeps, for both shapes."""
    rows = _select(["kernels"], variant, work=_RATE_10).set_index("shape")
    shares = [_percent(rows.loc[shape, "kept"]) for shape in SHAPES]
    return " and ".join(shares)


def blocks() -> dict[str, str]:
    """Return the text of each generated part, by name."""
    tables = {
        "drop_block": by_shape("DropBlock, blocks of 7", DROP_BLOCK),
        "small_blocks": of_small_blocks(),
        "others": by_shape("other regularizers, functional", OTHERS),
        "observers": by_shape("observers, in a call that they measure", OBSERVERS),
        "classes": by_class(LINES),
        "sites": of_sites(),
        "gpu_kernels": gpu_page.of_kernels(),
    }
    parts = {name: f"\n\n{table}\n\n" for name, table in tables.items()}
    return parts | {
        "faster": _faster(["kernels", "formats"], _RATE_10),
        "faster_small": _faster(["blocks"], _RATE_10),
        "slower_shared": _ratios("kernels", "share_channels", "timm shared"),
        "slower_shared_small": _ratios("blocks", "share_channels", "timm shared"),
        "slower_default": _slower_by_default("kernels"),
        "slower_default_small": _slower_by_default("blocks"),
        "kept_10": _kept("kernels", "functional", _RATE_10),
        "kept_50": _kept("kernels", "functional", _RATE_50),
        "kept_small": _kept("blocks", "functional", _RATE_10),
        "kept_timm": _kept_by_shape("timm shared"),
        "kept_shared": _kept_by_shape("share_channels"),
        "sample": _ratios("blocks", "sample", "batch"),
        "gpu_float32": _range(gpu_page.ratios("drop_block2d", "float32")),
        "gpu_bfloat16": _range(gpu_page.ratios("drop_block2d", "bfloat16")),
        "gpu_dropout2d": _range(gpu_page.ratios("dropout2d", "float32", "F.dropout2d")),
        "gpu_dropout2d_16": _range(gpu_page.ratios("dropout2d", "bfloat16", "F.dropout2d")),
        "gpu_dropout": _range(gpu_page.ratios("dropout", "float32", "F.dropout")),
        "gpu_dropout_16": _range(gpu_page.ratios("dropout", "bfloat16", "F.dropout")),
        "attaching": _attaching(),
        "cost": _ratios("kernels", "attached", work=_RATE_10),
        "cost_small": _ratios("blocks", "attached", work=_RATE_10),
        "outliers": _ratios("observers", "ActivationStats, outliers"),
        "cap": _ratios("others", "ClampActivation, cap"),
    }


def pages() -> dict[Path, str]:
    """Return the text of each page with new generated parts."""
    texts = blocks()
    elsewhere = {"cost", "cost_small", "outliers", "cap"}
    names_by_page = {PAGE: tuple(name for name in texts if name not in elsewhere)}
    names_by_page |= OF_OTHER_PAGES
    made = {}
    for path, names in names_by_page.items():
        of_page = {name: texts[name] for name in names}
        made[path] = insert(path.read_text(encoding="utf-8"), of_page)
    return made


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
