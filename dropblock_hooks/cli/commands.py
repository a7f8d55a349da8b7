"""The commands: from the options of a command to its result."""

import argparse
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any, NamedTuple

import torch

from ..checks import closest
from ..observers.base import Observer
from ..planning.builtin import builtin
from ..planning.layers import layers
from ..planning.plan import plan
from ..presets import by_stage, drop_block_resnet, drop_path, stochastic_depth
from ..quoting import quote
from ..registry import registered
from ..schedules.base import Schedule
from ..selectors.index import Index
from ..selectors.select import match
from ..spec.convert import built, regularizer_from
from ..spec.files import read_yaml
from ..spec.spec import Spec
from ..tables import Columns, Short, Table, counted
from .models import CommandError, model_of, samples


class Result(NamedTuple):
    """The text of a command, its data for ``--json``, and why the exit code is 1, if it is."""

    text: str
    data: Any
    failure: str = ""


def _table(table: Table[Any], options: argparse.Namespace) -> Result:
    return Result(table.to_text(options.width, options.wide), table.to_dict())


def _layers(options: argparse.Namespace) -> Result:
    """List the layers of a model: type, output shape, calls per forward and parameters.

    With a selector, list its matches.
    """
    model = model_of(options.model)
    example = samples(model, options.input_size)[:1]
    with torch.device(example.device):  # where a forward makes tensors of its own
        table = layers(model, example)
    if options.selector:
        names = {target.name for target in match(options.selector, Index(model))}
        rows = [row for row in table if row.name in names]
        if not rows:
            text = f"{options.selector} selects no layers; `dropblock-hooks plan` shows it"
            raise CommandError(text)
        table = Table(rows, table.columns)
    return _table(table, options)


def _builtin(options: argparse.Namespace) -> Result:
    """List the dropout that a model already has.

    For each of these layers and attributes: the spec entry that changes its rate, its type and its
    rate.
    """
    return _table(builtin(model_of(options.model)), options)


def _plan(options: argparse.Namespace) -> Result:
    """Show the dry run of a spec on a model.

    For each site: shape, block size, rate and expected dropped share. Problems and warnings follow.
    Nothing is trained. If a plan has no shapes, give the shape of one sample by --input-size.
    """
    model = model_of(options.model)
    example = samples(model, options.input_size)
    planned = plan(model, options.spec, example, epochs=options.epochs)
    text, sites, _ = _table(planned, options)
    data = {"sites": sites, "problems": planned.problems, "warnings": planned.warnings}
    n = len(planned.problems)
    return Result(text, data, counted(n, "problem") if n else "")


def _check(options: argparse.Namespace) -> Result:
    """Check a spec file without a model: print its entries as YAML, or all its problems."""
    spec = Spec.load(options.spec)
    return Result(spec.to_yaml().rstrip(), {"entries": spec.to_plain(), "problems": []})


@dataclass(frozen=True)
class KindRow:
    """A registered class; `kind` is "activation", "gradient", "observer" or "schedule"."""

    name: str
    kind: str
    signature: str
    doc: str


_COLUMNS: Columns[KindRow] = {
    "name": lambda row: row.name,
    "kind": lambda row: row.kind,
    "summary": lambda row: Short(row.doc.partition("\n")[0].rstrip(".")),
}


def _regularizers(options: argparse.Namespace) -> Result:
    """List the regularizers, observers and schedules that a spec can name.

    With a name, print its signature and docstring. --import adds the classes of your module.
    """
    rows = {name: _kind_row(name, cls) for name, cls in registered(object).items()}
    if not options.kind:
        ordered = sorted(rows.values(), key=lambda row: (row.kind, row.name))
        return _table(Table(ordered, _COLUMNS), options)
    if options.kind not in rows:
        raise CommandError(f"unknown class {quote(options.kind)}{closest(options.kind, rows)}")
    row = rows[options.kind]
    return Result(f"{fill(row.signature, options.width)}\n\n{row.doc}", asdict(row))


def _kind_row(name: str, cls: Any) -> KindRow:
    if issubclass(cls, Schedule):
        kind = "schedule"
    else:
        kind = "observer" if issubclass(cls, Observer) else cls.acts_on
    takes = inspect.signature(cls)
    bare = [p.replace(annotation=p.empty) for p in takes.parameters.values()]
    signature = takes.replace(parameters=bare, return_annotation=takes.empty)
    return KindRow(name, kind, f"{name}{signature}", inspect.getdoc(cls) or "")


_PRESETS: dict[str, Callable[..., Spec]] = {
    each.__name__: each for each in (drop_block_resnet, by_stage, stochastic_depth, drop_path)
}


def _preset(options: argparse.Namespace) -> Result:
    """Print a placement from a paper as a spec file: YAML, or JSON with --json.

    dropblock-hooks preset drop_block_resnet resnet50 p=0.2 > spec.yaml
    """
    preset, model = _PRESETS[options.preset], model_of(options.model)
    takes = inspect.signature(preset).parameters
    own = {"model": model, "example_input": samples(model, options.input_size)}
    given = {name: value for name, value in own.items() if name in takes}
    spec = preset(**given, **dict(map(_argument, options.arguments)))
    for entry in spec:
        match(entry.selector, Index(model))  # by_stage takes no model, and does not check it
    return Result(spec.to_yaml().rstrip(), spec.to_plain())


def _argument(text: str) -> tuple[str, Any]:
    """Name and value of an argument: a regularizer, a schedule, or what YAML reads."""
    name, equals, written = text.partition("=")
    if not equals:
        raise CommandError(f"an argument of a preset is ARGUMENT=VALUE, got {text!r}")
    value, _ = read_yaml(written)
    if name == "regularizer":
        return name, regularizer_from(value, (name,))
    if name == "p" and isinstance(value, str | dict):
        return name, built(Schedule, value, (name,))
    return name, value


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], Result], tuple[str, ...]]] = {
    "layers": (_layers, ("model", "selector", "--input-size")),
    "builtin": (_builtin, ("model",)),
    "plan": (_plan, ("model", "spec", "--epochs", "--input-size")),
    "check": (_check, ("spec",)),
    "regularizers": (_regularizers, ("kind",)),
    "preset": (_preset, ("preset", "model", "arguments", "--input-size")),
}
"""The function and the arguments of each command."""

ARGUMENTS: dict[str, dict[str, Any]] = {
    "model": {
        "metavar": "MODEL",
        "help": "resnet50, torchvision:resnet50 or package.module:factory",
    },
    "--input-size": {
        "nargs": "+",
        "type": int,
        "metavar": "N",
        "help": "shape of one sample; put it last: 3 224 224",
    },
    "selector": {
        "nargs": "?",
        "metavar": "SELECTOR",
        "help": "only these: 'layer3.*', type:Conv2d",
    },
    "spec": {"metavar": "SPEC", "help": "a YAML or JSON file"},
    "--epochs": {
        "type": int,
        "metavar": "N",
        "help": "number of epochs, for schedules that do not say theirs",
    },
    "kind": {"nargs": "?", "metavar": "NAME", "help": "a name from this list"},
    "preset": {"metavar": "NAME", "choices": _PRESETS, "help": ", ".join(_PRESETS)},
    "arguments": {
        "nargs": "*",
        "metavar": "ARGUMENT=VALUE",
        "help": "an argument of the preset, or an option of its regularizer, as YAML: p=0.2, "
        "'p=LinearSchedule(0.0, 0.2)', 'stages=[-2, -1]', layout=NHWC",
    },
}
"""What ``argparse`` takes for each argument."""
