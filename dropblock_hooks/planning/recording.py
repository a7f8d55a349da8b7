"""Runs one forward of a copy of a model, and records what each layer did in it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..selectors.wrappers import named_modules
from .dry_run import DryRun, clear_away, dry_run, shape_of
from .residual import carries_stream


@dataclass
class LayerCalls:
    """The calls of one layer in a forward.

    Attributes:
        residual: whether to look for residual blocks; this needs the graph of autograd.
        calls: the number of calls.
        shape: the shape of the last output, see `shape_of`.
        adds: whether each call is one of a residual block: it adds something to its input and
            keeps the shape.
    """

    residual: bool = False
    calls: int = 0
    shape: Any = None
    adds: bool = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The forward hook of the layer."""
        self.calls += 1
        self.shape = shape_of(output)
        x = args[0] if args else None
        if self.residual and isinstance(x, Tensor) and isinstance(output, Tensor):
            adds = x.shape == output.shape and carries_stream(output.grad_fn, x.grad_fn)
            self.adds = adds and (self.adds or self.calls == 1)


def record(model: nn.Module, *, residual: bool = False) -> dict[str, LayerCalls]:
    """Record the next forward of a copy; the dict has all names of each layer."""
    layers: dict[nn.Module, LayerCalls] = {}
    recorded = {}
    for name, module in named_modules(model):
        if module not in layers:
            layers[module] = LayerCalls(residual)
            if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                module.register_forward_hook(layers[module].__call__)
        recorded[name] = layers[module]
    return recorded


def record_forward(
    model: nn.Module, example: Any, *, residual: bool = False
) -> dict[str, LayerCalls]:
    """What the layers of a copy do in one forward in eval mode.

    Args:
        model: any model.
        example: a tensor, a tuple of arguments, or a mapping of keywords.
        residual: whether to look for residual blocks.

    Raises:
        DryRunError: if no forward of a copy runs.
    """

    def look(run: DryRun) -> dict[str, LayerCalls]:
        recorded = record(run.model.eval(), residual=residual)
        if residual:
            run.model.requires_grad_()
        with torch.set_grad_enabled(residual):
            run.run()
        return recorded

    try:
        return dry_run(model, example, look)
    finally:
        clear_away()
