"""``dropblock-hooks layers MODEL [SELECTOR]``."""

import argparse
import sys

import torch
from torch import nn

from ..planning.dry_run import DryRunError
from ..planning.layers import LayerRow, layers
from ..selectors.index import Index
from ..selectors.select import match
from ..tables import Table
from .models import add_model, input_size, model_of, samples
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
    if not options.selector:
        return of_table(_layers(model, options))
    chosen = match(options.selector, Index(model))
    if chosen[0].form:
        raise CommandError(
            f"{chosen[0].form}: selects no layers; `dropblock-hooks plan` lists parameters that a "
            "spec selects, and `dropblock-hooks builtin` lists rates"
        )
    table = _layers(model, options)
    names = {target.name for target in chosen}
    return of_table(Table([row for row in table if row.name in names], table.columns))


def _layers(model: nn.Module, options: argparse.Namespace) -> Table[LayerRow]:
    example = samples(model, options, 1)
    try:
        with torch.device(example.device):  # where a forward makes tensors of its own
            return layers(model, example)
    except DryRunError as error:
        size = input_size(model, options)
        problem = f"{options.model} can't run on inputs of shape {size}: {error.reason}"
        if options.input_size:
            raise CommandError(problem) from error
        print(f"{problem}; listed without shapes, see --input-size", file=sys.stderr)
        return layers(model)
