"""What stands in a run's directory, written so that a kill at any moment leaves nothing half-done.

    config.yaml       all fields of the run's config; `scripts/train.py --config` reads it
    environment.json  versions, commit, host, and each attempt at the run
    metrics.jsonl     an `Epoch` per line; checkpoint.pt: where the training is (`train` keeps both)
    result.json       the `Result`, without its epochs
    error.json        of a failed run: type, message, traceback
    done.json         written last: digests of config, environment, metrics and result
    lock or lease     the claim

A run is finished when `done.json` is there and its digests match.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from experiments.config import Config, make_config, run_hash
from experiments.files import flush, free_name, is_draft, write_atomically
from experiments.log import line, read_metrics
from experiments.results import Best, Epoch, Result

RESULTS = ("config.yaml", "metrics.jsonl", "result.json")
SEALED = (*RESULTS, "environment.json")
FILES = (*RESULTS, "checkpoint.pt", "done.json")  # that only a run that was begun has
CLAIMS = ("lock", "lease")


class Damaged(ValueError):
    """A run's directory is not as its runs left it."""


class OtherRun(Damaged):
    """It holds a run of another config."""


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, also if power fails."""
    write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_json(path: Path, data: object) -> None:
    """The same for plain data."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def make_directory(path: Path) -> None:
    """Make it, and its parents; a file in its place is set aside."""
    if path.exists() and not path.is_dir():
        aside = free_name(path)
        aside.mkdir()
        with suppress(FileNotFoundError):  # another launch was faster
            os.rename(path, aside / path.name)
        write_text(aside / "damage.txt", "it was no directory\n")
    path.mkdir(parents=True, exist_ok=True)
    flush(path.parent)


def begin(directory: Path, config: Config, environment: dict[str, Any]) -> None:
    """Write down what is about to be run, and where; the claim must be held."""
    drop_drafts(directory)
    if not (directory / "config.yaml").exists():
        text = yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)
        write_text(directory / "config.yaml", text)
    attempts = [*read_environment(directory).get("attempts", []), environment.pop("attempt")]
    write_json(directory / "environment.json", {**environment, "attempts": attempts})


def drop_drafts(directory: Path) -> None:
    """Remove what writers that were killed have left; the claim must be held."""
    for name in os.listdir(directory):
        if is_draft(name):
            (directory / name).unlink(missing_ok=True)


def seal(directory: Path, run: str, result: Result) -> None:
    """Mark the run, named by its hash, as finished."""
    plain = asdict(result)
    del plain["epochs"]
    # again: a holder that lost its claim may have added a line
    write_text(directory / "metrics.jsonl", "".join(map(line, result.epochs)))
    write_json(directory / "result.json", plain)
    digests = {name: digest(directory / name) for name in SEALED}
    (directory / "error.json").unlink(missing_ok=True)  # first: no kill leaves it beside done.json
    write_json(directory / "done.json", {"run": run, "sha256": digests})


def take_over(source: Path, directory: Path) -> None:
    """Copy a finished run, its record included; `done.json` is written last, as by the run itself.

    The claim on `directory` must be held.
    """
    for name in (*SEALED, "checkpoint.pt", "done.json"):
        if (source / name).exists():
            write_atomically(directory / name, partial(shutil.copyfile, source / name))


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_result(directory: Path, run: str) -> Result | None:
    """The result if the run, named by its hash, is finished (or diverged); None if it is not.

    Raises:
        Damaged: if it says that it is finished, but is not what it was then.
    """
    try:
        done = json.loads((directory / "done.json").read_text(encoding="utf-8"))
        sealed, of = dict(done["sha256"]), done["run"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise Damaged(f"done.json can't be read: {error!r}") from error
    if of != run:
        raise OtherRun(f"it holds the run {of}, not {run}")
    for name in dict.fromkeys((*RESULTS, *sealed)):
        try:
            now = digest(directory / name)
        except (OSError, ValueError) as error:
            raise Damaged(f"{name} can't be read: {error}") from None
        if now != sealed.get(name):
            raise Damaged(f"{name} was changed since the run was finished")
    try:
        plain = json.loads((directory / "result.json").read_text(encoding="utf-8"))
        best = plain.pop("best", None)  # older ones have none
        chosen = None if best is None else Best(**best)
        return Result(epochs=read_epochs(directory), best=chosen, **plain)
    except (ValueError, TypeError) as error:
        raise Damaged(f"result.json can't be read: {error}") from error


def read_epochs(directory: Path) -> list[Epoch]:
    """The epochs in `metrics.jsonl`.

    Raises:
        Damaged: if a line is none.
    """
    try:
        return read_metrics(directory / "metrics.jsonl")
    except ValueError as error:
        raise Damaged(str(error)) from error


def read_config(directory: Path) -> Config:
    """The config of a run.

    Raises:
        Damaged: if there is none that can be read.
    """
    try:
        return make_config(yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise Damaged("config.yaml is missing") from None
    except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise Damaged(f"config.yaml can't be read: {error}") from error


def read_environment(directory: Path) -> dict[str, Any]:
    """Versions, host and attempts, those alone that are records; empty if unknown."""
    found = read_mapping(directory / "environment.json")
    attempts = found.get("attempts")
    if "attempts" in found:
        listed = attempts if isinstance(attempts, list) else []
        found["attempts"] = [attempt for attempt in listed if isinstance(attempt, dict)]
    return found


def environments(environment: dict[str, Any]) -> list[dict[str, Any]]:
    """Where a run was made, attempt by attempt.

    Example:
        >>> attempts = [{"pid": 1}, {"pid": 2, "host": "other"}]
        >>> [each["host"] for each in environments({"host": "one", "attempts": attempts})]
        ['one', 'other']

    Args:
        environment: as `read_environment` gives it; attempts that do not say it themselves are
            taken to have been made as the last one. Empty, if nothing is known.
    """
    attempts = environment.get("attempts") or [{}] * bool(environment)
    return [{**environment, **attempt} for attempt in attempts]


def read_mapping(path: Path) -> dict[str, Any]:
    """What a JSON file says; empty if there is none that can be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def examine(directory: Path, run: str, fingerprint: str) -> None:
    """See whether a run, named by its hash, can go on there; the claim must be held.

    Raises:
        Damaged: if the directory does not hold this run as it was left.
    """
    contents = sorted(os.listdir(directory))
    for name in contents:
        known = name in (*FILES, "environment.json", "error.json") or is_draft(name)
        if known and (directory / name).is_dir():
            raise Damaged(f"{name} is a directory")
    if not set(contents) & set(FILES):
        return
    if run_hash(read_config(directory), fingerprint) != run:
        raise OtherRun("config.yaml is that of another run")
    read_result(directory, run)


def set_aside(directory: Path, reason: str) -> Path:
    """Move all but the claim to a directory beside it, where `damage.txt` says why."""
    aside = free_name(directory)
    aside.mkdir()
    write_text(aside / "damage.txt", reason + "\n")
    names = sorted(os.listdir(directory), key=lambda name: name != "config.yaml")
    for name in names:  # without its config, what a kill leaves behind is damaged, too
        stray = is_draft(name) and (directory / name).is_dir()
        if stray or (name not in CLAIMS and not name.startswith(".")):
            shutil.move(directory / name, aside / name)
    flush(directory)
    return aside
