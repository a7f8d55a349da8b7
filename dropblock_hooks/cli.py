"""The command ``dropblock-hooks``: a function for each command, and `main`, which prints.

The docstring of a function is the help text of its command. Models are built without downloading
weights, and if possible on the meta device, where they take no memory.
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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import __version__
from .checks import closest
from .observers.base import Observer
from .planning.builtin import builtin
from .planning.dry_run import empty_input, own_input
from .planning.plan import plan
from .planning.recording import layers
from .quoting import described, quote, shown
from .registry import registered
from .schedules.base import Schedule
from .selectors.index import Index
from .selectors.select import match
from .spec.spec import Spec, SpecError
from .tables import Table, counted, terminal_width


class CommandError(Exception):
    """An error that is printed in one line, without a traceback."""


class Result(NamedTuple):
    """The text of a command, its data for ``--json``, and why the exit code is 1, if it is."""

    text: str
    data: Any
    failure: str = ""


def _table(table: Table[Any], options: argparse.Namespace) -> Result:
    return Result(table.to_text(terminal_width(), options.wide), table.to_dict())


def _layers(options: argparse.Namespace) -> Result:
    """List the layers of a model: type, output shape, calls per forward and parameters.

    With a selector, list its matches. For parameters, list the layers that hold them.
    """
    model = _model(options.model)
    example = _samples(model, options.input_size)[:1]
    with torch.device(example.device):  # where a forward makes tensors of its own
        table = layers(model, example)
    if options.selector:
        names = {target.owner for target in match(options.selector, Index(model))}
        table = Table([row for row in table if row.name in names], table.columns)
    return _table(table, options)


def _builtin(options: argparse.Namespace) -> Result:
    """List the dropout that a model already has.

    For each of these layers and attributes: the spec entry that changes its rate, its type and its
    rate.
    """
    return _table(builtin(_model(options.model)), options)


def _plan(options: argparse.Namespace) -> Result:
    """Show the dry run of a spec on a model.

    For each site: shape, block size, rate and expected dropped share. Problems and warnings follow.
    Nothing is trained. If a plan has no shapes, give the shape of a sample by --input-size.
    """
    model = _model(options.model)
    example = _samples(model, options.input_size)
    planned = plan(model, options.spec, example, epochs=options.epochs)
    text, sites, _ = _table(planned, options)
    data = {"sites": sites, "problems": planned.problems, "warnings": planned.warnings}
    n = len(planned.problems)
    return Result(text, data, counted(n, "problem") if n else "")


def _check(options: argparse.Namespace) -> Result:
    """Check a spec file without a model: print its entries as YAML, or all its problems."""
    spec = Spec.load(options.spec)
    return Result(spec.to_yaml().rstrip(), {"entries": spec.to_plain(), "problems": []})


def _regularizers(options: argparse.Namespace) -> Result:
    """List the regularizers, observers and schedules that a spec can name.

    With a name, print its signature and docstring.
    """
    known: dict[str, Any] = registered(object)
    name = options.kind
    if name is None:
        rows = sorted((_kind(cls), each, cls.__doc__) for each, cls in known.items())
        keys = ("kind", "name", "summary")
        data = [dict(zip(keys, (*row, doc.partition("\n")[0]), strict=True)) for *row, doc in rows]
        lines = [f"{row['name']:18}{row['kind']:12}{row['summary']}" for row in data]
        return Result("\n".join(lines), data)
    if name not in known:
        raise CommandError(f"unknown class {quote(name)}{closest(name, known)}")
    signature = inspect.signature(known[name])
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    call = f"{name}{signature.replace(parameters=bare, return_annotation=signature.empty)}"
    doc = inspect.getdoc(known[name])
    return Result(f"{fill(call, terminal_width())}\n\n{doc}", {"signature": call, "doc": doc})


def _kind(cls: Any) -> str:
    if issubclass(cls, Schedule):
        return "schedule"
    return "observer" if issubclass(cls, Observer) else str(cls.acts_on)


def _model(name: str) -> nn.Module:
    """Build the model of timm with this name, or call the user's ``package.module:factory``."""
    make = _imported(name) if ":" in name else _timm_model(name)
    with contextlib.suppress(TypeError, ValueError):  # not everything has a signature
        takes = inspect.signature(make).parameters
        # the builders of torchvision may download weights by default
        given = {key: None for key in ("weights", "weights_backbone") if key in takes}
        make = partial(make, **given) if given else make
    try:
        with torch.device("meta"):
            model = make()
    except Exception:  # a constructor that reads numbers fails on the meta device
        model = _called(make, f"making {name}")
    if not isinstance(model, nn.Module):
        raise CommandError(f"{name} must make a torch.nn.Module, got {shown(model)}")
    return model


def _timm_model(name: str) -> Callable[[], Any]:
    try:
        import timm
    except ImportError as error:
        raise CommandError("models come from timm: pip install 'dropblock-hooks[timm]'") from error
    if not timm.is_model(name):
        hint = closest(name, timm.list_models())
        raise CommandError(f"unknown model {quote(name)}{hint}; yours is package.module:factory")
    return partial(timm.create_model, name)


def _imported(name: str) -> Any:
    """Import a member of a module, also from the current folder."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return _called(partial(pkgutil.resolve_name, name), f"importing {name}")


def _called(function: Callable[[], Any], doing: str) -> Any:
    """Call code of the user, which may raise anything."""
    try:
        return function()
    except Exception as error:
        raise CommandError(f"{doing} raised {described(error)}") from error


def _samples(model: nn.Module, input_size: list[int] | None) -> Tensor:
    """Two samples of zeros, by default of the size that the model's configuration states."""
    own = None if input_size else own_input(model)
    return empty_input(model, input_size or (3, 224, 224)) if own is None else own


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], Result], tuple[str, ...]]] = {
    "layers": (_layers, ("model", "selector", "--input-size")),
    "builtin": (_builtin, ("model",)),
    "plan": (_plan, ("model", "spec", "--epochs", "--input-size")),
    "check": (_check, ("spec",)),
    "regularizers": (_regularizers, ("kind",)),
}
"""The function and the arguments of each command."""

ARGUMENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "model": (
        "MODEL",
        "a name of timm (resnet50), or package.module:factory, a function or class that is "
        "called without arguments (torchvision.models:resnet50)",
        {},
    ),
    "--input-size": ("N", "shape of a sample; put it last: 3 224 224", {"nargs": "+", "type": int}),
    "selector": ("SELECTOR", "only these: 'layer3.*', type:Conv2d", {"nargs": "?"}),
    "spec": ("SPEC", "a YAML or JSON file", {}),
    "--epochs": ("N", "number of epochs, for schedules that do not say theirs", {"type": int}),
    "kind": ("NAME", "a name from this list", {"nargs": "?"}),
}
"""The metavar, the help text and the options for ``argparse`` of each argument."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parser().parse_args(
        arguments, argparse.Namespace(json=False, wide=False, modules=[])
    )
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout holds only the result
            for name in options.modules:
                _imported(name)
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
    shared = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    shared.add_argument("--json", action="store_true", help="print JSON")
    shared.add_argument("--wide", action="store_true", help="shorten nothing")
    shared.add_argument(
        "--import",
        dest="modules",
        action="append",
        metavar="MODULE",
        help="first import a module of yours that registers regularizers; repeatable",
    )
    parser = argparse.ArgumentParser(
        prog="dropblock-hooks",
        description="Lists the layers of PyTorch models, and shows the effect of a spec on them.",
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
