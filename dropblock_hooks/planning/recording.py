"""What one forward called: the calls of each layer, and the shape of what it returned."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..selectors.wrappers import named_modules
from .dry_run import shape_of


@dataclass
class LayerCalls:
    """The calls of a layer in one forward; `shape` of its last output, see `shape_of`."""

    calls: int = 0
    shape: Any = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook of the layer."""
        self.calls += 1
        self.shape = shape_of(output)


def record(model: nn.Module) -> dict[str, LayerCalls]:
    """Watch the next forward of a copy; the calls of all layers by name, which it fills in."""
    recorded = {}
    for name, module in named_modules(model):
        recorded[name] = LayerCalls()
        if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
            module.register_forward_hook(recorded[name].__call__)
    return recorded
