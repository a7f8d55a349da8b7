"""The generated parts of the page of findings, and of the README of the project.

python -m experiments.page      # writes them anew from experiments/results
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from experiments.plots import COLORS, forest, save
from experiments.report import cell, difference_table, insert, read_report
from experiments.stats import compare

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results"
NETWORKS = {"main-resnet": "ResNet", "main-inception": "InceptionNeXt"}
STUDIES = {name: read_report(RESULTS / name)[:2] for name in (*NETWORKS, "how")}
COMPARED = {name: compare(frame, study) for name, (study, frame) in STUDIES.items()}
PAGES = {
    ROOT / "experiments/README.md": None,
    ROOT / "README.md": ("verdict", "nothing", "against"),
}


def blocks() -> dict[str, str]:
    """The text of each generated part, by name."""
    both, how = of_both(), COMPARED["how"]
    against_none = both[both["primary"] & (both["b"] == "none")]
    studies = {**NETWORKS, "how": "schedules and blocks"}
    return {
        "verdict": "; ".join(
            f"{name}: {_words(against_none[against_none['a'].str.endswith(name)])}"
            for name in ("DropBlock2d", "Dropout2d", "DropPath")
        ),
        "nothing": _of_each(_pair, "DropBlock2d", "none"),
        "against": _of_each(_pair, "DropBlock2d", "Dropout2d"),
        "rate": _of_each(_tried, "rate"),
        "schedule": _words(how[how["primary"] & ~how["a"].str.startswith("block")]),
        "size": _words(how[how["primary"] & how["a"].str.startswith("block")]),
        "lr": _of_each(_tried, "lr"),
        "baseline": _of_each(_baseline),
        "sure": "; ".join(f"{title}: {_certainty(name)}" for name, title in studies.items()),
        "table": f"\n\n{difference_table(both, STUDIES['how'][1])}\n\n",
    }


def of_both() -> pd.DataFrame:
    """The comparisons of both networks, one below the other."""
    tables = ((network, COMPARED[name]) for name, network in NETWORKS.items())
    return pd.concat(table.assign(a=f"{network}: " + table["a"]) for network, table in tables)


def _words(rows: pd.DataFrame) -> str:
    """How many comparisons have each verdict."""
    counts = {word: (rows["word"] == word).sum() for word in COLORS}
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def _of_each(text: Callable[..., str], *args: str) -> str:
    """A text for each network."""
    return "; ".join(f"{network}: {text(name, *args)}" for name, network in NETWORKS.items())


def _pair(name: str, a: str, b: str) -> str:
    """Differences on primary tests, such as `clean +0.29 [-0.16, +0.73] same`."""
    rows = COMPARED[name].query("primary and a == @a and b == @b")
    return ", ".join(f"{row['test']} {cell(row)} {row['word']}" for _, row in rows.iterrows())


def _baseline(name: str) -> str:
    means = STUDIES[name][1].query("condition == 'none'")[["clean", "occluded"]].mean()
    return ", ".join(f"{test} {mean:.1%}" for test, mean in means.items())


def _tried(name: str, field: str) -> str:
    """What the searches for DropBlock2d found on the validation set, by rate or learning rate."""
    tables = (pd.read_csv(RESULTS / name / f"{each}.csv") for each in ("rates", "lrs"))
    rates, lrs = (table.query("condition == 'DropBlock2d'") for table in tables)
    used = rates.head(1).assign(lr=STUDIES[name][0].conditions["none"].lr)
    found = rates if field == "rate" else pd.concat([used, lrs])
    return ", ".join(f"{row[field]:g} ({row['mean']:.1%})" for row in found.to_dict("records"))


def _certainty(name: str) -> str:
    rows = COMPARED[name].query("primary and test == 'occluded'")
    halves = (rows["high"] - rows["low"]) / 2
    return f"{rows['n'].min()} seeds, ±{halves.min():.0f} to {halves.max():.0f} points"


def pages() -> dict[Path, str]:
    """Each page as it should be."""
    made = blocks()
    return {
        path: insert(path.read_text(encoding="utf-8"), {name: made[name] for name in names or made})
        for path, names in PAGES.items()
    }


if __name__ == "__main__":
    save(forest(of_both()), RESULTS / "forest.png")
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
