"""What came of a run: as `execute` tells it, and as anyone can read it from the run's directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.results import Result
from experiments.running.directories import Damaged, read_mapping, read_result

Status = Literal["finished", "diverged", "failed", "missing"]


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Args:
        status: finished or diverged, now or before; failed; missing: not run, not to the end, or
            damaged; of `execute` also stopped, with a checkpoint, or busy: another process has it.
        result: of a finished or diverged run.
        error: of a failed one, in words.
        failure: `id` of that failure.
        damaged: whether the directory is not as its runs left it; who has the claim sets it aside.
    """

    status: Status | Literal["stopped", "busy"]
    result: Result | None = None
    error: str | None = None
    failure: str | None = None
    damaged: bool = False

    def is_final(self, known: str | None) -> bool:
        """Whether nothing is left to do: a result is there, or a failure other than the known."""
        return self.result is not None or self.failure not in (None, known)


def look(directory: Path, run: str | None = None) -> Outcome:
    """What a run's directory tells, without a claim.

    Args:
        directory: of the run.
        run: its hash; by default the directory's name.
    """
    try:
        result = read_result(directory, run or directory.name)
    except Damaged:
        return Outcome("missing", damaged=True)
    if result is not None:
        return Outcome(result.status, result)
    error = read_mapping(directory / "error.json")
    if not error:
        return Outcome("missing")
    words = f"{error.get('type')}: {error.get('message')}"
    return Outcome("failed", error=words, failure=str(error.get("id")))
