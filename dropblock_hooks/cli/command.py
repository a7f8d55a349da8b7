"""``main``: shared options, printing, exit codes."""

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Sequence

from .. import __version__
from ..quoting import quote
from ..selectors.index import NoMatchError
from ..spec.draft import SpecError
from ..tables import UNLIMITED, WIDTH
from .builtin import add_builtin
from .check import add_check
from .layers import add_layers
from .models import import_module
from .plan import add_plan
from .preset import add_preset
from .regularizers import add_regularizers
from .result import CommandError, Result, all_problems

_COMMANDS = (add_layers, add_builtin, add_plan, add_check, add_regularizers, add_preset)
_NARROWEST = 80


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    shared = _shared_options()
    defaults = argparse.Namespace(modules=[], json=False, wide=False)
    options, rest = shared.parse_known_args(arguments, defaults)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout holds only the result
            for name in options.modules:
                import_module(name)
        options = _parser(shared).parse_args(rest, options)
        with contextlib.redirect_stdout(sys.stderr):
            result: Result = options.run(options)
    except SpecError as error:
        data = {"problems": list(error.problems)}
        result = Result(lambda width: "", data, all_problems(error))
    except (CommandError, NoMatchError) as error:
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
        columns = shutil.get_terminal_size((WIDTH, 24)).columns
        width = UNLIMITED if options.wide else max(_NARROWEST, min(WIDTH, columns))
        text = result.text(width)
    if text:
        print(text, flush=True)


def _shared_options() -> argparse.ArgumentParser:
    """The options that all commands take, before or after the command."""
    shared = argparse.ArgumentParser(
        prog="dropblock-hooks",
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    shared.add_argument(
        "--import",
        dest="modules",
        action="append",
        metavar="MODULE",
        help="first import a module of yours that registers regularizers; repeatable",
    )
    shared.add_argument("--json", action="store_true", help="print JSON")
    shared.add_argument("--wide", action="store_true", help="shorten nothing")
    return shared


def _parser(shared: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=shared.prog,
        description="Regularizers on the layers of PyTorch models: what a model has, and what a "
        "spec does.",
        epilog="MODEL is a name of timm or torchvision (resnet50, timm:resnet50, "
        "torchvision:resnet50), or package.module:factory, a function or class of yours that is "
        "called without arguments.",
        parents=[shared],
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for add in _COMMANDS:
        add(commands, shared)
    return parser
