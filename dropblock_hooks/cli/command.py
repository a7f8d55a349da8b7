"""The commands, each a function from its options to its result; `main` parses and prints.

The docstring of the function is the help text of its command.
"""

import argparse
import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any, NamedTuple

import torch

from .. import __version__
from ..checks import closest
from ..observers.base import Observer
from ..planning.builtin import builtin
from ..planning.plan import plan
from ..planning.recording import layers
from ..presets import by_stage, drop_block_resnet, drop_path, stochastic_depth
from ..quoting import quote
from ..registry import registered
from ..schedules.base import Schedule
from ..selectors.index import Index
from ..selectors.select import match
from ..spec.convert import built, regularizer_from
from ..spec.files import read_yaml
from ..spec.spec import Spec, SpecError
from ..tables import Columns, Short, Table, counted, terminal_width
from .models import CommandError, imported, model_of, samples


class Result(NamedTuple):
    """The text of a command, its data for ``--json``, and why the exit code is 1, if it is."""

    text: str
    data: Any
    failure: str = ""


def _table(table: Table[Any], options: argparse.Namespace) -> Result:
    return Result(table.to_text(options.width, options.wide), table.to_dict())


def _layers(options: argparse.Namespace) -> Result:
    """List the layers of a model: type, output shape, calls per forward and parameters.

    With a selector, list its matches.
    """
    model = model_of(options.model)
    example = samples(model, options.input_size)[:1]
    with torch.device(example.device):  # where a forward makes tensors of its own
        table = layers(model, example)
    if options.selector:
        names = {target.name for target in match(options.selector, Index(model))}
        rows = [row for row in table if row.name in names]
        if not rows:
            text = f"{options.selector} selects no layers; `dropblock-hooks plan` shows it"
            raise CommandError(text)
        table = Table(rows, table.columns)
    return _table(table, options)


def _builtin(options: argparse.Namespace) -> Result:
    """List the dropout that a model already has.

    For each of these layers and attributes: the spec entry that changes its rate, its type and its
    rate.
    """
    return _table(builtin(model_of(options.model)), options)


def _plan(options: argparse.Namespace) -> Result:
    """Show the dry run of a spec on a model.

    For each site: shape, block size, rate and expected dropped share. Problems and warnings follow.
    Nothing is trained. If a plan has no shapes, give the shape of a sample by --input-size.
    """
    model = model_of(options.model)
    example = samples(model, options.input_size)
    planned = plan(model, options.spec, example, epochs=options.epochs)
    text, sites, _ = _table(planned, options)
    data = {"sites": sites, "problems": planned.problems, "warnings": planned.warnings}
    n = len(planned.problems)
    return Result(text, data, counted(n, "problem") if n else "")


def _check(options: argparse.Namespace) -> Result:
    """Check a spec file without a model: print its entries as YAML, or all its problems."""
    spec = Spec.load(options.spec)
    return Result(spec.to_yaml().rstrip(), {"entries": spec.to_plain(), "problems": []})


@dataclass(frozen=True)
class KindRow:
    """A registered class; `kind` is "activation", "gradient", "observer" or "schedule"."""

    name: str
    kind: str
    signature: str
    doc: str


_COLUMNS: Columns[KindRow] = {
    "name": lambda row: row.name,
    "kind": lambda row: row.kind,
    "summary": lambda row: Short(row.doc.partition("\n")[0].rstrip(".")),
}


def _regularizers(options: argparse.Namespace) -> Result:
    """List the regularizers, observers and schedules that a spec can name.

    With a name, print its signature and docstring. --import adds the classes of your module.
    """
    rows = {name: _kind_row(name, cls) for name, cls in registered(object).items()}
    if not options.kind:
        ordered = sorted(rows.values(), key=lambda row: (row.kind, row.name))
        return _table(Table(ordered, _COLUMNS), options)
    if options.kind not in rows:
        raise CommandError(f"unknown class {quote(options.kind)}{closest(options.kind, rows)}")
    row = rows[options.kind]
    return Result(f"{fill(row.signature, options.width)}\n\n{row.doc}", asdict(row))


def _kind_row(name: str, cls: Any) -> KindRow:
    if issubclass(cls, Schedule):
        kind = "schedule"
    else:
        kind = "observer" if issubclass(cls, Observer) else cls.acts_on
    takes = inspect.signature(cls)
    bare = [p.replace(annotation=p.empty) for p in takes.parameters.values()]
    signature = takes.replace(parameters=bare, return_annotation=takes.empty)
    return KindRow(name, kind, f"{name}{signature}", inspect.getdoc(cls) or "")


_PRESETS: dict[str, Callable[..., Spec]] = {
    each.__name__: each for each in (drop_block_resnet, by_stage, stochastic_depth, drop_path)
}


