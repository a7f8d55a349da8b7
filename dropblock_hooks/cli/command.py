"""``main``: the parser, printing and exit codes."""

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
from .commands import ARGUMENTS, COMMANDS, Result
from .models import CommandError, imported


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
            command.add_argument(argument, **ARGUMENTS[argument])
        command.set_defaults(run=run)
    return parser
