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
    return name, _read(lambda value: read_yaml(value, name)[0], value)


_ARGUMENTS: dict[str, dict[str, Any]] = {
    "p": {"type": _rate, "help": "the highest rate: a number or a schedule (default: 0.1)"},
    "block_size": {"type": count, "metavar": "N", "help": "edge of the block (default: 7)"},
    "regularizer": {
        "type": _regularizer,
        "metavar": "TEXT",
        "required": True,
        "help": "what is put there, such as 'Dropout2d(p=0.2)'",
    },
    "stages": {
        "type": int,
        "nargs": "+",
        "metavar": "N",
        "help": "stages by number, negative from the end (default: -2 -1)",
    },
    "first": {
        "type": float,
        "metavar": "SHARE",
        "help": "share of the rate at the first of these stages (default: 0.25)",
    },
    "options": {
        "flag": "--option",
        "type": _option,
        "action": "append",
        "metavar": "NAME=VALUE",
        "help": "an option of the regularizer, such as layout=NHWC; repeatable",
    },
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
        summary = (inspect.getdoc(preset) or "").partition("\n")[0].replace("`", "")
        one = names.add_parser(preset.__name__, parents=[shared], help=summary, description=summary)
        add_model(one)
        for name in _own(preset):
            given = {"flag": f"--{name.replace('_', '-')}", **_ARGUMENTS[name]}
            one.add_argument(given.pop("flag"), dest=name, **given)
        one.set_defaults(run=_run, preset=preset)


def _own(preset: Any) -> list[str]:
    """The arguments of a preset that the command takes."""
    names = inspect.signature(preset).parameters
    return [name for name in names if name not in ("model", "example_input")]


def _run(options: argparse.Namespace) -> Result:
    model = model_of(options.model)
    given = {name: getattr(options, name) for name in _own(options.preset)}
    given.update(given.pop("options", None) or ())
    given = {name: value for name, value in given.items() if value is not None}
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
        match(entry.selector, index)  # by_stage takes no model, and does not check the stages
    return Result(lambda width: spec.to_yaml().rstrip(), spec.to_plain())
