"""Functions that the commands in `scripts` share: options, progress, and the report of a study."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
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
    """Fields and values of `--set FIELD=VALUE`; values are YAML.

    Example:
        >>> changes_of(["epochs=90", "data_args.root=/data"])
        {'epochs': 90, 'data_args.root': '/data'}

    Raises:
        ValueError: if a text has no `=`.
    """
    for text in texts:
        if "=" not in text:
            raise ValueError(f"--set takes FIELD=VALUE, such as epochs=90, got {text!r}")
    pairs = (text.partition("=") for text in texts)
    return {name: yaml.safe_load(value) for name, _, value in pairs}


def seeds_of(text: str | None) -> list[int] | None:
    """Seeds of `--seeds`.

    Example:
        >>> seeds_of("1-3,7")
        [1, 2, 3, 7]

    Raises:
        ValueError: if the text is not of this form.
    """
    if text is None:
        return None
    parts = [part.partition("-") for part in text.split(",")]
    try:
        return [n for low, _, high in parts for n in range(int(low), int(high or low) + 1)]
    except ValueError:
        raise ValueError(f"--seeds takes seeds such as 1-6 or 1,4, got {text!r}") from None


class Progress:
    """Shows how far a study is: a bar in a terminal, otherwise a line for each run that ended.

    Args:
        names: of the conditions of the runs.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.ended = names, set[int]()
        self.console = Console(stderr=True)
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        text = TextColumn("{task.description}")
        self.bar = Bar(text, *columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("runs", total=len(names))

    def __call__(self, folders: Sequence[RunFolder]) -> None:
        """Show the runs that have ended since the last call."""
        self.bar.start()
        for index, folder in enumerate(folders):
            if index in self.ended or (status := folder.status) == "open":
                continue
            self.ended.add(index)
            self.bar.update(self.task, completed=len(self.ended))
            if not self.console.is_terminal or status != "finished":
                done = f"{len(self.ended)} of {len(folders)}"
                line = f"{done}: {self.names[index]}, seed {folder.run.seed}: {status}"
                self.console.print(f"{line}{_detail(folder)}", highlight=False, soft_wrap=True)
        if len(self.ended) == len(folders):
            self.bar.stop()


def _detail(folder: RunFolder) -> str:
    result = folder.result()
    scores = result.scores if result else {}
    shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
    return f": {shown or folder.error()}" if shown or folder.error() else ""


def run_all_with(options: argparse.Namespace, study: Study) -> Callable[..., None]:
    """A function that trains runs until all are settled, as the options say.

    Failed runs are tried again, once for each start of the command.
    """
    if options.jobs is not None and options.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {options.jobs}")

    def run_all(folders: Sequence[RunFolder], names: Sequence[str]) -> None:
        if not folders:
            return
        for folder in folders:
            if folder.status in ("failed", "open"):
                folder.forget_failure()
        shown = Progress(names)
        work = {"workers": options.workers, "tests": not options.search}
        try:
            if options.ray:
                imports = study.path.parent
                launch_on_ray(
                    folders, options.ray, options.jobs, imports, lambda: shown(folders), **work
                )
            else:
                jobs = min(options.jobs or default_jobs(folders[0].run.threads), len(folders))
                launch(folders, jobs, lambda: shown(folders), **work)
        finally:
            shown.bar.stop()

    return run_all


SOURCE = "source.txt"


def begin_report(study: Study, folder: Path) -> None:
    """Write the study into the folder of its report, which can then be made at any time.

    Raises:
        ValueError: if the folder has the report of another study file.
    """
    note = folder / SOURCE
    other = Path(note.read_text(encoding="utf-8")) if note.exists() else study.path
    if other != study.path and other.exists():
        raise ValueError(
            f"{folder} has the report of {other}: rename {study.path}, or give another --out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(note, str(study.path).encode())
    write_whole(folder / "study.yaml", settings_of(study).encode())


def imports_of(folder: Path) -> Path:
    """The folder of the study file of a report, where its own factories are."""
    note = folder / SOURCE
    return Path(note.read_text(encoding="utf-8")).parent if note.exists() else Path.cwd()


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
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(Markdown("\n".join(lines)))
    print(path)
    return 0 if (frame["status"] == "finished").all() else 3


def mixed_versions(folders: Sequence[tuple[str, RunFolder]]) -> str:
    """A warning where runs were made with different versions or devices, otherwise nothing."""
    last = pd.DataFrame([attempt for _, each in folders for attempt in each.attempts()[-1:]])
    versions = last.drop(columns=["epochs", "began", "host"], errors="ignore")
    mixed = [
        f"{name} {', '.join(sorted(column.dropna().unique()))}"
        for name, column in versions.items()
        if column.nunique() > 1
    ]
    return f"**Versions or devices of the runs differ:** {'; '.join(mixed)}." if mixed else ""


def searched(study: Study, found: Sequence[Found], folder: Path) -> str:
    """Write the choices of a search beside the study, and all candidates into a folder.

    Returns:
        What to print.
    """
    chosen: Mapping[str, Any] = {each.condition: each.best for each in found if each.best}
    lines = [
        f"# The choices of a search, by the validation set. {study.path.name} reads this file."
    ]
    lines += [f"# {each.condition}: {each.runs} runs; {each.sentence}" for each in found]
    text = "\n".join(lines) + "\n" + yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True)
    target = study.path.with_name(f"{study.name}.chosen.yaml")
    write_whole(target, text.encode())
    if rows := [each.table.assign(condition=each.condition) for each in found if each.runs]:
        write_whole(folder / "search.csv", pd.concat(rows).to_csv(index=False).encode())
    tables = [
        f"{each.condition}: {each.sentence}\n{each.table.to_string(index=False)}" for each in found
    ]
    return "\n\n".join([*tables, f"{target}"])
