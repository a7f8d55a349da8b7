"""``dropblock-hooks plan MODEL SPEC``."""

import argparse

from ..planning.plan import plan
from ..planning.table import PlanRow
from ..tables import Table, counted
from .models import add_model, model_of, samples
from .result import Result


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_model(command)
    command.add_argument("spec", metavar="SPEC", help="a YAML or JSON file")
    command.add_argument(
        "--epochs",
        type=int,
        metavar="N",
        help="number of epochs, for schedules that do not say theirs",
    )


def run(options: argparse.Namespace) -> Result:
    """Show what a spec will do on a model.

    For each site: shape, block size, rate and expected dropped share. Problems and warnings follow.
    Nothing is trained. If a plan has no shapes, give the shape of one sample by --input-size.
    """
    model = model_of(options.model)
    planned = plan(model, options.spec, samples(model, options), epochs=options.epochs)
    told = {"problems": planned.problems, "warnings": planned.warnings}
    table: Table[PlanRow] = planned
    if options.wide:
        more = {"regularizer": lambda row: row.regularizer, "selector": lambda row: row.selector}
        table = Table(planned.rows, {**planned.columns, **more}, planned.title, notes=told)
    n = len(planned.problems)
    data = {"sites": planned.to_dict(), **told}
    return Result(table.to_text, data, counted(n, "problem") if n else "")
