"""The generated parts of the page of findings, and of the README of the project.

python -m experiments.page      # writes them anew from experiments/results
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.report import cell, difference_table, insert, read_report
from experiments.stats import compare
from experiments.study import Study

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results"
NETWORKS = {"resnet": "ResNet", "inception": "InceptionNeXt"}
PAGES = {
    ROOT / "experiments/README.md": (
        "networks", "occluded", "clean", "against", "other", "inception", "sure", "table",
    ),
    ROOT / "README.md": ("occluded", "clean", "against"),
}  # fmt: skip


def blocks() -> dict[str, str]:
    """The text of each generated part, by name."""
    studies = {name: read_report(RESULTS / name)[:2] for name in NETWORKS}
    compared = {name: compare(frame, study) for name, (study, frame) in studies.items()}
    resnet, inception = compared["resnet"], compared["inception"]
    primary = pd.concat([table[table["primary"]] for table in compared.values()])
    shown = int((primary["word"] != "open").sum())
    halves = (primary["high"] - primary["low"])[primary["test"] == "occluded"] / 2
    return {
        "networks": "; ".join(_network(name, *study) for name, study in studies.items()) + ".",
        "occluded": _pair(resnet, "DropBlock2d", "none", "occluded"),
        "clean": _pair(resnet, "DropBlock2d", "none", "clean"),
        "against": _pair(resnet, "DropBlock2d", "Dropout2d", "occluded"),
        "other": "; ".join(
            _pair(resnet, "DropBlock2d", "Dropout2d", test) for test in ("clutter", "noisy")
        ),
        "inception": "; ".join(
            _pair(inception, f"DropBlock2d, {of}", f"none, {of}", "clean")
            for of in ("of none", "of DropBlock2d")
        ),
        "sure": f"{shown} of {len(primary)} primary comparisons are decided. On occluded images, "
        f"differences below {halves.min():.0f} to {halves.max():.0f} points can't be seen",
        "table": "\n\n" + "\n\n".join(
            f"{NETWORKS[name]}:\n\n{difference_table(compared[name], studies[name][1])}"
            for name in NETWORKS
        ) + "\n\n",
    }  # fmt: skip


def _network(name: str, study: Study, frame: pd.DataFrame) -> str:
    epochs = next(iter(study.conditions.values())).epochs
    return f"{NETWORKS[name]}, {frame['seed'].nunique()} seeds, {epochs} epochs"


def _pair(compared: pd.DataFrame, a: str, b: str, test: str) -> str:
    """A difference in words and numbers, such as `same, +0.29 [-0.16, +0.73]`."""
    rows = compared[(compared["a"] == a) & (compared["b"] == b) & (compared["test"] == test)]
    return f"{rows.iloc[0]['word']}, {cell(rows.iloc[0])}"


def pages() -> dict[Path, str]:
    """Each page as it should be."""
    made = blocks()
    return {
        path: insert(path.read_text(encoding="utf-8"), {name: made[name] for name in names})
        for path, names in PAGES.items()
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
