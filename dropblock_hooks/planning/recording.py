"""Records what each layer of a model does in one forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ..selectors.wrappers import named_modules
from .dry_run import DryRun, dry_run, shape_of
from .residual import carries_stream


@dataclass
class LayerCalls:
    """The calls of one layer in a forward.

    Attributes:
        calls: the number of calls.
        order: the place of its last call among the ends of all calls.
        shape: the shape of the last output, see `shape_of`.
        adds: whether each call is one of a residual block: it adds something to its input and
            keeps the shape. False where nobody looked.
    """

    calls: int = 0
    order: int = 0
    shape: Any = None
    adds: bool = False


@contextmanager
def recorded(model: nn.Module, *, residual: bool = False) -> Iterator[dict[str, LayerCalls]]:
    """Record the forward within a ``with`` block; the dict has all names of each layer.

    `residual` looks for residual blocks; this needs the graph of autograd.
    """
    ends = count()
    layers: dict[nn.Module, LayerCalls] = {}
    names: dict[str, LayerCalls] = {}
    handles = []

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        layer = layers[module]
        layer.calls, layer.order, layer.shape = layer.calls + 1, next(ends), shape_of(output)
        x = args[0] if args else None
        if residual and isinstance(x, Tensor) and isinstance(output, Tensor):
            adds = x.shape == output.shape and carries_stream(output.grad_fn, x.grad_fn)
            layer.adds = adds and (layer.adds or layer.calls == 1)

    for name, module in named_modules(model):
        if module not in layers:
            layers[module] = LayerCalls()
            if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                handles.append(module.register_forward_hook(hook))
        names[name] = layers[module]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


def record_forward(
    model: nn.Module, example: Any, *, residual: bool = False
) -> dict[str, LayerCalls]:
    """What the layers of a copy do in one forward in eval mode.

    Args:
        model: any model.
        example: a tensor, a tuple of arguments, or a mapping of keywords; None for the size that
            the model tells.
        residual: whether to look for residual blocks.

    Raises:
        DryRunError: if no forward of a copy runs.
    """

    def look(run: DryRun) -> dict[str, LayerCalls]:
        run.model.eval()
        if residual:
            run.model.requires_grad_()
        with recorded(run.model, residual=residual) as layers, torch.set_grad_enabled(residual):
            run.run()
        return layers

    return dry_run(model, example, look)
