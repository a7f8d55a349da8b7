"""``dropblock-hooks preset NAME MODEL``: placements from papers, as spec files."""

import argparse
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ..presets import by_stage, drop_block_resnet, drop_path, stochastic_depth
from ..regularizers.base import Regularizer
from ..schedules import Schedule
from ..selectors.index import Index
from ..selectors.select import match
from ..spec.convert import regularizer_from, schedule_from
from ..spec.files import read_yaml
from .docstrings import arguments, summary
from .models import add_model, model_of, samples
from .result import CommandError, Commands, Result, count

_T = TypeVar("_T")
_PRESETS = (drop_block_resnet, by_stage, stochastic_depth, drop_path)


def _rate(text: str) -> float | Schedule:
    try:
        return float(text)
    except ValueError:
        return _read(schedule_from, text)


def _regularizer(text: str) -> Regularizer:
    return _read(regularizer_from, text)


def _read(read: Callable[[str], _T], text: str) -> _T:
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    read = [*_read(lambda line: read_yaml(line, name)[0].values(), f"{name}: {value}")]
    if len(read) != 1:
        raise argparse.ArgumentTypeError(f"must have one value, got {text!r}")
    return name, read[0]


_TYPES: dict[str, dict[str, Any]] = {
    "p": {"type": _rate},
    "block_size": {"type": count, "metavar": "N"},
    "regularizer": {"type": _regularizer, "metavar": "TEXT"},
    "stages": {"type": int, "nargs": "+", "metavar": "N"},
    "first": {"type": float, "metavar": "SHARE"},
}


def add_preset(commands: Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "preset",
        help="write a placement from a paper as a spec file",
        description="Write a preset for a model as YAML, or as JSON with --json: "
        "dropblock-hooks preset drop_block_resnet resnet50 > spec.yaml",
    )
    names = command.add_subparsers(required=True, metavar="NAME", title="presets")
    for preset in _PRESETS:
        said = summary(preset).replace("`", "")
        one = names.add_parser(preset.__name__, parents=[shared], help=said, description=said)
        add_model(one)
        meanings = arguments(inspect.cleandoc(preset.__doc__ or ""))
        for name in _own(preset):
            _add_argument(one, inspect.signature(preset).parameters[name], meanings[name])
        one.set_defaults(run=_run, preset=preset)


def _own(preset: Any) -> list[str]:
    """The arguments that the command takes: all but those that it finds itself."""
    names = inspect.signature(preset).parameters
    return [name for name in names if name not in ("model", "example_input")]


def _add_argument(command: argparse.ArgumentParser, p: inspect.Parameter, meaning: str) -> None:
    if p.kind is p.VAR_KEYWORD:
        meaning = f"an option {meaning.rstrip('.')}, as layout=NHWC; repeatable".replace("`", "")
        several: dict[str, Any] = {"action": "append", "default": [], "metavar": "NAME=VALUE"}
        command.add_argument("--option", dest=p.name, type=_option, help=meaning, **several)
        return
    given: dict[str, Any] = {"required": True}
    if p.default is not p.empty:
        meaning = f"{meaning.rstrip('.')} (default: {p.default})"
        given = {"default": p.default}
    flag = f"--{p.name.replace('_', '-')}"
    command.add_argument(flag, help=meaning, **_TYPES[p.name], **given)


def _run(options: argparse.Namespace) -> Result:
    model = model_of(options.model)
    given = {name: getattr(options, name) for name in _own(options.preset)}
    given.update(given.pop("options", ()))
    takes = inspect.signature(options.preset).parameters
    if "model" in takes:
        given["model"] = model
    if "example_input" in takes:
        given["example_input"] = samples(model, options)
    try:
        spec = options.preset(**given)
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from error
    index = Index(model)
    for entry in spec:
        match(entry.selector, index)  # of a preset that takes no model
    return Result(lambda width: spec.to_yaml().rstrip(), spec.to_plain())
