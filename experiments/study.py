"""A study: conditions that differ in a few fields of a `Config`, each run with the same seeds.

A study file is YAML; its header comment says the question, the command and the time:

    question: Does DropBlock2d help, and how much of it?
    chosen: results/search/chosen.yaml     # of a search: ${ARM.lr} is what it chose (see `search`)
    base: {epochs: 40, label_noise: 0.4}   # fields of Config that all conditions share
    grid:                                  # crossed factors (see `grid`), or
      factors: {rate: [0.1, 0.3]}
      fields: {spec: {layer4.0: {DropBlock2d: {p: "${rate}"}}}}
    conditions:                            # name -> the fields that make it different, or both
      none: {}
    baseline: none                         # what the others are compared to
    contrasts: {rates: [{pairs: rate}]}    # families of further comparisons (see `contrasts`)
    seeds: [1, 2, 3]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.config import Config, Runtime, make_config, resolve, run_hash
from experiments.contrasts import (
    Asked,
    plain_contrasts,
    read_contrasts,
    replica_problems,
    split_problems,
)
from experiments.data import Data, check_validation, make_data
from experiments.datasets.sources import fingerprint, load_source, scored_splits
from experiments.files import record_digest
from experiments.grid import Cell, expand, fill_numbers, unknown
from experiments.models import prepare
from experiments.optimization import LearningRate, Targets, make_optimizer
from experiments.protocol import seed_problems, with_chosen
from experiments.study_file import data_problems, is_recursive, overrides_problems, shape_problems
from experiments.yaml_text import read_yaml


class StudyError(ValueError):
    """Everything that is wrong with a study, in one message."""

    def __init__(self, source: object, problems: Iterable[str]) -> None:
        lines = [problem.replace("\n", "\n    ") for problem in problems]
        super().__init__("\n  - ".join([f"{source} is not a study that can be run:", *lines]))


@dataclass(frozen=True)
class Planned:
    """One run that the study asks for; `hash` names its directory."""

    condition: str
    config: Config
    hash: str


@dataclass(frozen=True)
class Study:
    """What is run and compared.

    Args:
        name: of the file, without its suffix.
        question: that the study asks.
        conditions: name -> resolved config; its seed is replaced by each of `seeds` in turn.
        factors: name of a condition -> factor -> name of its level.
        baseline: the condition that the others are compared to.
        seeds: run with every condition.
        fingerprints: name of a condition -> fingerprint of its data.
        contrasts: families of what is compared besides.
    """

    name: str
    question: str
    conditions: dict[str, Config]
    factors: dict[str, dict[str, str]]
    baseline: str
    seeds: tuple[int, ...]
    fingerprints: dict[str, str] = field(repr=False)
    contrasts: tuple[Asked, ...] = ()

    def runs(self) -> list[Planned]:
        """All runs in order, seed by seed: an interrupted study has whole comparisons."""
        configs = [
            (name, replace(config, seed=seed))
            for seed in self.seeds
            for name, config in self.conditions.items()
        ]
        return [
            Planned(name, config, run_hash(config, self.fingerprints[name]))
            for name, config in configs
        ]

    def record(self, command: str) -> dict[str, Any]:
        """What `study.json` holds."""
        hashes: dict[str, dict[str, str]] = {name: {} for name in self.conditions}
        for run in self.runs():
            hashes[run.condition][str(run.config.seed)] = run.hash
        record = {
            "name": self.name,
            "question": self.question,
            "command": command,
            "baseline": self.baseline,
            "contrasts": plain_contrasts(self.contrasts),
            "seeds": list(self.seeds),
            "conditions": {
                name: {
                    "factors": self.factors[name],
                    "config": asdict(config),
                    "runs": hashes[name],
                }
                for name, config in self.conditions.items()
            },
        }
        return {**record, "sha256": record_digest(record)}


def read_study(
    path: str | Path,
    data: str | None = None,
    base: Mapping[str, Any] | None = None,
    runtime: Runtime | None = None,
) -> Study:
    """Read and check a study file; each condition's spec is tried on its model.

    Args:
        path: of the file.
        data: takes the place of the base's data, and becomes part of the study's name; refused
            where conditions, or the grid's fields, have data of their own.
        base: further fields of Config, over those of the file's base; they, too, become part
            of the name.
        runtime: says where the data are.

    Raises:
        StudyError: listing all that is wrong.
        OSError: if the file cannot be read.
    """
    study = make_study(path, read_plain(path), runtime, data, base)
    if problems := seed_problems(Path(path), study.seeds, searching=False):
        raise StudyError(path, problems)
    return study


def read_plain(path: str | Path) -> Any:
    """The plain data of a study file, or of a search file.

    Raises:
        StudyError: if it is not YAML, or refers to itself.
        OSError: if it cannot be read.
    """
    try:
        plain = read_yaml(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise StudyError(path, [str(error)]) from error
    if is_recursive(plain):
        raise StudyError(path, ["an alias stands within what it names, or data are too deep"])
    return plain


def make_study(
    path: str | Path,
    plain: object,
    runtime: Runtime | None = None,
    data: str | None = None,
    base: Mapping[str, Any] | None = None,
) -> Study:
    """A study from the plain data of its file; the arguments are those of `read_study`.

    Raises:
        StudyError: listing all that is wrong.
    """
    problems = overrides_problems(base, "--base")
    filled = False
    if isinstance(plain, dict):
        try:
            plain = with_chosen(Path(path), plain)
            parts = (plain.get("base"), base, None if data is None else {"data": data})
            shared = {name: value for part in parts for name, value in _mapping(part).items()}
            plain, filled = _filled(plain, shared), True
        except ValueError as error:
            problems.append(str(error))
    problems += shape_problems(plain, filled)
    if not problems:
        problems += data_problems(plain, data)
        cells = _cells(plain, problems)
    if problems:
        raise StudyError(path, problems)
    factors = {cell.name: cell.factors for cell in cells}
    contrasts, problems = read_contrasts(plain.get("contrasts"), factors, plain["baseline"])
    configs = _configs(cells, shared, problems)
    fingerprints = _fit(configs, plain["seeds"], runtime or Runtime(), problems)
    problems += _equal_conditions(configs, fingerprints)
    problems += replica_problems(contrasts, _repeats(configs, plain["baseline"]))
    of_data = {name: (one.data, scored_splits(one.data)) for name, one in configs.items()}
    problems += split_problems(contrasts, of_data)
    if problems:
        raise StudyError(path, problems)
    return Study(
        name="-".join([Path(path).stem, *_other(data and next(iter(fingerprints.values())), base)]),
        question=plain.get("question") or "",
        conditions=configs,
        factors=factors,
        baseline=plain["baseline"],
        seeds=tuple(plain["seeds"]),
        fingerprints=fingerprints,
        contrasts=contrasts,
    )


def _mapping(part: object) -> dict[Any, Any]:
    return part if isinstance(part, dict) else {}


def _filled(plain: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The file with the numbers of its base, such as ``${epochs}``, put in their places.

    For a number that the base has wrong, and that is told elsewhere, the default stands in.
    """
    default = asdict(Config())
    known = default | {
        name: value
        for name, value in base.items()
        if type(value) in (int, float) or type(default.get(name)) not in (int, float)
    }
    grid = plain.get("grid")
    factors = (grid.get("factors") if isinstance(grid, dict) else None) or {}
    numbers = {
        name: number
        for name, number in known.items()
        if isinstance(name, str) and type(number) in (int, float) and name not in factors
    }
    parts = {part: plain[part] for part in ("grid", "conditions") if part in plain}
    return {**plain, **fill_numbers(parts, numbers)}


