"""``dropblock-hooks builtin MODEL``."""

import argparse

from ..planning.builtin import builtin
from .models import add_model, model_of
from .result import Result, of_table

add_arguments = add_model


def run(options: argparse.Namespace) -> Result:
    """List the dropout that a model already has.

    For each of these layers and attributes: the spec entry that changes its rate, its type and its
    rate.
    """
    return of_table(builtin(model_of(options.model)))
