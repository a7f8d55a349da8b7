"""A study: a YAML file as conditions and seeds, or everything that is wrong with the file.

`experiments/README.md` lists the fields of a study file.

A condition may have `params: {rate: 0.2}`. `${rate}` stands for this number in its fields and in
its spec. A search replaces it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from torch import nn

from dropblock_hooks import Spec
from experiments.config import Count, NotNegative, Run, problems_of, run_hash
from experiments.data import Data, load_data
from experiments.factories import call
from experiments.metrics import Metric, try_metric
from experiments.models import make_model
from experiments.train import make_optimizer

_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")


class StudyError(ValueError):
    """Everything that is wrong with a study, in one message."""

    def __init__(self, source: object, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        lines = [problem.replace("\n", "\n    ") for problem in problems]
        count = f"{len(lines)} problem{'s' * (len(lines) != 1)}"
        super().__init__("\n  - ".join([f"{source} can't be run, {count}:", *lines]))


def _seeds(value: Any) -> Any:
    numbers = value if isinstance(value, list) else [value]
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in numbers)
    if not whole or not numbers or (numbers is not value and value < 1):
        raise ValueError("must be a number of seeds, at least 1, or a list of whole numbers")
    return value


def _levels(value: Any) -> Any:
    if not isinstance(value, list | dict) or not value:
        raise ValueError("must be a list or a mapping with at least one value")
    return value


Seeds = Annotated[int | list[int], BeforeValidator(_seeds)]
Levels = Annotated[list[Any] | dict[str, Any], BeforeValidator(_levels)]


class Search(BaseModel):
    """How a search goes: its space, and the number of candidates and of seeds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    space: Annotated[dict[str, Levels], BeforeValidator(_levels)]
    candidates: Count = 8
    seeds: Count = 10


class StudyFile(BaseModel):
    """The fields of a study file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: str = ""
    base: dict[str, Any] = {}
    conditions: dict[str, dict[str, Any] | None] = {}
    grid: dict[str, Levels] = {}
    compare: list[tuple[str, str]] = []
    primary: dict[str, NotNegative] = {}
    seeds: Seeds = 5
    higher_is_better: bool = True
    search: Search | None = None


@dataclass(frozen=True)
class Study:
    """The runs and comparisons of a study.

    Attributes:
        name: of the file, without its suffix.
        file: its fields, as they were read.
        path: of the file. Its own factories are beside it.
        fields: name of a condition -> its fields and the fields of the base, before its
            parameters are filled in.
        conditions: name -> run. Its seed is replaced by each of the seeds.
        seeds: run with every condition.
    """

    name: str
    file: StudyFile
    path: Path
    fields: dict[str, dict[str, Any]]
    conditions: dict[str, Run]
    seeds: tuple[int, ...]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The comparisons: each condition with the first, and the pairs of `compare`."""
        first, *others = self.conditions
        pairs = [*((name, first) for name in others), *self.file.compare]
        return list(dict.fromkeys(pairs))

    def runs(self) -> Iterator[tuple[str, Run]]:
        """All runs with the names of their conditions, seed by seed."""
        for seed in self.seeds:
            for name, run in self.conditions.items():
                yield name, run.model_copy(update={"seed": seed})

    def with_values(self, condition: str, values: Mapping[str, Any], seed: int) -> Run:
        """The run of a condition with other parameters or fields, as a search tries them."""
        run = _run_of(self.fields[condition], values, self.path.parent)
        return run.model_copy(update={"seed": seed})

    def plain(self) -> dict[str, Any]:
        """The study as plain data, with all placeholders filled."""
        kept = {n: run.model_dump(exclude_defaults=True) for n, run in self.conditions.items()}
        rest = self.file.model_dump(include={"question", "primary", "higher_is_better"})
        pairs = [list(pair) for pair in self.file.compare]
        return {**rest, "compare": pairs, "conditions": kept, "seeds": list(self.seeds)}


