"""``main``: shared options, printing, exit codes."""

import argparse
import contextlib
import inspect
import json
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..quoting import quote
from ..spec.spec import SpecError
from ..tables import terminal_width
from . import builtin, check, layers, plan, preset, regularizers
from .models import imported
from .result import CommandError, Result

_COMMANDS = (layers, builtin, plan, check, regularizers, preset)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    defaults = argparse.Namespace(modules=[], json=False, wide=False)
    options = _parser().parse_args(arguments, defaults)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout holds only the result
            for name in options.modules:
                imported(name)
            result: Result = options.run(options)
    except SpecError as error:
        result = Result(lambda width, wide: "", {"problems": error.problems}, str(error))
    except (CommandError, TypeError, ValueError) as error:
        print(f"dropblock-hooks: {error}", file=sys.stderr)
        return 1
    try:
        _print(result, options)
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if result.failure:
        print(f"dropblock-hooks: {result.failure}", file=sys.stderr)
    return bool(result.failure)


def _print(result: Result, options: argparse.Namespace) -> None:
    if options.json:
        text = json.dumps(result.data, indent=2, allow_nan=False, default=quote)
    else:
        text = result.text(terminal_width(), options.wide)
    if text:
        print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    """The parser of all commands; the help of a command is the docstring of its `run`."""
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
        description="Regularizers on the layers of PyTorch models: what a model has, and what a "
        "spec does.",
        epilog="MODEL is a name of timm or torchvision (resnet50, timm:resnet50, "
        "torchvision:resnet50), or package.module:factory, a function or class of yours that is "
        "called without arguments.",
        parents=[shared],
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for module in _COMMANDS:
        text = inspect.getdoc(module.run) or ""
        command = commands.add_parser(
            module.__name__.rpartition(".")[2],
            parents=[shared],
            help=text.partition("\n")[0],
            description=text,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
