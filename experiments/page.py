"""The generated parts of the page of findings, of the README, and of pages in `docs`.

python -m experiments.page      # writes them anew from experiments/results
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.config import Run
from experiments.data import load_data
from experiments.data.canvas import CLASSES, COPIES
from experiments.plots import COLORS, forest, samples, save
from experiments.report import cell, difference_table, insert, read_report
from experiments.stats import compare
from experiments.study import Study

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results"
NETWORKS = {"main-resnet": "ResNet", "main-inception": "InceptionNeXt"}
SIGNS = {"better": "▲", "worse": "▼", "same": "=", "open": "?"}
OF_OTHERS = {
    ROOT / "README.md": ("results", "with_simpler"),
    ROOT / "docs/guide/choosing.md": ("with_none", "with_simpler", "seeds_small", "small_study"),
    ROOT / "docs/guide/faq.md": ("epochs",),
}
"""The parts of other pages than the page of findings, which has the rest."""


@cache
def _report(name: str) -> tuple[Study, pd.DataFrame]:
    """Return the study of a report, and its runs."""
    study, frame, _ = read_report(RESULTS / name)
    return study, frame


@cache
def _compared(name: str) -> pd.DataFrame:
    """Return the comparisons of a report."""
    study, frame = _report(name)
    return compare(frame, study)


def blocks() -> dict[str, str]:
    """Return the text of each generated part, by name."""
    both = of_both()
    against_none = both[both["primary"] & (both["b"] == "none")]
    verdicts = []
    for regularizer in ("DropBlock2d", "Dropout2d", "DropPath"):
        rows = against_none[against_none["a"].str.endswith(regularizer)]
        verdicts.append(f"{regularizer}: {_words(rows)}")

    how = _compared("how")
    of_how = how[how["primary"]]
    is_size = of_how["a"].str.startswith("block")

    titles = {**NETWORKS, "how": "schedules and blocks"}
    certainties = [f"{title}: {_certainty(name)}" for name, title in titles.items()]

    _, frame_of_how = _report("how")
    against_simpler = both[
        both["primary"] & (both["b"] == "Dropout2d") & both["a"].str.endswith("DropBlock2d")
    ]
    with_none = against_none[against_none["a"].str.endswith("DropBlock2d")]
    _, frame_of_quick = _report("quick")

    return {
        "results": f"\n\n{_results(against_none)}\n\n",
        "with_none": _words(with_none),
        "with_simpler": _words(against_simpler),
        "seeds_small": f"{frame_of_quick['seed'].nunique()} seeds",
        "small_study": f"\n\n{_differences('quick')}\n\n",
        "epochs": " and ".join(f"{_slower(name)} ({title})" for name, title in NETWORKS.items()),
        "verdict": "; ".join(verdicts),
        "nothing": _for_each(lambda name: _pair(name, "DropBlock2d", "none")),
        "against": _for_each(lambda name: _pair(name, "DropBlock2d", "Dropout2d")),
        "rate": _for_each(_rates),
        "schedule": _words(of_how[~is_size]),
        "size": _words(of_how[is_size]),
        "lr": _for_each(_learning_rates),
        "baseline": _for_each(_baseline),
        "sure": "; ".join(certainties),
        "table": f"\n\n{difference_table(both, frame_of_how)}\n\n",
    }


def of_both() -> pd.DataFrame:
    """Return the comparisons of both networks, one below the other."""
    tables = []
    for name, network in NETWORKS.items():
        table = _compared(name)
        tables.append(table.assign(a=f"{network}: " + table["a"]))
    return pd.concat(tables)


def _results(rows: pd.DataFrame) -> str:
    """Return a sign for each regularizer, network and test: better, worse, same or open."""
    tests = list(dict.fromkeys(rows["test"]))
    columns = [(network, test) for network in NETWORKS.values() for test in tests]
    heads = [f"{network}, {test}" for network, test in columns]
    lines = [f"| | {' | '.join(heads)} |", "| --- |" + " :---: |" * len(columns)]
    words = rows.set_index(["a", "test"])["word"]
    for regularizer in ("DropBlock2d", "Dropout2d", "DropPath"):
        cells = [SIGNS[words[f"{network}: {regularizer}", test]] for network, test in columns]
        lines.append(f"| {regularizer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _words(rows: pd.DataFrame) -> str:
    """Return how many comparisons have each verdict."""
    counts = rows["word"].value_counts()
    return ", ".join(f"{counts[word]} {word}" for word in COLORS if word in counts)


def _for_each(text_of: Callable[[str], str]) -> str:
    """Return the text of each network's study, behind the name of the network."""
    texts = [f"{network}: {text_of(name)}" for name, network in NETWORKS.items()]
    return "; ".join(texts)


