"""What a report reads of a study (a stand-in until the run directories are there)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.config import Config, Result


@dataclass(frozen=True)
class Run:
    """One condition with one seed."""

    condition: str
    factors: dict[str, str]
    seed: int
    config: Config
    status: str
    result: Result | None
    environment: dict
    error: str | None


@dataclass(frozen=True)
class StudyRecord:
    """What was asked."""

    name: str
    question: str
    command: str
    baseline: str
    seeds: tuple[int, ...]
    conditions: dict[str, dict[str, str]]


def read_runs(directory: Path) -> tuple[StudyRecord, list[Run]]:
    """Read a study's directory."""
    raise ValueError(f"{directory} is no study")
