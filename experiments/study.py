"""A study: a YAML file as conditions and seeds, or a list of all faults of the file.

`experiments/README.md` lists the fields of a study file.

A condition may have `params: {rate: 0.2}`. `${rate}` stands for this number in its fields and in
its spec. A search replaces it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from dropblock_hooks import Spec
from experiments.config import Count, NotNegative, Run, problems_of
from experiments.trial import faults_of

_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")


class StudyError(ValueError):
    """A study has faults, which the message lists."""

    def __init__(self, source: object, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        lines = [problem.replace("\n", "\n    ") for problem in problems]
        count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        heading = f"{source} can't be run, {count}:"
        super().__init__("\n  - ".join([heading, *lines]))


def _seeds(value: Any) -> Any:
    """Check a number of seeds, or a list of them."""
    if isinstance(value, list):
        valid = bool(value) and all(map(_is_whole, value))
    else:
        valid = _is_whole(value) and value >= 1
    if not valid:
        raise ValueError("must be a number of seeds, at least 1, or a list of whole numbers")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _levels(value: Any) -> Any:
    if not isinstance(value, list | dict) or not value:
        raise ValueError("must be a list or a mapping with at least one value")
    return value


Seeds = Annotated[int | list[int], BeforeValidator(_seeds)]
Levels = Annotated[list[Any] | dict[str, Any], BeforeValidator(_levels)]


class Search(BaseModel):
    """The options of a search: its space, and the number of candidates and of seeds."""

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
        name: the name of the file, without its suffix.
        file: the fields of the file, without changes.
        path: the path of the file. Its own factories are beside it.
        fields: name of a condition -> its fields and the fields of the base, before its
            parameters are filled in.
        conditions: name -> run. Each of the `seeds` replaces the seed of the run.
        seeds: the seeds of every condition.
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
        with_first = [(name, first) for name in others]
        pairs = [*with_first, *self.file.compare]
        return list(dict.fromkeys(pairs))

    def runs(self) -> Iterator[tuple[str, Run]]:
        """All runs with the names of their conditions, seed by seed."""
        for seed in self.seeds:
            for name, run in self.conditions.items():
                yield name, run.model_copy(update={"seed": seed})

    def with_values(self, condition: str, values: Mapping[str, Any], seed: int) -> Run:
        """Return the run of a condition with other parameters or fields, as a search tries them."""
        run = _run_of(self.fields[condition], values, self.path.parent)
        return run.model_copy(update={"seed": seed})

    def plain(self) -> dict[str, Any]:
        """Return the study as plain data, with all placeholders filled."""
        conditions = {}
        for name, run in self.conditions.items():
            conditions[name] = run.model_dump(exclude_defaults=True)
        others = self.file.model_dump(include={"question", "primary", "higher_is_better"})
        return {
            **others,
            "compare": [list(pair) for pair in self.file.compare],
            "conditions": conditions,
            "seeds": list(self.seeds),
        }


def read_study(
    path: Path,
    changes: Mapping[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
) -> Study:
    """Read a study file, and the choices of a search beside it (STUDY.chosen.yaml).

    Args:
        path: the path of the file.
        changes: fields of the base to replace; `data_args.root` names a field inside a mapping.
        seeds: the seeds to run instead of the file's seeds.
        only: names of conditions. An empty list keeps all conditions.

    Raises:
        StudyError: with all faults of the file. `fit` then tries the models.
        OSError: if the file can't be read.
    """
    problems: list[str] = []
    file = _read_file(path, problems)
    base = _changed(file.base, changes or {})
    fields = _fields_of(file, base, problems)

    chosen_path = path.resolve().with_name(f"{path.stem}.chosen.yaml")
    chosen = _read_yaml(chosen_path) if chosen_path.exists() else {}
    conditions = _runs_of(fields, chosen, path.parent, problems)
    for name in _outdated(chosen, fields):
        problems.append(
            f"{chosen_path.name}: its values for {name!r} do not fit the study: search again, "
            "or delete the file"
        )

    compared = itertools.chain(*file.compare)
    problems += _unknown_conditions("compare", compared, fields)
    problems += _unknown_conditions("--only", only, fields)
    all_seeds = _numbers_of(file.seeds if seeds is None else seeds)
    if not all_seeds or len(set(all_seeds)) < len(all_seeds):
        problems.append(f"seeds must be different numbers, at least one, got {list(all_seeds)}")

    if problems:
        seed = all_seeds[0] if all_seeds else 1
        faults = faults_of(conditions, seed, file.primary)
        raise StudyError(path, [*problems, *faults])

    kept = {name: conditions[name] for name in only}
    return Study(
        name=path.stem,
        file=file,
        path=path.resolve(),
        fields=fields,
        conditions=kept or conditions,
        seeds=all_seeds,
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StudyError(path, [f"it is no YAML: {error}"]) from error
    if not isinstance(content, dict):
        raise StudyError(path, [f"it must be a mapping with conditions, got {content!r:.100}"])
    return content


def _read_file(path: Path, problems: list[str]) -> StudyFile:
    """Return the fields of a study file. A wrong field is a problem, and gets its default."""
    plain = _read_yaml(path)
    try:
        return StudyFile.model_validate(plain)
    except ValidationError as error:
        problems += problems_of(error, "", StudyFile)
        return StudyFile.model_construct(**_valid_fields(plain, error))


def _valid_fields(plain: Mapping[str, Any], error: ValidationError) -> dict[str, Any]:
    """Return the fields and the conditions without a fault, to find further faults."""
    wrong = {detail["loc"][0] for detail in error.errors() if detail["loc"]}
    right = StudyFile.model_fields.keys() - wrong
    valid = {name: value for name, value in plain.items() if name in right}

    conditions = plain.get("conditions")
    if "conditions" in wrong and isinstance(conditions, dict):
        valid_conditions = {}
        for name, fields in conditions.items():
            if isinstance(fields, dict | None):
                valid_conditions[name] = fields
        valid["conditions"] = valid_conditions
    return valid


def _fields_of(
    file: StudyFile, base: Mapping[str, Any], problems: list[str]
) -> dict[str, dict[str, Any]]:
    """Return name of a condition -> the fields of the base and its own; parameters are joined."""
    fields = {}
    for name, condition in _conditions_of(file, problems).items():
        params = dict(base.get("params", {}))
        params.update(condition.get("params", {}))
        fields[name] = {**base, **condition, "params": params}
    return fields


def _conditions_of(file: StudyFile, problems: list[str]) -> dict[str, dict[str, Any]]:
    """Return the conditions that are written out, and the conditions of the grid."""
    conditions = {}
    for name, written in file.conditions.items():
        conditions[name] = dict(written or {})
    for cell in _cells_of(file.grid):
        name = ", ".join(level.label for level in cell)
        if name in conditions:
            problems.append(f"grid: there is a condition {name!r} already")

        fields: dict[str, Any] = {}
        for level in cell:
            change = {level.field: level.value}
            fields = _changed(fields, change)
        conditions[name] = fields

    if not conditions:
        problems.append("conditions: there must be at least one")
    return conditions


@dataclass(frozen=True)
class _Level:
    """A value of a field in a grid, and its part in the names of conditions."""

    field: str
    label: str
    value: Any


def _cells_of(grid: Mapping[str, Levels]) -> list[tuple[_Level, ...]]:
    """Return every combination of the levels of a grid."""
    if not grid:
        return []

    levels = []
    for field, values in grid.items():
        if isinstance(values, dict):
            labeled = list(values.items())
        else:
            labeled = [(value, value) for value in values]
        levels.append([_Level(field, str(label), value) for label, value in labeled])
    return list(itertools.product(*levels))


def _runs_of(
    fields: Mapping[str, dict[str, Any]],
    chosen: Mapping[str, Any],
    folder: Path,
    problems: list[str],
) -> dict[str, Run]:
    """Return name of a condition -> its run. A condition that can't be read is a problem."""
    runs = {}
    for name, condition in fields.items():
        try:
            runs[name] = _run_of(condition, chosen.get(name, {}), folder)
        except (ValidationError, ValueError, OSError) as error:
            problems += problems_of(error, f"conditions.{name}")
    return runs