def _pair(name: str, a: str, b: str) -> str:
    """Return differences on primary tests, such as `clean +0.29 [-0.16, +0.73] same`."""
    rows = _compared(name).query("primary and a == @a and b == @b")
    texts = [f"{row['test']} {cell(row)} {row['word']}" for _, row in rows.iterrows()]
    return ", ".join(texts)


def _differences(name: str) -> str:
    """Return a table of all primary differences, with their intervals and verdicts."""
    lines = ["| comparison | difference | 95 % interval | result |", "| --- | ---: | ---: | --- |"]
    for _, row in _compared(name).query("primary").iterrows():
        pair = f"{row['a']} − {row['b']}"
        interval = f"[{row['low']:+.2f}, {row['high']:+.2f}]"
        lines.append(f"| {pair} | {row['difference']:+.2f} | {interval} | {row['word']} |")
    return "\n".join(lines)


def _slower(name: str) -> str:
    """Return how many times longer an epoch takes with DropBlock2d than without."""
    _, frame = _report(name)
    seconds = frame[frame["status"] == "finished"].groupby("condition")["seconds"].median()
    return f"{seconds['DropBlock2d'] / seconds['none']:.2f}"


def _baseline(name: str) -> str:
    """Return the accuracy without a regularizer on the primary tests."""
    _, frame = _report(name)
    runs = frame[frame["condition"] == "none"]
    return ", ".join(f"{test} {runs[test].mean():.1%}" for test in ("clean", "occluded"))


def _rates(name: str) -> str:
    """Return the rates that the search for DropBlock2d tried, with their validation accuracy."""
    return _tried(_searched(name, "rates"), "rate")


def _learning_rates(name: str) -> str:
    """Return the learning rate of the study, and the others that were tried at the best rate."""
    study, _ = _report(name)
    used = _searched(name, "rates").head(1).assign(lr=study.conditions["none"].lr)
    return _tried(pd.concat([used, _searched(name, "lrs")]), "lr")


def _searched(name: str, table: str) -> pd.DataFrame:
    """Return the candidates of a search for DropBlock2d, the best first."""
    return pd.read_csv(RESULTS / name / f"{table}.csv").query("condition == 'DropBlock2d'")


def _tried(candidates: pd.DataFrame, field: str) -> str:
    """Return the values of a field, with their validation accuracy."""
    rows = candidates.to_dict("records")
    return ", ".join(f"{row[field]:g} ({row['mean']:.1%})" for row in rows)


def _certainty(name: str) -> str:
    """Return the number of seeds, and half the width of the intervals on occluded images."""
    rows = _compared(name).query("primary and test == 'occluded'")
    halves = (rows["high"] - rows["low"]) / 2
    return f"{rows['n'].min()} seeds, ±{halves.min():.0f} to {halves.max():.0f} points"


def pages() -> dict[Path, str]:
    """Return the text of each page with new generated parts."""
    texts = blocks()
    elsewhere = {name for names in OF_OTHERS.values() for name in names}
    of_findings = tuple(name for name in texts if name not in elsewhere)
    names_by_page = {ROOT / "experiments/README.md": of_findings, **OF_OTHERS}
    made = {}
    for path, names in names_by_page.items():
        of_page = {name: texts[name] for name in names}
        made[path] = insert(path.read_text(encoding="utf-8"), of_page)
    return made


def canvases() -> Figure:
    """An image of each class from each test of `canvas`. Of the occluded ones, digits differ."""
    images = {}
    for name, test in load_data(Run(data="canvas", data_args={"train_images": 20})).tests.items():
        numbers = list(range(CLASSES))
        if name == "occluded":
            numbers = [COPIES * label + label % COPIES for label in numbers]
        images[name] = [test[number][0] for number in numbers]
    return samples(images)


if __name__ == "__main__":
    save(forest(of_both()), RESULTS / "forest.png")
    save(canvases(), RESULTS / "canvas.png")
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
