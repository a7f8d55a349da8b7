"""``dropblock-hooks plan MODEL SPEC``."""

import argparse
import sys

from ..planning.plan import plan
from ..planning.table import PlanRow
from ..tables import Table, counted
from .models import add_model, input_size, model_of, samples
from .result import Commands, Result, count


def add_plan(commands: Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "plan",
        parents=[shared],
        help="show what a spec will do on a model",
        description="Show what a spec file will do on a model: shapes, calls, blocks and expected "
        "drop of each site, and what is wrong. Nothing is trained.",
    )
    add_model(command)
    command.add_argument(
        "spec", metavar="SPEC", help="a YAML or JSON file: selectors and their regularizers"
    )
    command.add_argument(
        "--epochs",
        type=count,
        metavar="N",
        help="length of the training, which schedules without epochs of their own follow",
    )
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> Result:
    model = model_of(options.model)
    planned = plan(model, options.spec, samples(model, options), epochs=options.epochs)
    if not options.input_size and any(c.kind == "no_pass" for c in planned.findings):
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
