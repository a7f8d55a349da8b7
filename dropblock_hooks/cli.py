"""The command ``dropblock-hooks``: a function for each command, whose docstring is its help text.

Models are built without weights, and if possible on the meta device, where they take no memory.
"""

import argparse
import contextlib
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from textwrap import fill
from typing import Any

import torch
from torch import Tensor, nn

from . import __version__
from .checks import closest
from .observers.base import Observer
from .planning.builtin import builtin
from .planning.dry_run import empty_input, own_input
from .planning.plan import Plan, plan
from .planning.recording import layers
from .quoting import described, quote, shown
from .registry import registered
from .selectors.index import Index
from .selectors.select import match
from .specs.spec import Spec
from .tables import Table, counted, table_width, terminal_width


def _layers(options: argparse.Namespace) -> Table[Any]:
    """List the layers of a model: type, output shape, calls per forward and parameters.

    With a selector, list its matches. For parameters, list the layers that hold them.
    """
    model = _model(options.model)
    example = _samples(model, options.input_size)[:1]  # in evaluation, norms need no second sample
    with torch.device(example.device):  # a forward may make tensors without a device
        table = layers(model, example)
    if not options.selector:
        return table

    names = {target.owner for target in match(options.selector, Index(model))}
    rows = [row for row in table if row.name in names]
    return Table(rows, table.columns)


def _builtin(options: argparse.Namespace) -> Table[Any]:
    """List the model's own dropouts, with the entries of a spec that change their rates."""
    return builtin(_model(options.model))


def _plan(options: argparse.Namespace) -> Plan:
    """Show the dry run of a spec on a model.

    For each site: shape, block size, rate and expected dropped share. Problems and warnings follow.
    Nothing is trained. If a plan has no shapes, give the shape of a sample by --input-size.
    """
    model = _model(options.model)
    samples = _samples(model, options.input_size)
    return plan(model, options.spec, samples, epochs=options.epochs)


def _check(options: argparse.Namespace) -> str:
    """Check a spec file without a model: print its entries as YAML, or all its problems."""
    return Spec.load(options.spec).to_yaml().rstrip()


def _regularizers(options: argparse.Namespace) -> str:
    """List the regularizers, observers and schedules for specs; with a name, describe this one."""
    known: dict[str, Any] = registered(object)
    name = options.name
    if name is None:
        by_kind = sorted(known, key=lambda known_name: (_kind(known[known_name]), known_name))
        return "\n".join(_summary(known_name, known[known_name]) for known_name in by_kind)
    if name not in known:
        raise ValueError(f"unknown class {quote(name)}{closest(name, known)}")

    parameters = inspect.signature(known[name]).parameters.values()
    arguments = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
    call = fill(f"{name}{arguments}", terminal_width())
    return f"{call}\n\n{inspect.getdoc(known[name])}"


def _summary(name: str, cls: Any) -> str:
    """Return a line of the list of classes: name, kind and the first line of the docstring."""
    first_line = cls.__doc__.split("\n")[0]
    return f"{name:18}{_kind(cls):12}{first_line}"


def _kind(cls: Any) -> str:
    """Return the kind of a class: observer, schedule, activation or gradient."""
    if issubclass(cls, Observer):
        return "observer"
    return str(getattr(cls, "acts_on", "schedule"))


def _model(name: str) -> nn.Module:
    """Build the model of timm with this name, or call the user's ``package.module:factory``."""
    make = _imported(name) if ":" in name else _builder_of_timm(name)
    with contextlib.suppress(TypeError, ValueError):  # some callables have no signature
        parameters = inspect.signature(make).parameters
        # the builders of torchvision may download weights by default
        no_weights = {key: None for key in ("weights", "weights_backbone") if key in parameters}
        make = partial(make, **no_weights)

    try:
        with torch.device("meta"):
            model = make()
    except Exception:  # a constructor that reads numbers fails on the meta device
        model = _called(make, f"making {name}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} must make a torch.nn.Module, got {shown(model)}")
    return model


def _builder_of_timm(name: str) -> Callable[..., nn.Module]:
    """Return the function that builds the model of timm with this name."""
    try:
        import timm
    except ImportError as error:
        message = "models come from timm: pip install 'dropblock-hooks[timm]'"
        raise ValueError(message) from error

    if not timm.is_model(name):
        hint = closest(name, timm.list_models())
        raise ValueError(f"unknown model {quote(name)}{hint}; yours is package.module:factory")
    return partial(timm.create_model, name)