def read_study(
    path: Path,
    changes: Mapping[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
) -> Study:
    """Read a study file, and the choices of a search beside it (STUDY.chosen.yaml).

    Args:
        path: of the file.
        changes: fields of the base to replace; `data_args.root` names a field inside a mapping.
        seeds: to run instead of the file's seeds.
        only: names of conditions. An empty list keeps all.

    Raises:
        StudyError: with all that is wrong in the file. `fit` then tries the models.
        OSError: if the file can't be read.
    """
    plain = _read_yaml(path)
    chosen_path = path.resolve().with_name(f"{path.stem}.chosen.yaml")
    chosen = _read_yaml(chosen_path) if chosen_path.exists() else {}
    try:
        file = StudyFile.model_validate(plain)
        problems: list[str] = []
    except ValidationError as error:
        problems = problems_of(error, "", StudyFile)
        file = StudyFile.model_construct(**_valid_fields(plain, error))
    base = _changed(file.base, changes or {})
    fields = {}
    for name, own in _conditions(file, problems).items():
        params = {**base.get("params", {}), **own.get("params", {})}
        fields[name] = {**base, **own, "params": params}
    conditions: dict[str, Run] = {}
    for name, merged in fields.items():
        try:
            conditions[name] = _run_of(merged, chosen.get(name, {}), path.parent)
        except (ValidationError, ValueError, OSError) as error:
            problems += problems_of(error, f"conditions.{name}")
    for name, values in chosen.items():
        known = {*Run.model_fields, *fields.get(name, {}).get("params", ())}
        if name not in fields or {each.partition(".")[0] for each in values} - known:
            problems.append(
                f"{chosen_path.name}: its values for {name!r} do not fit the study: search again, "
                "or delete the file"
            )
    problems += [
        f"{where}: there is no condition {name!r}; known: {', '.join(fields)}"
        for where, names in (("compare", itertools.chain(*file.compare)), ("--only", only))
        for name in dict.fromkeys(names)
        if name not in fields
    ]
    given = seeds if seeds is not None else file.seeds
    all_seeds = tuple(range(1, given + 1)) if isinstance(given, int) else tuple(given)
    if not all_seeds or len(set(all_seeds)) < len(all_seeds):
        problems.append(f"seeds must be different numbers, at least one, got {list(all_seeds)}")
    if problems:
        raise StudyError(path, [*problems, *_fits(conditions, all_seeds[:1] or (1,), file)])
    kept = {name: conditions[name] for name in only} or conditions
    return Study(path.stem, file, path.resolve(), fields, kept, all_seeds)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StudyError(path, [f"it is no YAML: {error}"]) from error
    if not isinstance(found, dict):
        raise StudyError(path, [f"it must be a mapping with conditions, got {found!r:.100}"])
    return found


def _valid_fields(plain: Mapping[str, Any], error: ValidationError) -> dict[str, Any]:
    """The fields without a fault, and the defaults of the others, to find further faults."""
    wrong = {each["loc"][0] for each in error.errors() if each["loc"]}
    good = {k: v for k, v in plain.items() if k not in wrong and k in StudyFile.model_fields}
    conditions = plain.get("conditions")
    if "conditions" in wrong and isinstance(conditions, dict):
        good["conditions"] = {n: c for n, c in conditions.items() if isinstance(c, dict | None)}
    return good


def _conditions(file: StudyFile, problems: list[str]) -> dict[str, dict[str, Any]]:
    """The conditions that are written out, and the conditions of the grid."""
    found = {name: dict(fields or {}) for name, fields in file.conditions.items()}
    levels = [
        [
            (str(k), field, v)
            for k, v in (
                values.items() if isinstance(values, dict) else zip(values, values, strict=True)
            )
        ]
        for field, values in file.grid.items()
    ]
    for cell in itertools.product(*levels) if levels else ():
        name = ", ".join(level for level, _, _ in cell)
        if name in found:
            problems.append(f"grid: there is a condition {name!r} already")
        fields: dict[str, Any] = {}
        for _, field, value in cell:
            fields = _changed(fields, {field: value})
        found[name] = fields
    if not found:
        problems.append("conditions: there must be at least one")
    return found


def _changed(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with other values; `a.b` is the key b of the mapping a."""
    copy = dict(fields)
    for path, value in changes.items():
        first, dot, rest = path.partition(".")
        inner = copy.get(first)
        inner = inner if isinstance(inner, dict) else {}
        copy[first] = _changed(inner, {rest: value}) if dot else value
    return copy


def _run_of(fields: Mapping[str, Any], chosen: Mapping[str, Any], folder: Path) -> Run:
    """The run of a condition, in which chosen values replace parameters or fields."""
    params = fields["params"]
    filled = _changed(fields, {f"params.{n}" if n in params else n: v for n, v in chosen.items()})
    return Run.model_validate(read_spec(_filled(filled), folder))


def _filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with each `${name}` replaced by the parameter of that name."""
    params = fields.get("params", {})

    def value(match: re.Match[str]) -> Any:
        if match[1] not in params:
            raise ValueError(f"${{{match[1]}}} has no value: add params: {{{match[1]}: ...}}")
        return params[match[1]]

    def fill(data: Any) -> Any:
        if isinstance(data, dict):
            return {fill(key): fill(item) for key, item in data.items()}
        if isinstance(data, list):
            return [fill(item) for item in data]
        if not isinstance(data, str):
            return data
        whole = _PLACEHOLDER.fullmatch(data)
        return value(whole) if whole else _PLACEHOLDER.sub(lambda found: str(value(found)), data)

    return {name: fill(item) for name, item in fields.items() if name != "params"}


def read_spec(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The fields with their spec as plain data, so that the hash of a run has its content."""
    spec = fields.get("spec")
    if not spec:
        return {**fields, "spec": None}
    try:
        read = Spec.load(str(folder / spec)) if isinstance(spec, str) else Spec(spec)
    except (ValueError, TypeError) as error:
        raise ValueError(f"spec: {error}") from error
    return {**fields, "spec": read.to_plain()}


def fit(study: Study) -> None:
    """Try each condition on its data: the model, the spec, the loss, the metric and the optimizer.

    Raises:
        StudyError: with everything that does not fit.
    """
    if problems := _fits(study.conditions, study.seeds[:1], study.file):
        raise StudyError(study.name, problems)


def _fits(conditions: Mapping[str, Run], seeds: Sequence[int], file: StudyFile) -> list[str]:
    """What does not fit, and which conditions or tests of `primary` are not there."""
    others: list[str] = []
    failed: dict[str, list[str]] = {}
    loaded: dict[str, Data | None] = {}
    tried: set[str] = set()
    names: dict[str, str] = {}

    def attempt(name: str, check: Callable[..., Any], *args: Any) -> Any:
        """What the check returns; conditions that fail alike share a message."""
        try:
            return check(*args)
        except ValueError as error:
            failed.setdefault(str(error), []).append(name)

    for name, run in conditions.items():
        run = run.model_copy(update={"seed": seeds[0]})
        key = repr((run.data, run.data_args))
        measured = repr((key, run.loss, run.model, run.model_args, run.metric, run.metric_args))
        attempt(name, call, run.loss, run.loss_args)
        attempt(name, Metric, run)
        if key not in loaded:
            loaded[key] = attempt(name, load_data, run)
        data = loaded[key]
        made = attempt(name, make_model, run, data) if data is not None else None
        attempt(name, make_optimizer, run, made[0] if made else nn.Linear(1, 1))
        if made and measured not in tried:
            tried.add(measured)
            attempt(name, try_metric, run, made[0], data)
        others += [
            f"primary: {run.data} has no test {test!r}; it has {', '.join(data.tests)}"
            for test in (file.primary if data is not None else ())
            if test not in data.tests and not any(f"no test {test!r}" in p for p in others)
        ]
        if (other := names.setdefault(run_hash(run), name)) != name:
            others.append(f"conditions {other!r} and {name!r} are the same")
    alike = ((", ".join(dict.fromkeys(where)), message) for message, where in failed.items())
    return [*(f"conditions.{where}: {message}" for where, message in alike), *others]
