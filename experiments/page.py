"""The generated parts of the page of findings, and of the README of the project.

python -m experiments.page      # writes them anew from experiments/results
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from experiments.plots import forest, save
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
    both, frame = of_both(), pd.concat(frame for _, frame in STUDIES.values())
    primary = pd.concat(table[table["primary"]] for table in COMPARED.values())
    halves = (primary["high"] - primary["low"])[primary["test"] == "occluded"] / 2
    open_ = int((primary["word"] == "open").sum())
    return {
        "verdict": "; ".join(map(_counted, ("DropBlock2d", "Dropout2d", "DropPath"))),
        "nothing": _of_each(_pair, "DropBlock2d", "none"),
        "against": _of_each(_pair, "DropBlock2d", "Dropout2d"),
        "rate": _of_each(_tried, "rate"),
        "schedule": _how("constant", "second half"),
        "size": _how("block 1", "block 5", "block 7"),
        "lr": _of_each(_tried, "lr"),
        "sure": f"{both['n'].min()} seeds. {open_} of {len(primary)} primary comparisons are open. "
        f"On occluded images, differences below {halves.min():.0f} to {halves.max():.0f} points "
        "can't be seen",
        "table": f"\n\n{difference_table(both, frame)}\n\n",
    }


def of_both() -> pd.DataFrame:
    """The comparisons of both networks, one below the other."""
    tables = ((network, COMPARED[name]) for name, network in NETWORKS.items())
    return pd.concat(table.assign(a=f"{network}: " + table["a"]) for network, table in tables)


def _counted(regularizer: str) -> str:
    """How many primary tests of both networks are better and worse than without a regularizer."""
    rows = of_both().query(f"primary and b == 'none' and a.str.endswith(': {regularizer}')")
    better, worse = ((rows["word"] == word).sum() for word in ("better", "worse"))
    return f"{regularizer} better in {better} and worse in {worse} of {len(rows)}"


def _of_each(text: Callable[..., str], *args: str) -> str:
    """A text for each network."""
    return "; ".join(f"{network}: {text(name, *args)}" for name, network in NETWORKS.items())


def _pair(name: str, a: str, b: str) -> str:
    """Differences on primary tests, such as `clean +0.29 [-0.16, +0.73] same`."""
    rows = COMPARED[name].query("primary and a == @a and b == @b")
    return ", ".join(f"{row['test']} {cell(row)} {row['word']}" for _, row in rows.iterrows())


def _how(*names: str) -> str:
    """Conditions of the study *how* against its first."""
    return "; ".join(f"{name}: {_pair('how', name, 'rising, block 3')}" for name in names)


def _tried(name: str, field: str) -> str:
    """What the searches for DropBlock2d found on the validation set, by rate or learning rate."""
    tables = (pd.read_csv(RESULTS / name / f"{each}.csv") for each in ("rates", "lrs"))
    rates, lrs = (table.query("condition == 'DropBlock2d'") for table in tables)
    same = rates.head(1).assign(lr=STUDIES[name][0].conditions["none"].lr)
    found = (rates if field == "rate" else pd.concat([lrs, same])).sort_values(field)
    return ", ".join(f"{row['mean']:.1%} with {row[field]:g}" for row in found.to_dict("records"))


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
