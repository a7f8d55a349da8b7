"""``dropblock-hooks preset NAME MODEL [ARGUMENT=VALUE ...]``."""

import argparse
import inspect
from typing import Any

from ..presets import by_stage, drop_block_resnet, drop_path, stochastic_depth
from ..selectors.index import Index
from ..selectors.select import match
from ..spec.convert import regularizer_from, schedule_from
from ..spec.files import read_yaml
from .models import add_model, model_of, samples
from .result import CommandError, Result

_PRESETS: dict[str, Any] = {
    each.__name__: each for each in (drop_block_resnet, by_stage, stochastic_depth, drop_path)
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", metavar="NAME", choices=_PRESETS, help=", ".join(_PRESETS))
    add_model(command)
    command.add_argument(
        "arguments",
        nargs="*",
        metavar="ARGUMENT=VALUE",
        help="an argument of the preset, or an option of its regularizer, as YAML: p=0.2, "
        "'p=LinearSchedule(0.0, 0.2)', 'stages=[-2, -1]', layout=NHWC",
    )


def run(options: argparse.Namespace) -> Result:
    """Print a placement from a paper as a spec file: YAML, or JSON with --json.

    dropblock-hooks preset drop_block_resnet resnet50 p=0.2 > spec.yaml
    """
    preset, model = _PRESETS[options.name], model_of(options.model)
    takes = inspect.signature(preset).parameters
    own = {"model": model, "example_input": samples(model, options)}
    given = {name: value for name, value in own.items() if name in takes}
    spec = preset(**given, **dict(map(_argument, options.arguments)))
    index = Index(model)
    for entry in spec:
        match(entry.selector, index)  # by_stage takes no model, and does not check the stages
    return Result(lambda width, wide: spec.to_yaml().rstrip(), spec.to_plain())


def _argument(text: str) -> tuple[str, Any]:
    """Name and value of an argument: a regularizer, a schedule, or what YAML reads."""
    name, equals, written = text.partition("=")
    if not equals:
        raise CommandError(f"an argument of a preset is ARGUMENT=VALUE, got {text!r}")
    value, _ = read_yaml(written)
    if name == "regularizer":
        return name, regularizer_from(value, (name,))
    if name == "p" and isinstance(value, str | dict):
        return name, schedule_from(value, (name,))
    return name, value