def _preset(options: argparse.Namespace) -> Result:
    """Print a placement from a paper as a spec file: YAML, or JSON with --json.

    dropblock-hooks preset drop_block_resnet resnet50 p=0.2 > spec.yaml
    """
    preset, model = _PRESETS[options.preset], model_of(options.model)
    takes = inspect.signature(preset).parameters
    own = {"model": model, "example_input": samples(model, options.input_size)}
    given = {name: value for name, value in own.items() if name in takes}
    spec = preset(**given, **dict(map(_argument, options.arguments)))
    for entry in spec:
        match(entry.selector, Index(model))  # by_stage takes no model, and does not check it
    return Result(spec.to_yaml().rstrip(), spec.to_plain())


def _argument(text: str) -> tuple[str, Any]:
    """Name and value of an argument: a regularizer, a schedule, or what YAML reads."""
    name, equals, written = text.partition("=")
    if not equals:
        raise CommandError(f"an argument of a preset is ARGUMENT=VALUE, got {text!r}")
    value, _ = read_yaml(written)
    if name == "regularizer":
        return name, regularizer_from(value, (name,))
    if name == "p" and isinstance(value, str | dict):
        return name, built(Schedule, value, (name,))
    return name, value


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], Result], tuple[str, ...]]] = {
    "layers": (_layers, ("model", "selector", "--input-size")),
    "builtin": (_builtin, ("model",)),
    "plan": (_plan, ("model", "spec", "--epochs", "--input-size")),
    "check": (_check, ("spec",)),
    "regularizers": (_regularizers, ("kind",)),
    "preset": (_preset, ("preset", "model", "arguments", "--input-size")),
}
"""The function and the arguments of each command."""

ARGUMENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "model": ("MODEL", "resnet50, torchvision:resnet50 or package.module:factory", {}),
    "--input-size": ("N", "shape of a sample; put it last: 3 224 224", {"nargs": "+", "type": int}),
    "selector": ("SELECTOR", "only these: 'layer3.*', type:Conv2d", {"nargs": "?"}),
    "spec": ("SPEC", "a YAML or JSON file", {}),
    "--epochs": ("N", "number of epochs, for schedules that do not say theirs", {"type": int}),
    "kind": ("NAME", "a name from this list", {"nargs": "?"}),
    "preset": ("NAME", ", ".join(_PRESETS), {"choices": _PRESETS}),
    "arguments": (
        "ARGUMENT=VALUE",
        "an argument of the preset, or an option of its regularizer, as YAML: p=0.2, "
        "'p=LinearSchedule(0.0, 0.2)', 'stages=[-2, -1]', layout=NHWC",
        {"nargs": "*"},
    ),
}
"""The metavar, the help text and the options for ``argparse`` of each argument."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    defaults = argparse.Namespace(modules=[], json=False, wide=False, width=terminal_width())
    options = _parser().parse_args(arguments, defaults)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout holds only the result
            for name in options.modules:
                imported(name)
            result: Result = options.run(options)
    except SpecError as error:
        result = Result("", {"problems": error.problems}, str(error))
    except (CommandError, TypeError, ValueError) as error:
        print(f"dropblock-hooks: {error}", file=sys.stderr)
        return 1
    text = result.text
    if options.json:
        text = json.dumps(result.data, indent=2, allow_nan=False, default=quote)
    try:
        print(text, end="\n" if text else "", flush=True)
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if result.failure:
        print(f"dropblock-hooks: {result.failure}", file=sys.stderr)
    return bool(result.failure)


def _parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    shared = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    shared.add_argument(
        "--import",
        dest="modules",
        action="append",
        metavar="MODULE",
        help="first import a module of yours that registers regularizers; repeatable",
    )
    shared.add_argument("--json", action="store_true", help="print JSON")
    shared.add_argument("--wide", action="store_true", help="shorten nothing")
    parser = argparse.ArgumentParser(
        prog="dropblock-hooks",
        description="Lists the layers of PyTorch models, and shows the effect of a spec on them.",
        epilog="MODEL is a name of timm or torchvision (resnet50, timm:resnet50, "
        "torchvision:resnet50), or package.module:factory, your own function or class, which "
        "is called without arguments.",
        parents=[shared],
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for name, (run, takes) in COMMANDS.items():
        text = inspect.getdoc(run) or ""
        summary = text.partition("\n")[0]
        command = commands.add_parser(name, parents=[shared], help=summary, description=text)
        for argument in takes:
            metavar, help_, options = ARGUMENTS[argument]
            command.add_argument(argument, metavar=metavar, help=help_, **options)
        command.set_defaults(run=run)
    return parser
