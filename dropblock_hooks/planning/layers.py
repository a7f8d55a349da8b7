"""What a model has to attach to."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..selectors.index import Index
from ..selectors.wrappers import bare_type, named_modules, unwrap
from ..tables import Table, named
from .dry_run import DryRun, observed, shape_of


@dataclass(frozen=True)
class LayerRow:
    """One layer: `shape` and `calls` of one forward in evaluation, where there was an example."""

    name: str
    type: str
    parameters: int
    aliases: tuple[str, ...]
    shape: Any = None
    calls: int | None = None


def layers(model: nn.Module, example_input: Any = None) -> Table[LayerRow]:
    """The layers of a model by name, type and parameters; with an example, shapes and calls too.

    The forward runs in evaluation, without gradients, on a deep copy, whose tensors are fake ones
    where that works: the model is not touched.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> layers(model, torch.ones(1, 3, 9, 9))
        name  type        output   calls  parameters
        ----  ----------  -------  -----  ----------
        .     Sequential  1x8x7x7  1      224
        0     Conv2d      1x8x7x7  1      224
        1     ReLU        1x8x7x7  1      0

    Args:
        model: any model.
        example_input: what the model is called with: a tensor, or a tuple of arguments or a
            mapping of keywords.

    Raises:
        ValueError: where no forward of a copy runs with it.
    """
    model = unwrap(model)
    index = Index(model)
    seen = {} if example_input is None else observed(model, example_input, _look)
    rows = [
        LayerRow(
            name=name,
            type=bare_type(target.module).__name__,
            parameters=sum(p.numel() for p in target.module.parameters()),
            aliases=target.aliases,
            shape=seen[name].output if seen else None,
            calls=seen[name].calls if seen else None,
        )
        for name, target in index.modules.items()
        if name == target.name
    ]
    columns: dict[str, Any] = {
        "name": lambda row: named(row.name or ".", row.aliases),
        "type": lambda row: row.type,
    }
    if seen:
        columns["output"] = lambda row: row.shape
        columns["calls"] = lambda row: row.calls
    columns["parameters"] = lambda row: row.parameters
    return Table(rows, columns)


class _Seen:
    """Forward hook: what one forward shows of a layer."""

    calls = 0
    output: Any = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls += 1
        self.output = shape_of(output)


def _look(run: DryRun) -> dict[str, _Seen]:
    seen = {}
    for name, module in named_modules(run.model):
        seen[name] = _Seen()
        if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            module.register_forward_hook(seen[name])
    run.model.eval()
    with torch.no_grad():
        run.run()
    return seen
