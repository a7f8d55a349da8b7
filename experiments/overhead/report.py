"""Rows of `overhead` as a table, a CSV file and plots, with the machine they are from."""

from __future__ import annotations

import csv
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch
from rich import box
from rich.table import Table

from experiments.overhead import BARS, Row


def machine(device: torch.device) -> str:
    """Processor, threads, versions."""
    found = [platform.processor() or platform.machine()]
    cpus = Path("/proc/cpuinfo")
    if cpus.is_file():
        lines = cpus.read_text().splitlines()
        found = [line.partition(": ")[2] for line in lines if line.startswith("model name")][
            :1
        ] or found
    lines = [f"processor  {found[0]}", f"threads    {torch.get_num_threads()}"]
    if device.type == "cuda":
        lines.append(f"device     {torch.cuda.get_device_name(device)}")
    return "\n".join([*lines, f"torch      {torch.__version__}"])


def table(rows: Sequence[Row]) -> Table:
    """One line per comparison, and whether a stated bar is missed."""
    view = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for name in ("work", "shape", "variant", "against"):
        view.add_column(name, overflow="fold")
    for name in ("ms", "ratio", "quartiles", "saved, %", "peak, MB", "bar", ""):
        view.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        view.add_row(
            row.setting,
            row.shape,
            row.variant,
            row.reference,
            f"{row.ms:.4g}",
            f"{row.ratio:.3g}",
            f"{row.q25:.3g} to {row.q75:.3g}",
            "" if row.saved is None else f"{100 * row.saved:.3g}",
            "" if row.peak_mb is None else f"{row.peak_mb:.3g}",
            _bars(row),
            "missed" if row.missed else "",
        )
    return view


def _bars(row: Row) -> str:
    """That of the ratio, and that of the saved bytes, where there are any."""
    ratio, saved = BARS.get(row.name), row.saved_bar
    texts = ["" if ratio is None else f"{ratio:.3g}", "" if saved is None else f"{saved:.1%}"]
    return ", ".join(text for text in texts if text)


def epochs(rows: Sequence[Row], steps: float) -> str:
    """What an epoch of so many steps takes, by model and variant."""
    return "\n".join(
        f"{row.work}, {row.variant}: {row.ms * steps / 1e3:.1f} s an epoch, "
        f"peak {row.peak_mb:.0f} MB, {row.ratio:.3f} of {row.reference}"
        for row in rows
    )


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """One line per row: its fields, its bars, and whether it misses one."""
    names = [field.name for field in fields(Row)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*names, "bar", "saved_bar", "missed"])
        writer.writeheader()
        for row in rows:
            bars = {"bar": BARS.get(row.name), "saved_bar": row.saved_bar, "missed": row.missed}
            writer.writerow(asdict(row) | bars)


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """One picture per reference: ratios with their quartiles, and the bars as ticks.

    Raises:
        ImportError: where matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    paths = []
    for reference in dict.fromkeys(row.reference for row in rows):
        chosen = [row for row in rows if row.reference == reference]
        figure = Figure(figsize=(10, 1.2 + 0.22 * len(chosen)), layout="constrained")
        axes = figure.subplots()
        places = range(len(chosen))
        ratios = [row.ratio for row in chosen]
        below = [row.ratio - row.q25 for row in chosen]
        above = [row.q75 - row.ratio for row in chosen]
        axes.barh(places, ratios, xerr=[below, above])
        barred = [(place, BARS[row.name]) for place, row in enumerate(chosen) if row.name in BARS]
        axes.plot([bar for _, bar in barred], [place for place, _ in barred], "k|", markersize=12)
        labels = [f"{row.setting}, {row.shape}: {row.variant}" for row in chosen]
        axes.set_yticks(places, labels, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel(f"cost / {reference}")
        path = folder / f"against_{reference.replace(' ', '_').replace('µ', 'u')}.png"
        figure.savefig(path, dpi=120)
        paths.append(path)
    return paths
