"""``dropblock-hooks layers MODEL [SELECTOR]``."""

import argparse

import torch

from ..planning.layers import layers
from ..selectors.index import Index
from ..selectors.select import match
from ..tables import Table
from .models import add_model, model_of, samples
from .result import CommandError, Result, of_table


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_model(command)
    command.add_argument(
        "selector",
        nargs="?",
        metavar="SELECTOR",
        help="only these: 'layer3.*', type:Conv2d",
    )


def run(options: argparse.Namespace) -> Result:
    """List the layers of a model: type, output shape, calls per forward and parameters.

    With a selector, list what it matches.
    """
    model = model_of(options.model)
    example = samples(model, options)[:1]
    with torch.device(example.device):  # where a forward makes tensors of its own
        table = layers(model, example)
    if not options.selector:
        return of_table(table)
    names = {target.name for target in match(options.selector, Index(model))}
    rows = [row for row in table if row.name in names]
    if not rows:
        raise CommandError(f"{options.selector} selects no layers; `dropblock-hooks plan` shows it")
    return of_table(Table(rows, table.columns))
