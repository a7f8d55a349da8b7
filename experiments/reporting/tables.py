"""The rows of a summary as text, for the terminal, and as CSV files."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from experiments.reporting.statistics import Difference
from experiments.reporting.summary import Row, Score, compared, mean_rates


def one_line(text: str) -> str:
    r"""A name in one line: a newline is a blank.

    Example:
        >>> one_line("linear\nrising")
        'linear rising'
    """
    return " ".join(text.split())


def markdown(names: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A table in Markdown, of cells that are Markdown; the first column is of names."""
    rows = [names, ["---"] + ["---:" for _ in names[1:]], *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


def p_text(p: float) -> str:
    """A p-value as text, never rounded over .05.

    Example:
        >>> p_text(0.0312), p_text(0.0496), p_text(0.05), p_text(2e-6), p_text(1.0)
        ('.031', '.0496', '.05', '<.0001', '1')
    """
    if p < 1e-4:
        return "<.0001"
    text = f"{p:.2g}"
    if (float(text) < 0.05) != (p < 0.05):
        text = f"{p:.4f}".rstrip("0") if float(f"{p:.4f}") != 0.05 else "<.05"
    return text.removeprefix("0")


def percent(share: float, form: str = ".2f") -> str:
    """A share in percent; a tie is rounded alike, in whatever order its numbers were summed.

    Example:
        >>> percent(0.97925), percent(0.9792500000000001), percent(0.1, "+.1f")
        ('97.92', '97.92', '+10.0')
    """
    return f"{round(100 * share, 9):{form}}"


def accuracy_text(score: Score) -> str:
    """Mean and standard deviation in percent."""
    if score.mean is None:
        return ""
    spread = "" if score.std is None else f" ± {percent(score.std)}"
    return f"{percent(score.mean)}{spread}"


def difference_text(difference: Difference | None) -> str:
    """Mean and interval in percentage points."""
    if difference is None or difference.mean is None:
        return ""
    if difference.verdict == "identical":
        return "same scores"
    text = percent(difference.mean, "+.2f")
    if difference.verdict == "constant":
        text += " (constant)"
    if difference.interval is not None:
        low, high = difference.interval
        text += f" [{percent(low, '+.2f')}, {percent(high, '+.2f')}]"
    return text


def correlation_text(difference: Difference | None) -> str:
    """The correlation over seeds, where there is one."""
    found = None if difference is None else difference.correlation
    return "" if found is None else f"{found:+.2f}"


def detectable_text(difference: Difference | None) -> str:
    """What is found with 80 % chance, in percentage points."""
    found = None if difference is None else difference.detectable
    return "" if found is None else percent(found)


def holm_text(difference: Difference | None) -> str:
    """The corrected p, where there is one."""
    return "" if difference is None or difference.holm is None else p_text(difference.holm)


def table(rows: Sequence[Row], split: str = "clean") -> Table:
    """The rows as text: accuracies in percent, differences in percentage points, seconds a run."""
    view = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        caption=Text("; ".join(_repeated(row, split) for row in rows if row.repeats)) or None,
        caption_justify="left",
    )
    baseline = one_line(rows[0].baseline) if rows else "baseline"
    view.add_column("condition", overflow="fold")
    view.add_column("n", justify="right")
    view.add_column("accuracy, %", no_wrap=True)
    view.add_column(Text(f"minus {baseline} [95 %]"))
    view.add_column("Holm p")
    for name in ("rate", "realized", "s"):
        view.add_column(name, justify="right")
    for row in compared(rows):
        score = row.scores.get(split)
        found = None if score is None else score.difference
        view.add_row(
            Text(one_line(row.condition)),  # not markup: names may have brackets
            str(row.n if score is None else len(score.values)),
            "" if score is None else accuracy_text(score),
            Text(difference_text(found)),
            holm_text(found),
            "" if row.nominal is None else f"{row.nominal:.4f}",
            "" if row.realized is None else f"{row.realized:.4f}",
            "" if row.seconds is None else f"{row.seconds:.1f}",
        )
    return view


def _repeated(row: Row, split: str) -> str:
    """What an A/A check says, in a line below the table."""
    score = row.scores.get(split)
    found = None if score is None else score.difference
    text = difference_text(found) or "not run"
    p = "" if found is None or found.p is None else f", p {p_text(found.p)}"
    first = one_line(row.repeats or "")
    return f"{one_line(row.condition)} minus {first}, by chance: {text}{p} ({first}: their mean)"


def write_runs(rows: Sequence[Row], path: Path) -> None:
    """One line per run: condition, factors, seed, status, scores, rates, cost, error.

    `best_epoch`, counted from 1, `validation` and `best_` with a split's name are of the best epoch
    by validation, and empty without one.
    """
    factors, splits = _factors(rows), _splits(rows)
    lines = []
    for row in rows:
        for run in row.runs:
            result = run.result
            line: dict[str, object] = {"condition": row.condition, **_factor_cells(row)}
            line |= {"seed": run.seed, "status": run.status, "error": run.error}
            if result is not None:
                nominal, realized = mean_rates(result) or (None, None)
                line |= result.scores
                line |= {"test_loss": result.test_loss, "nominal": nominal, "realized": realized}
                line |= {"seconds": result.seconds, "memory": result.memory}
                if result.best is not None:
                    best = result.best
                    line |= {"best_epoch": best.epoch + 1, "validation": best.validation}
                    line |= {f"best_{split}": score for split, score in best.scores.items()}
                if result.epochs:
                    last = result.epochs[-1]
                    line |= {"train_loss": last.loss, "train_accuracy": last.accuracy}
            lines.append(line)
    names = ["condition", *factors, "seed", "status", *splits, "test_loss", "train_loss"]
    names += ["train_accuracy", "nominal", "realized", "seconds", "memory", "best_epoch"]
    names += ["validation", *(f"best_{split}" for split in splits), "error"]
    _write(lines, names, path)


def write_summary(rows: Sequence[Row], path: Path) -> None:
    """One line per condition: of each split mean, std, difference, interval and p; rates, cost.

    A condition that others repeat has the mean over all of them; its replicas have their own.
    """
    parts = ("mean", "std", "pairs", "difference", "low", "high", "p", "holm_p")
    names = ["condition", *_factors(rows), "repeats", "n"]
    names += [f"{split}_{part}" for split in _splits(rows) for part in parts]
    names += ["nominal", "realized", "seconds", "seconds_ratio", "memory", "memory_ratio"]
    lines = []
    for row in rows:
        line: dict[str, object] = {"condition": row.condition, **_factor_cells(row)}
        line |= {"repeats": row.repeats, "n": row.n}
        for split, score in row.scores.items():
            cells: list[object] = [score.mean, score.std]
            if (found := score.difference) is not None:
                ends = found.interval or (None, None)
                corrected = None if row.repeats else found.holm
                cells += [found.n, found.mean, *ends, found.p, corrected]
            line |= {f"{split}_{part}": cell for part, cell in zip(parts, cells, strict=False)}
        line |= {name: getattr(row, name) for name in names[-6:]}
        lines.append(line)
    _write(lines, names, path)


def _write(lines: list[dict[str, object]], names: list[str], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def _factors(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(f"factor_{name}" for row in rows for name in row.factors))


def _factor_cells(row: Row) -> dict[str, str]:
    return {f"factor_{name}": level for name, level in row.factors.items()}


def _splits(rows: Sequence[Row]) -> list[str]:
    return list(rows[0].scores) if rows else []
