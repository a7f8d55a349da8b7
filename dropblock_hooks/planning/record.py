"""What one forward shows of every layer: calls and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..selectors.wrappers import named_modules


@dataclass
class Seen:
    """What one forward has shown of a layer."""

    calls: int = 0
    output: Any = None


class Recorder:
    """Forward hook: notes what a layer returns."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.seen.calls += 1
        self.seen.output = shape_of(output)


def record(model: nn.Module) -> dict[str, Seen]:
    """Watch every layer of a copy; what was seen, by name, is filled in as it runs."""
    seen: dict[str, Seen] = {}
    known: dict[int, Seen] = {}
    for name, module in named_modules(model):
        if id(module) not in known:
            known[id(module)] = Seen()
            if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                module.register_forward_hook(Recorder(known[id(module)]))
        seen[name] = known[id(module)]
    return seen


def shape_of(output: Any) -> Any:
    """The shape of a tensor; of a structure, its type and size."""
    if isinstance(output, Tensor):
        return tuple(output.shape)
    if isinstance(output, Mapping | tuple | list):
        return f"{type(output).__name__} of {len(output)}"
    return type(output).__name__
