"""``layers``: the layers of a model by name."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..selectors.index import Index
from ..selectors.wrappers import bare_type, unwrap
from ..tables import Table, named
from .recording import record_forward


@dataclass(frozen=True)
class LayerRow:
    """One layer; `shape` and `calls` are of one forward in eval mode, None without an example."""

    name: str
    type: str
    parameters: int
    aliases: tuple[str, ...]
    shape: Any = None
    calls: int | None = None


def layers(model: nn.Module, example_input: Any = None) -> Table[LayerRow]:
    """The layers of a model by name, type and parameters; with an example, shapes and calls too.

    The model is not touched: the forward runs in evaluation on a deep copy, without gradients, and
    on fake tensors where that works.

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
        example_input: the argument of the model: a tensor, or a tuple of arguments or a
            mapping of keywords.

    Raises:
        ValueError: if no forward of a copy runs with the example.
    """
    model = unwrap(model)
    index = Index(model)
    seen = {} if example_input is None else record_forward(model, example_input)
    rows = [
        LayerRow(
            name=name,
            type=bare_type(target.module).__name__,
            parameters=sum(p.numel() for p in target.module.parameters()),
            aliases=target.aliases,
            shape=seen[name].shape if seen else None,
            calls=seen[name].calls if seen else None,
        )
        for name, target in index.modules.items()
        if name == target.name
    ]
    columns: dict[str, Any] = {
        "name": lambda row: named(row.name or ".", row.aliases),
        "type": lambda row: row.type,
        "output": lambda row: row.shape,
        "calls": lambda row: row.calls,
        "parameters": lambda row: row.parameters,
    }
    if not seen:
        del columns["output"], columns["calls"]
    return Table(rows, columns)
