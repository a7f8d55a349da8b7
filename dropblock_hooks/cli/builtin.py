"""``dropblock-hooks builtin MODEL``."""

import argparse

from ..planning.builtin import builtin
from .models import add_model, model_of
from .result import Commands, Result, of_table


def add_builtin(commands: Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "builtin",
        parents=[shared],
        help="list what a model drops by itself",
        description="List the layers of a model that drop by themselves, and rates that modules "
        "hold: the entry of a spec that gives each another rate, its type and its rate.",
    )
    add_model(command)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> Result:
    return of_table(builtin(model_of(options.model)))