def _outdated(chosen: Mapping[str, Any], fields: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the conditions whose chosen values do not belong to the study."""
    outdated = []
    for name, values in chosen.items():
        params = fields.get(name, {}).get("params", ())
        known_fields = {*Run.model_fields, *params}
        chosen_fields = {path.partition(".")[0] for path in values}
        is_unknown = not chosen_fields <= known_fields
        if is_unknown or name not in fields:
            outdated.append(name)
    return outdated


def _unknown_conditions(where: str, names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return a problem for each name that no condition has."""
    unknown = [name for name in dict.fromkeys(names) if name not in known]
    listed = ", ".join(known)
    return [f"{where}: there is no condition {name!r}; known: {listed}" for name in unknown]


def _numbers_of(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Return the seeds 1 to n, or the seeds of a list."""
    if isinstance(seeds, int):
        seeds = range(1, seeds + 1)
    return tuple(seeds)


def _changed(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with other values; `a.b` is the key b of the mapping a."""
    copy = dict(fields)
    for path, value in changes.items():
        first, dot, rest = path.partition(".")
        if not dot:
            copy[first] = value
            continue

        inner = copy.get(first)
        if not isinstance(inner, dict):
            inner = {}
        copy[first] = _changed(inner, {rest: value})
    return copy


def _run_of(fields: Mapping[str, Any], chosen: Mapping[str, Any], folder: Path) -> Run:
    """Return the run of a condition, in which chosen values replace parameters or fields."""
    changes = {}
    for name, value in chosen.items():
        path = f"params.{name}" if name in fields["params"] else name
        changes[path] = value

    changed = _changed(fields, changes)
    filled = _filled(changed)
    checked = read_spec(filled, folder)
    return Run.model_validate(checked)


def _filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each `${name}` in the fields by the parameter of that name."""
    others = dict(fields)
    params = others.pop("params", {})
    return {name: _fill(item, params) for name, item in others.items()}


def _fill(data: Any, params: Mapping[str, Any]) -> Any:
    """Return plain data with parameters in place of their names."""
    if isinstance(data, dict):
        return {_fill(key, params): _fill(item, params) for key, item in data.items()}
    if isinstance(data, list):
        return [_fill(item, params) for item in data]
    if not isinstance(data, str):
        return data

    def value_of(placeholder: re.Match[str]) -> Any:
        name = placeholder[1]
        if name not in params:
            raise ValueError(f"${{{name}}} has no value: add params: {{{name}: ...}}")
        return params[name]

    whole = _PLACEHOLDER.fullmatch(data)
    if whole:
        return value_of(whole)
    return _PLACEHOLDER.sub(lambda placeholder: str(value_of(placeholder)), data)


def read_spec(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields with the spec as plain data, so that the hash of a run includes it.

    Raises:
        ValueError: if the spec has a fault.
    """
    spec = fields.get("spec")
    if not spec:
        return {**fields, "spec": None}
    if isinstance(spec, str):
        spec = str(folder / spec)
    try:
        read = Spec(spec)
    except (ValueError, TypeError) as error:
        raise ValueError(f"spec: {error}") from error
    return {**fields, "spec": read.to_plain()}


def fit(study: Study) -> None:
    """Try each condition on its data: the model, the spec, the loss, the metric and the optimizer.

    Raises:
        StudyError: with all faults.
    """
    faults = faults_of(study.conditions, study.seeds[0], study.file.primary)
    if faults:
        raise StudyError(study.name, faults)
