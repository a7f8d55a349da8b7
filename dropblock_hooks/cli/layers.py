"""``dropblock-hooks layers MODEL [SELECTOR]``."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..planning.dry_run import DryRunError
from ..planning.layers import LayerRow, layers
from ..selectors.index import Index, Target
from ..selectors.select import match
from ..tables import Table
from .models import add_model, input_size, model_of, samples
from .result import CommandError, Commands, Result, of_table


def add_layers(commands: Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "layers",
        parents=[shared],
        help="list what regularizers can be attached to",
        description="List the layers of a model: name, type, output shape, calls per forward and "
        "parameters. Nothing is downloaded; no memory is taken for weights.",
    )
    add_model(command)
    command.add_argument(
        "selector",
        nargs="?",
        metavar="SELECTOR",
        help="only these: 'layer3.*', type:Conv2d, or parameters by 'param:fc.*'",
    )
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> Result:
    model = model_of(options.model)
    chosen = match(options.selector, Index(model)) if options.selector else None
    if chosen is not None and chosen[0].parameter is not None:
        return of_table(_parameters(chosen))
    if chosen is not None and chosen[0].attribute is not None:
        raise CommandError("attr: names rates, which `dropblock-hooks builtin` lists")
    table = _layers(model, options)
    if chosen is not None:
        names = {target.name for target in chosen}
        table = Table([row for row in table if row.name in names], table.columns)
    return of_table(table)


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


@dataclass(frozen=True)
class ParameterRow:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    elements: int
    trainable: bool


def _parameters(targets: Sequence[Target]) -> Table[ParameterRow]:
    found = [(t.name, t.module._parameters[t.parameter or ""]) for t in targets]
    rows = [
        ParameterRow(name, tuple(p.shape), p.numel(), p.requires_grad)
        for name, p in found
        if p is not None
    ]
    columns: dict[str, Any] = {
        "parameter": lambda row: row.name,
        "shape": lambda row: row.shape,
        "elements": lambda row: row.elements,
        "trainable": lambda row: "yes" if row.trainable else "no",
    }
    return Table(rows, columns)
