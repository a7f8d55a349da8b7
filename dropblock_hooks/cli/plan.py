"""``dropblock-hooks plan MODEL SPEC``."""

import argparse
import sys

from ..planning.plan import plan
from ..planning.table import PlanRow
from ..tables import Table, counted
from .models import add_model, count, input_size, model_of, samples
from .result import Result


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_model(command)
    command.add_argument("spec", metavar="SPEC", help="a YAML or JSON file")
    command.add_argument(
        "--epochs",
        type=count,
        metavar="N",
        help="number of epochs, for schedules that do not say theirs",
    )


def run(options: argparse.Namespace) -> Result:
    """Show what a spec will do on a model.

    For each site: shape, block size, rate and expected dropped share. Problems and warnings follow.
    Nothing is trained.
    """
    model = model_of(options.model)
    planned = plan(model, options.spec, samples(model, options), epochs=options.epochs)
    if not options.input_size and any(found.kind == "no_pass" for found in planned.findings):
        size = input_size(model, options)
        print(f"planned without shapes: tried samples of {size}, see --input-size", file=sys.stderr)
    table: Table[PlanRow] = planned
    if options.wide:
        more = {"regularizer": lambda row: row.regularizer, "selector": lambda row: row.selector}
        notes = {"problems": planned.problems, "warnings": planned.warnings}
        table = Table(planned.rows, {**planned.columns, **more}, planned.title, notes=notes)
    data = {
        "sites": planned.to_dict(),
        "problems": planned.problems,
        "warnings": planned.warnings,
    }
    n = len(planned.problems)
    return Result(table.to_text, data, counted(n, "problem") if n else "")
