"""What a model has to attach to."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .attach import detach_all
from .names import Index
from .table import Table
from .wrappers import bare_type, named_modules, unwrap


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

    The forward runs in evaluation, without gradients, on a deep copy: the model is not touched.

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
    """
    model = unwrap(model)
    index = Index(model)
    seen = {} if example_input is None else _observe(model, example_input)
    rows = [
        LayerRow(
            name=name,
            type=bare_type(target.module).__name__,
            parameters=sum(p.numel() for p in target.module.parameters()),
            aliases=target.aliases,
            shape=seen[name][0] if name in seen else None,
            calls=seen.get(name, (None, 0))[1] if seen else None,
        )
        for name, target in index.modules.items()
        if name == target.name
    ]
    return _table(rows, with_shapes=bool(seen))


def _table(rows: list[LayerRow], with_shapes: bool) -> Table[LayerRow]:
    columns: dict[str, Any] = {
        "name": lambda row: (
            (row.name or ".") + (f" (= {', '.join(row.aliases)})" if row.aliases else "")
        ),
        "type": lambda row: row.type,
    }
    if with_shapes:
        columns["output"] = lambda row: row.shape
        columns["calls"] = lambda row: row.calls
    columns["parameters"] = lambda row: row.parameters
    return Table(rows, columns)


class _Recorder:
    """Forward hook: notes the shape of what the layer returns."""

    def __init__(self, name: str, seen: dict[str, tuple[Any, int]]) -> None:
        self.name, self.seen = name, seen

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        calls = self.seen.get(self.name, (None, 0))[1]
        self.seen[self.name] = (_shape(output), calls + 1)


def _observe(model: nn.Module, example: Any) -> dict[str, tuple[Any, int]]:
    copied = copy.deepcopy(model)
    detach_all(copied)
    seen: dict[str, tuple[Any, int]] = {}
    for name, module in named_modules(copied):
        module.register_forward_hook(_Recorder(name, seen))
    copied.eval()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        if isinstance(example, Mapping):
            copied(**example)
        else:
            copied(*example) if isinstance(example, tuple) else copied(example)
    return seen


def _shape(output: Any) -> Any:
    """The shape of a tensor; of a structure, its type and size."""
    if isinstance(output, Tensor):
        return tuple(output.shape)
    if isinstance(output, Mapping | tuple | list):
        return f"{type(output).__name__} of {len(output)}"
    return type(output).__name__
