"""Functions that the commands in `scripts` share: options, progress, and the report of a study."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from experiments.checkpoint import write_whole
from experiments.engine import default_jobs, launch, launch_on_ray
from experiments.report import settings_of, write_report
from experiments.runs import RunFolder, folders_of
from experiments.stats import epochs_of, frame_of
from experiments.study import Study

if TYPE_CHECKING:
    from experiments.search import Found


def changes_of(texts: Sequence[str]) -> dict[str, Any]:
    """Return the fields and values of `--set FIELD=VALUE`; values are YAML.

    Example:
        >>> changes_of(["epochs=90", "data_args.root=/data"])
        {'epochs': 90, 'data_args.root': '/data'}

    Raises:
        ValueError: if a text has no `=`.
    """
    changes = {}
    for text in texts:
        field, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set takes FIELD=VALUE, such as epochs=90, got {text!r}")
        changes[field] = yaml.safe_load(value)
    return changes


def seeds_of(text: str | None) -> list[int] | None:
    """Return the seeds of `--seeds`; None if the option is missing.

    Example:
        >>> seeds_of("1-3,7")
        [1, 2, 3, 7]

    Raises:
        ValueError: if the text is not of this form.
    """
    if text is None:
        return None

    seeds: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            seeds += range(int(first), int(last or first) + 1)
    except ValueError:
        raise ValueError(f"--seeds takes seeds such as 1-6 or 1,4, got {text!r}") from None
    return seeds


class Progress:
    """Shows how far a study is: a bar in a terminal, otherwise a line for each run that ended.

    Args:
        names: the names of the conditions of the runs.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.ended: set[int] = set()
        self.console = Console(stderr=True)
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("runs", total=len(names))

    def __call__(self, folders: Sequence[RunFolder]) -> None:
        """Show the runs that have ended since the last call."""
        self.bar.start()
        for index, folder in enumerate(folders):
            if index in self.ended:
                continue
            status = folder.status
            if status == "open":
                continue

            self.ended.add(index)
            self.bar.update(self.task, completed=len(self.ended))
            if not self.console.is_terminal or status != "finished":
                count = f"{len(self.ended)} of {len(folders)}"
                run = f"{self.names[index]}, seed {folder.run.seed}"
                line = f"{count}: {run}: {status}{_detail(folder)}"
                self.console.print(line, highlight=False, soft_wrap=True)

        if len(self.ended) == len(folders):
            self.bar.stop()


def _detail(folder: RunFolder) -> str:
    """Return the scores of a run, or the reason of its failure."""
    result = folder.result()
    scores = result.scores if result else {}
    listed = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
    detail = listed or folder.error()
    return f": {detail}" if detail else ""


def run_all_with(options: argparse.Namespace, study: Study) -> Callable[..., None]:
    """Return a function that trains runs by the options until all are settled.

    Failed runs are tried again, once for each start of the command.

    Raises:
        ValueError: if `--jobs` is below 1.
    """
    if options.jobs is not None and options.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {options.jobs}")

    def run_all(folders: Sequence[RunFolder], names: Sequence[str]) -> None:
        if not folders:
            return
        for folder in folders:
            # an open run may have noted that its process died
            if folder.status in ("failed", "open"):
                folder.forget_failure()

        progress = Progress(names)
        try:
            _launch(options, study, folders, lambda: progress(folders))
        finally:
            progress.bar.stop()

    return run_all


def _launch(
    options: argparse.Namespace,
    study: Study,
    folders: Sequence[RunFolder],
    on_progress: Callable[[], None],
) -> None:
    """Train runs until all are settled, on Ray or on this machine."""
    score_tests = not options.search
    if options.ray:
        launch_on_ray(
            folders,
            address=options.ray,
            jobs=options.jobs,
            imports=study.path.parent,
            on_progress=on_progress,
            workers=options.workers,
            tests=score_tests,
        )
        return

    jobs = options.jobs or default_jobs(folders[0].run.threads)
    launch(
        folders,
        jobs=min(jobs, len(folders)),
        on_progress=on_progress,
        workers=options.workers,
        tests=score_tests,
    )


SOURCE = "source.txt"


def begin_report(study: Study, folder: Path) -> None:
    """Write the study into the folder of its report, which can then be made at any time.

    Raises:
        ValueError: if the folder has the report of another study file.
    """
    note = folder / SOURCE
    if note.exists():
        other = Path(note.read_text(encoding="utf-8"))
        if other != study.path and other.exists():
            raise ValueError(
                f"{folder} has the report of {other}: rename {study.path}, or give another --out"
            )

    folder.mkdir(parents=True, exist_ok=True)
    write_whole(note, str(study.path).encode())
    write_whole(folder / "study.yaml", settings_of(study).encode())


def imports_of(folder: Path) -> Path:
    """Return the folder of the study file of a report, from which its factories are imported."""
    note = folder / SOURCE
    if not note.exists():
        return Path.cwd()
    return Path(note.read_text(encoding="utf-8")).parent


def report(study: Study, folder: Path, pool: Path) -> int:
    """Write the report from the runs, print it, and return 0, or 3 where runs are missing."""
    folders = folders_of(study, pool)
    frame = frame_of(folders)
    path = write_report(folder, study, frame, epochs_of(folders), mixed_versions(folders))
    return show(path, frame)


def show(path: Path, frame: pd.DataFrame) -> int:
    """Print a report up to its settings, and its path; return 0, or 3 where runs are missing."""
    text = path.read_text(encoding="utf-8").partition("## Settings")[0]
    lines = [line for line in text.splitlines() if not line.startswith("![")]

    width = None if sys.stdout.isatty() else 150
    Console(width=width).print(Markdown("\n".join(lines)))
    print(path)

    complete = (frame["status"] == "finished").all()
    return 0 if complete else 3


def mixed_versions(folders: Sequence[tuple[str, RunFolder]]) -> str:
    """Return a warning if runs have different versions or devices, otherwise an empty text."""
    notes: list[dict[str, Any]] = []
    for _, folder in folders:
        notes += folder.attempts()[-1:]
    versions = pd.DataFrame(notes).drop(columns=["epochs", "began", "host"], errors="ignore")

    mixed = []
    for name, column in versions.items():
        if column.nunique() > 1:
            listed = ", ".join(sorted(column.dropna().unique()))
            mixed.append(f"{name} {listed}")
    if not mixed:
        return ""
    return f"**Versions or devices of the runs differ:** {'; '.join(mixed)}."


def searched(study: Study, results: Sequence[Found], folder: Path) -> str:
    """Write the choices of a search beside the study, and all candidates into a folder.

    Returns:
        The text to print.
    """
    target = study.path.with_name(f"{study.name}.chosen.yaml")
    write_whole(target, _choices(study, results).encode())

    tables = [result.table.assign(condition=result.condition) for result in results if result.runs]
    if tables:
        write_whole(folder / "search.csv", pd.concat(tables).to_csv(index=False).encode())

    texts = []
    for result in results:
        table = result.table.to_string(index=False)
        texts.append(f"{result.condition}: {result.sentence}\n{table}")
    return "\n\n".join([*texts, f"{target}"])


def _choices(study: Study, results: Sequence[Found]) -> str:
    """Return the best values of each condition as YAML, with the runs and sentences as comments."""
    lines = [
        f"# The choices of a search, by the validation set. {study.path.name} reads this file."
    ]
    lines += [f"# {result.condition}: {result.runs} runs; {result.sentence}" for result in results]
    comments = "\n".join(lines)

    best = {result.condition: result.best for result in results if result.best}
    return f"{comments}\n{yaml.safe_dump(best, sort_keys=False, allow_unicode=True)}"
