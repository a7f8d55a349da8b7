"""The part of a report that says what it cost: seconds, memory, runs at once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from experiments.reporting.findings import counted, escape
from experiments.reporting.summary import Row
from experiments.reporting.tables import markdown
from experiments.running.directories import environments
from experiments.running.records import Run

NOTE = (
    "Means over the seeds; ratios are over those that have a finished run of {}, too. Unlike the "
    "rest of this report, these numbers depend on what else the machine did. Memory is the most "
    "that a process held at a time, all that it had loaded included; on a GPU, that torch "
    "allocated there."
)


def cost(rows: Sequence[Row]) -> list[str]:
    """Seconds and memory of each condition, how they are to be read, and the first start."""
    note = [NOTE.format(escape(rows[0].baseline)), *_at_once(rows), *_begun(rows)]
    return [_cost_table(rows), " ".join(note)]


def _cost_table(rows: Sequence[Row]) -> str:
    base = escape(rows[0].baseline)
    lines = [
        (
            escape(row.condition),
            f"{row.seconds:.1f}",
            f"{row.seconds / row.config.epochs:.2f}",
            _number(row.seconds_ratio),
            f"{row.memory / 1e6:.0f}",
            _number(row.memory_ratio),
        )
        for row in rows
        if row.seconds is not None and row.memory is not None
    ]
    names = ("condition", "s a run", "s an epoch", f"ratio to {base}", "MB", f"ratio to {base}")
    return markdown(names, lines)


def _at_once(rows: Sequence[Row]) -> list[str]:
    """How many runs were at work at once, where that is known."""
    number = most_at_once([run for row in rows for run in row.runs])
    if number is None:
        return []
    return [
        f"By their starts and seconds, at most {counted(number, 'run')} of this study "
        f"{'was' if number == 1 else 'were'} at work at once on one machine."
    ]


def _begun(rows: Sequence[Row]) -> list[str]:
    """When the first run was begun, where that is known."""
    runs = [run for row in rows for run in row.runs]
    starts = [each.get("started") for run in runs for each in environments(run.environment)]
    known = [start for start in starts if isinstance(start, str)]
    return [f"The first run was begun {escape(min(known))}."] if known else []


def most_at_once(runs: Sequence[Run]) -> int | None:
    """The most runs that were at work at once on one host; None if a run's time is not known.

    Starts are recorded in whole seconds, so one run may seem to begin when the one before is not
    quite over: overlaps of less than a second do not count. When a run that was resumed was at
    work, and until when one that failed was, is not recorded.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        if not run.environment and run.result is None:
            continue  # never begun
        attempts = run.environment.get("attempts", [])
        if run.result is None or len(attempts) != 1:
            return None
        try:
            begin = datetime.fromisoformat(attempts[0]["started"]).timestamp()
            host = attempts[0]["host"]
        except (KeyError, TypeError, ValueError):
            return None
        spans.setdefault(host, []).append((begin, begin + max(run.result.seconds - 1, 0)))
    counts = [
        sum(begin <= moment <= end for begin, end in of_host)
        for of_host in spans.values()
        for moment, _ in of_host
    ]
    return max(counts, default=None)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
