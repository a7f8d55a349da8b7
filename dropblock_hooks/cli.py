"""The command ``dropblock-hooks``."""

import argparse
import inspect
import sys
from collections.abc import Sequence

import torch
from torch import nn

from .checks import closest
from .planning.dry_run import DryRunError
from .planning.layers import layers
from .planning.plan import own_input, plan
from .selectors.index import Index, NoMatchError
from .selectors.select import match
from .spec.draft import SpecError


class CommandError(Exception):
    """What the user of the command has to know; no traceback."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    options = _parser().parse_args(arguments)
    try:
        text, code = options.run(options)
        print(text)
    except CommandError as error:
        print(f"dropblock-hooks: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader (head, less) has seen enough
        return 0
    return int(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dropblock-hooks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser(
        "layers",
        help="list what regularizers can be attached to",
        description="List the layers of a timm or torchvision model: name, type, output shape, "
        "calls per forward and parameters. Nothing is downloaded; no memory is taken for weights.",
    )
    show.set_defaults(run=_layers)
    dry = commands.add_parser(
        "plan",
        help="show what a spec will do",
        description="Show what a spec file will do on a timm or torchvision model: shapes, calls, "
        "blocks and expected drop of each site, and what is wrong. Nothing is trained.",
    )
    dry.set_defaults(run=_plan)
    for command in (show, dry):
        command.add_argument("model", help="a model name, for example resnet50")
        command.add_argument(
            "--input-size", nargs="+", type=int, metavar="N", help="shape of one sample: 3 224 224"
        )
    show.add_argument("selector", nargs="?", help="only these layers, for example 'layer3.*'")
    dry.add_argument("spec", help="a YAML or JSON file: selectors and their regularizers")
    return parser


def _layers(options: argparse.Namespace) -> tuple[str, int]:
    with torch.device("meta"):
        model = create_model(options.model)
        size = _input_size(model, options)
        try:
            table = layers(model, torch.empty(1, *size))
        except DryRunError as error:
            problem = f"{options.model} can't run on inputs of shape {size}: {error.reason}"
            if options.input_size:
                raise CommandError(problem) from error
            print(f"{problem}; listed without shapes, see --input-size", file=sys.stderr)
            table = layers(model)
    if options.selector:
        try:
            names = {target.name for target in match(options.selector, Index(model))}
        except NoMatchError as error:
            raise CommandError(str(error)) from error
        table = type(table)([row for row in table if row.name in names], table.columns)
    return str(table), 0


def _plan(options: argparse.Namespace) -> tuple[str, int]:
    with torch.device("meta"):
        model = create_model(options.model)
    size = _input_size(model, options)
    try:
        planned = plan(model, options.spec, torch.empty(2, *size, device="meta"))
    except SpecError as error:
        raise CommandError(str(error)) from error
    return str(planned), 1 if planned.problems else 0


def _input_size(model: nn.Module, options: argparse.Namespace) -> tuple[int, ...]:
    own = own_input(model)
    told = (3, 224, 224) if own is None else own.shape[1:]
    size = tuple(options.input_size or told)
    if min(size) < 1:
        raise CommandError(f"--input-size takes integers >= 1, got {size}")
    return size


def create_model(name: str) -> nn.Module:
    """A model of timm, or else of torchvision, without pretrained weights."""
    try:
        import timm
        import torchvision
    except ImportError as error:
        raise CommandError(
            f"models come from timm: pip install 'dropblock-hooks[timm]' ({error})"
        ) from error
    if timm.is_model(name):
        model: nn.Module = timm.create_model(name, pretrained=False)
        return model
    known = torchvision.models.list_models()
    if name in known:
        builder = torchvision.models.get_model_builder(name)
        takes = inspect.signature(builder).parameters
        nothing = {key: None for key in ("weights", "weights_backbone") if key in takes}
        found: nn.Module = builder(**nothing)
        return found
    raise CommandError(f"unknown model {name!r}{closest(name, [*timm.list_models(), *known])}")
