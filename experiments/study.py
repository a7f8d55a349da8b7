"""A study: conditions that differ in a few fields of a `Config`, each run with the same seeds.

A study file is YAML, and its header comment says the question, the command and the time:

    base: {epochs: 40, label_noise: 0.4}   # fields of Config that all conditions share
    conditions:                            # name -> the fields that make it different
      none: {}
      Dropout2d: {spec: {"layer4.0": {Dropout2d: {p: 0.5}}}}
    baseline: none                         # what the others are compared to
    seeds: [1, 2, 3]
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dropblock_hooks.files import FileError, read_yaml
from experiments.train import Config, Result, prepare, train


class StudyError(ValueError):
    """Everything that is wrong with a study, in one message."""

    def __init__(self, source: object, problems: Iterable[str]) -> None:
        lines = [problem.replace("\n", "\n    ") for problem in problems]
        super().__init__("\n  - ".join([f"{source} is not a study that can be run:", *lines]))


@dataclass(frozen=True)
class Study:
    """What is run and compared.

    Args:
        conditions: name -> config; its seed is replaced by each of `seeds` in turn.
        baseline: the condition that the others are compared to.
        seeds: run with every condition.
    """

    conditions: dict[str, Config]
    baseline: str
    seeds: tuple[int, ...]

    def configs(self) -> list[tuple[str, Config]]:
        """All runs in order, seed by seed: an interrupted study has whole comparisons."""
        return [
            (name, replace(config, seed=seed))
            for seed in self.seeds
            for name, config in self.conditions.items()
        ]


@dataclass(frozen=True)
class Run:
    """One finished run of a study."""

    condition: str
    config: Config
    result: Result


def run_study(study: Study, progress: Progress | None = None) -> Iterator[Run]:
    """Run everything, one run after the other, each yielded when it is finished."""
    progress = progress or Progress(disable=True)
    configs = study.configs()
    task = progress.add_task("", total=sum(c.epochs for _, c in configs), epoch=0, epochs=0)
    for number, (name, config) in enumerate(configs, start=1):
        title = f"run {number}/{len(configs)}: {name}, seed {config.seed}"
        progress.update(task, description=title, epoch=0, epochs=config.epochs)

        def advance(epoch: int) -> None:
            progress.update(task, advance=1, epoch=epoch + 1)

        yield Run(name, config, train(config, on_epoch=advance))


def progress_bar() -> Progress:
    """A bar on standard error: what runs, the epoch, the time left."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=Console(stderr=True),
        speed_estimate_period=60,
    )


def read_study(path: str | Path) -> Study:
    """Read and check a study file; each condition's spec is tried on its model.

    Raises:
        StudyError: listing all that is wrong.
        OSError: if the file cannot be read.
    """
    try:
        data, _ = read_yaml(Path(path).read_text(encoding="utf-8"), str(path))
    except (FileError, UnicodeDecodeError) as error:
        raise StudyError(path, [str(error)]) from error
    problems = _shape_problems(data)
    if problems:
        raise StudyError(path, problems)
    configs: dict[str, Config] = {}
    for name, overrides in data["conditions"].items():
        try:
            config = make_config({**(data.get("base") or {}), **(overrides or {})})
            prepare(config)
        except ValueError as error:
            problems.append(f"conditions.{name}: {error}")
        else:
            configs[name] = config
    problems += _twins(configs)
    if problems:
        raise StudyError(path, problems)
    return Study(configs, data["baseline"], tuple(data["seeds"]))


def make_config(values: Mapping[str, Any]) -> Config:
    """A config from plain data, with the types checked.

    Raises:
        ValueError: naming the field.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Config)
    try:
        return Config(**parser.parse_object(dict(values)).as_dict())
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _shape_problems(data: object) -> list[str]:
    if not isinstance(data, dict):
        return [f"it must be a mapping of conditions, baseline and seeds, got {data!r}"]
    problems = _unknown(data, ["base", "conditions", "baseline", "seeds"], "field")
    problems += _overrides_problems(data.get("base"), "base")
    conditions = data.get("conditions")
    if not isinstance(conditions, dict) or not conditions:
        return [*problems, f"conditions must name at least one, got {conditions!r}"]
    for name, overrides in conditions.items():
        if not isinstance(name, str):
            problems.append(f"conditions: a name must be text, got {name!r}; quote it")
        problems += _overrides_problems(overrides, f"conditions.{name}")
    if data.get("baseline") is None:
        problems.append("baseline must name the condition that the others are compared to")
    else:
        problems += _unknown([data["baseline"]], list(conditions), "baseline: condition")
    return problems + _seeds_problems(data.get("seeds"))


def _overrides_problems(overrides: object, where: str) -> list[str]:
    if overrides is None:
        return []
    if not isinstance(overrides, dict):
        return [f"{where} must map fields of Config to values, got {overrides!r}"]
    if "seed" in overrides:
        return [f"{where}: seed does not belong here: all conditions share those of `seeds`"]
    return _unknown(overrides, [field.name for field in fields(Config)], f"{where}: field")


def _seeds_problems(seeds: object) -> list[str]:
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds):
        return [f"seeds must be a list of whole numbers, at least one, got {seeds!r}"]
    twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    return [f"seeds must differ, got {twice} more than once"] if twice else []


def _twins(configs: Mapping[str, Config]) -> list[str]:
    names = list(configs)
    return [
        f"conditions {one!r} and {other!r} are the same"
        for i, one in enumerate(names)
        for other in names[i + 1 :]
        if configs[one] == configs[other]
    ]


def _unknown(names: Iterable[object], known: list[str], what: str) -> list[str]:
    problems = []
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(str(name), [str(other) for other in known], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            problems.append(f"{what} {name!r} is unknown; {hint}")
    return problems