def _imported(name: str) -> Any:
    """Import a module, or a member such as ``module:name``, also from the current folder."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return _called(partial(pkgutil.resolve_name, name), f"importing {name}")


def _called(function: Callable[[], Any], doing: str) -> Any:
    """Call code of the user, which may raise anything."""
    try:
        return function()
    except Exception as error:
        raise ValueError(f"{doing} raised {described(error)}") from error


def _samples(model: nn.Module, input_size: list[int] | None) -> Tensor:
    """Return two samples of zeros, by default of the size in the model's configuration."""
    if not input_size:
        configured = own_input(model)
        if configured is not None:
            return configured
    return empty_input(model, input_size or (3, 224, 224))


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], Any], tuple[str, ...]]] = {
    "layers": (_layers, ("model", "selector", "--input-size")),
    "builtin": (_builtin, ("model",)),
    "plan": (_plan, ("model", "spec", "--epochs", "--input-size")),
    "check": (_check, ("spec",)),
    "regularizers": (_regularizers, ("name",)),
}

ARGUMENTS: dict[str, dict[str, Any]] = {
    "model": {"help": "a model of timm, or package.module:factory, called without arguments"},
    "--input-size": {
        "help": "shape of a sample, such as 3 224 224; give this option after all names",
        "nargs": "+",
        "type": int,
    },
    "selector": {"help": "only these: 'layer3.*', type:Conv2d", "nargs": "?"},
    "spec": {"help": "a YAML or JSON file"},
    "--epochs": {"help": "length of the training, for schedules without epochs", "type": int},
    "name": {"help": "a name from this list", "nargs": "?"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 1 if it failed or a plan has problems."""
    defaults = argparse.Namespace(json=False, wide=False, modules=[], more_modules=[])
    options = _parser().parse_args(arguments, defaults)
    text = ""
    failure = ""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout holds only the result
            for name in options.modules + options.more_modules:
                _imported(name)
            result = options.run(options)
        text = _printed(result, options)
        if isinstance(result, Plan) and result.problems:
            failure = counted(len(result.problems), "problem")
    except (RuntimeError, TypeError, ValueError) as error:
        failure = str(error)

    try:
        print(text, end="\n" if text else "", flush=True)
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0

    if failure:
        print(f"dropblock-hooks: {failure}", file=sys.stderr)
    return 1 if failure else 0


def _printed(result: Table[Any] | str, options: argparse.Namespace) -> str:
    """Return the text to print for a result: its own text, or a table as text or JSON."""
    if isinstance(result, str):
        return result
    if not options.json:
        return result.to_text(table_width(), options.wide)

    data: Any = result.to_dict()
    if isinstance(result, Plan):
        data = {"sites": data, "problems": result.problems, "warnings": result.warnings}
    return json.dumps(data, indent=2, allow_nan=False, default=quote)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command, with a subparser for each of `COMMANDS`."""
    parser = argparse.ArgumentParser(
        "dropblock-hooks",
        description="Lists the layers of PyTorch models, and shows the effect of a spec on them.",
        parents=[_shared_options("modules")],
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")

    # with one attribute for both, the modules after the command would replace those before it
    shared = _shared_options("more_modules")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for name, (run, arguments) in COMMANDS.items():
        description = inspect.getdoc(run) or ""
        summary = description.partition("\n")[0]
        command = commands.add_parser(name, parents=[shared], help=summary, description=description)
        command.set_defaults(run=run)
        for argument in arguments:
            metavar = argument.lstrip("-").upper()
            command.add_argument(argument, metavar=metavar, **ARGUMENTS[argument])
    return parser


def _shared_options(modules: str) -> argparse.ArgumentParser:
    """Return the options that are allowed before and after the command.

    `modules` is the attribute that gets the names of modules to import.
    """
    # without SUPPRESS, the defaults after the command would replace the values before it
    shared = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    shared.add_argument("--json", action="store_true", help="print tables as JSON")
    shared.add_argument("--wide", action="store_true", help="shorten nothing")
    shared.add_argument(
        "--import",
        dest=modules,
        action="append",
        metavar="MODULE",
        help="first import a module of yours that registers regularizers; repeatable",
    )
    return shared