def _other(mark: str | None, base: Mapping[str, Any] | None) -> list[str]:
    """What the study's name says of data (their fingerprint) and base that are not the file's."""
    named = [mark] if mark else []
    text = json.dumps(base, sort_keys=True, default=str)
    return [*named, hashlib.sha256(text.encode()).hexdigest()[:6]] if base else named


def _cells(plain: Mapping[str, Any], problems: list[str]) -> list[Cell]:
    cells: list[Cell] = []
    if "grid" in plain:
        cells, found = expand(plain["grid"])
        problems += found
    conditions = plain.get("conditions") or {}
    taken = {cell.name for cell in cells}
    problems += [
        f"conditions.{name}: the grid has a condition of that name"
        for name in conditions
        if name in taken
    ]
    cells += [Cell(name, {}, overrides or {}) for name, overrides in conditions.items()]
    if not problems:
        names = [cell.name for cell in cells]
        problems += unknown([plain["baseline"]], names, "baseline: condition")
    return cells


def _configs(cells: list[Cell], base: Mapping[str, Any], problems: list[str]) -> dict[str, Config]:
    configs = {}
    for cell in cells:
        try:
            config = resolve(make_config({**base, **cell.fields}))
            if config.processes > 1:
                raise ValueError(
                    f"a run of a study is one process, got devices {config.devices} and num_nodes "
                    f"{config.num_nodes}: launch scripts/train.py for several"
                )
            configs[cell.name] = config
        except ValueError as error:
            problems.append(f"conditions.{cell.name}: {error}")
    return configs


def _fit(
    configs: Mapping[str, Config], seeds: Sequence[int], runtime: Runtime, problems: list[str]
) -> dict[str, str]:
    """Try what each condition is made of on its data; the fingerprints of the data."""
    fingerprints: dict[str, str] = {}
    loaded: tuple[str, Any] = ("", None)
    for name, config in sorted(configs.items(), key=lambda item: _data_key(item[1])):
        try:
            fingerprints[name] = fingerprint(config, runtime.data_dir)
            if _data_key(config) != loaded[0]:
                loaded = (_data_key(config), _load(config, seeds, runtime))
            model, _ = prepare(config, loaded[1])
            LearningRate(config, make_optimizer(config, model), batches=1)
            Targets(config, loaded[1].classes, len(loaded[1].train))
        except ValueError as error:
            problems.append(f"conditions.{name}: {error}")
    return fingerprints


def _load(config: Config, seeds: Sequence[int], runtime: Runtime) -> Data:
    """The data of the first seed; the shares of validation are tried with all."""
    first = replace(config, seed=seeds[0])
    source = load_source(first, runtime.data_dir)
    check_validation(source, config, seeds)
    return make_data(source, first)


def _repeats(configs: Mapping[str, Config], baseline: str) -> dict[str, str]:
    """Name of a condition -> that of the first one that is the same but for its `replica`."""
    first: dict[str, str] = {}
    names = sorted(configs, key=lambda name: name != baseline)
    found = {
        name: first.setdefault(repr(replace(configs[name], replica=0)), name) for name in names
    }
    return {name: other for name, other in found.items() if other != name}


def _data_key(config: Config) -> str:
    names = ("data", "image_size", "train_images", "validation", "label_noise", "augmentation")
    return repr([getattr(config, name) for name in names])


def _equal_conditions(configs: Mapping[str, Config], fingerprints: Mapping[str, str]) -> list[str]:
    first: dict[str, str] = {}
    problems = []
    for name in (name for name in configs if name in fingerprints):
        other = first.setdefault(run_hash(configs[name], fingerprints[name]), name)
        if other != name:
            problems.append(f"conditions {other!r} and {name!r} are the same")
    return problems
