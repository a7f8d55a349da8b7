"""Records the calls of layers in a forward, and finds the residual connections in its graph.

`layers` and some presets call `record_forward`, which runs a copy. `plan` and `gradcam` record one
of their own forwards, with `recorded`.
"""

import re
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..selectors.index import Index
from ..selectors.wrappers import named_modules
from ..tables import Table, named
from .dry_run import Arguments, dry_run, shape_of, with_graph

# operations of a residual stream: sums, views, and activations after the sum
_CARRIES = re.compile(
    r"Add(Backward|$|_)|Relu|Gelu|Silu|Hardswish|Clone|View|Reshape|Permute|Transpose|Slice|Select|"
    "Expand|Squeeze|Unsqueeze|Flatten|Unflatten|Contiguous|ToCopy|Alias|AsStrided|Roll"
)
_SUM = re.compile(r"Add(Backward|$|_)")
_ANY = re.compile("")


@dataclass
class LayerCalls:
    """The calls of a layer in a forward.

    Attributes:
        calls: the number of calls.
        order: the number of calls of all layers that ended before its last call ended.
        shape: the shape of the last output, from `shape_of`.
        first_shape: if the last output is a tuple, the shape of its first element, from `shape_of`;
            None if this element is an argument that the layer only passes on.
        adds: whether each output is a sum of the input and something else; False without a graph.
    """

    calls: int = 0
    order: int = 0
    shape: Any = None
    first_shape: Any = None
    adds: bool = False


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, LayerCalls]]:
    """Record the forward within a ``with`` block. A layer has an entry for each of its names."""
    ends = count()
    names = dict(named_modules(model))
    layers = {module: LayerCalls() for module in names.values()}

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        layer = layers[module]
        layer.order = next(ends)
        _note_call(layer, args, output)

    # a ScriptModule takes no hooks
    hooked = [module for module in layers if not isinstance(module, torch.jit.ScriptModule)]
    handles = [module.register_forward_hook(hook) for module in hooked]
    try:
        yield {name: layers[module] for name, module in names.items()}
    finally:
        for handle in handles:
            handle.remove()


def _note_call(layer: LayerCalls, args: tuple[Any, ...], output: Any) -> None:
    """Note what a call of a layer got and returned."""
    layer.calls += 1
    layer.shape = shape_of(output)
    layer.first_shape = None
    if isinstance(output, tuple) and output and not any(output[0] is x for x in args):
        layer.first_shape = shape_of(output[0])

    x = args[0] if args else None
    if isinstance(x, Tensor) and isinstance(output, Tensor):
        added_so_far = layer.adds or layer.calls == 1
        layer.adds = added_so_far and _adds_to_input(x, output)


def _adds_to_input(x: Tensor, output: Tensor) -> bool:
    """Return whether an output is the sum of the input and something else."""
    return x.shape == output.shape and _is_residual(output.grad_fn, x.grad_fn)


def record_forward(model: nn.Module, example: Any, residual: bool = False) -> dict[str, LayerCalls]:
    """Return the calls of the layers in a forward of a copy in eval mode.

    With `residual`, the forward has a graph, which shows the layers that add to their input.
    """

    def run(copied: nn.Module, arguments: Arguments) -> dict[str, LayerCalls]:
        args, kwargs = arguments
        copied.eval().requires_grad_(residual)
        with recorded(copied) as layers, torch.set_grad_enabled(residual):
            if residual:  # a block may add to the input of the model
                args, kwargs = with_graph(arguments)
            copied(*args, **kwargs)
        return layers

    return dry_run(model, example, run)


def passes_around(outputs: Iterable[Tensor], sources: set[Node], node: Node) -> bool:
    """Return whether all outputs that depend on a node also reach a source around this node."""
    for output in outputs:
        depends = node in _made_from(output.grad_fn)
        if depends and not _made_from(output.grad_fn, {node}) & sources:
            return False
    return True


def _is_residual(output: Node | None, source: Node | None) -> bool:
    """Return whether a layer adds something to its input and returns the sum."""
    stream = _made_from(output, {source}, _CARRIES)
    if source not in stream:
        return False

    for node in stream - {source}:
        if _SUM.match(node.name()):
            terms = [term for term, _ in node.next_functions if term]
            depend = [source in _made_from(term, {source}) for term in terms]
            # both terms must depend on the input, unlike a bias or a position embedding
            if len(terms) > 1 and all(depend):
                return True
    return False


def _made_from(
    start: Node | None, ends: Container[Node | None] = (), through: re.Pattern[str] = _ANY
) -> set[Node]:
    """Return the nodes that a node was made from, and the node itself.

    The search does not go beyond the nodes in `ends`, or beyond operations whose names do not match
    `through`.
    """
    seen: set[Node] = set()
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)

        if node not in ends and through.match(node.name()):
            waiting += [previous for previous, _ in node.next_functions]
    return seen


@dataclass(frozen=True)
class LayerRow:
    """One layer; `shape` and `calls` come from a forward in eval mode, with an example."""

    name: str
    type: str
    parameters: int
    aliases: tuple[str, ...]
    shape: Any = None
    calls: int | None = None


def layers(model: nn.Module, example_input: Any = None) -> Table[LayerRow]:
    """List the layers of a model with their names, types and parameters.

    With an example, it also lists the shapes of their outputs and their calls in a forward. The
    forward runs in evaluation on a deep copy. The model does not change.

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
        TypeError: if `model` is not a module.
        RuntimeError: if the model holds ``nn.DataParallel``.
    """
    index = Index(model)
    calls = {} if example_input is None else record_forward(index.model, example_input)

    rows = []
    for name, target in index.modules.items():
        if name == target.name:
            row = LayerRow(
                name=name,
                type=target.type_name,
                parameters=sum(x.numel() for x in target.module.parameters()),
                aliases=target.aliases,
                shape=calls[name].shape if calls else None,
                calls=calls[name].calls if calls else None,
            )
            rows.append(row)

    columns: dict[str, Any] = {
        "name": lambda row: named(row.name or ".", row.aliases),
        "type": attrgetter("type"),
    }
    if calls:
        columns["output"] = attrgetter("shape")
        columns["calls"] = attrgetter("calls")
    columns["parameters"] = attrgetter("parameters")
    return Table(rows, columns)
