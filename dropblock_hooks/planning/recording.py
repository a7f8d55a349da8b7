"""What each layer does in a forward, and where shortcuts in its graph run around it; ``layers``."""

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
from ..selectors.wrappers import bare_type, named_modules, unwrap
from ..tables import Table, named
from .dry_run import Arguments, dry_run, shape_of

# operations that keep the residual stream: sums, views, and activations behind the sum
_CARRIES = re.compile(
    r"Add(Backward|$|_)|Relu|Gelu|Silu|Hardswish|Clone|View|Reshape|Permute|Transpose|Slice|Select|"
    "Expand|Squeeze|Unsqueeze|Flatten|Unflatten|Contiguous|ToCopy|Alias|AsStrided|Roll"
)
_SUM, _ANY = re.compile(r"Add(Backward|$|_)"), re.compile("")


@dataclass
class LayerCalls:
    """The calls of a layer in a forward."""

    calls: int = 0
    order: int = 0  # the place of its last call among the ends of all calls
    shape: Any = None  # the shape of the last output, see `shape_of`
    adds: bool = False  # to its input, and keeps the shape, if there is a graph that shows it


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, LayerCalls]]:
    """Record the forward within a ``with`` block; the dict has all names of each layer."""
    ends = count()
    names = dict(named_modules(model))
    layers = {module: LayerCalls() for module in names.values()}

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        layer = layers[module]
        layer.calls, layer.order, layer.shape = layer.calls + 1, next(ends), shape_of(output)
        x = args[0] if args else None
        if isinstance(x, Tensor) and isinstance(output, Tensor):
            adds = x.shape == output.shape and _adds(output.grad_fn, x.grad_fn)
            layer.adds = adds and (layer.adds or layer.calls == 1)

    # a ScriptModule takes no hooks
    hooked = [module for module in layers if not isinstance(module, torch.jit.ScriptModule)]
    handles = [module.register_forward_hook(hook) for module in hooked]
    try:
        yield {name: layers[module] for name, module in names.items()}
    finally:
        for handle in handles:
            handle.remove()


def record_forward(model: nn.Module, example: Any, residual: bool = False) -> dict[str, LayerCalls]:
    """The calls of the layers in a forward of a copy in eval mode; `residual` sees `adds`."""

    def look(copied: nn.Module, given: Arguments) -> dict[str, LayerCalls]:
        copied.eval().requires_grad_(residual)
        with recorded(copied) as layers, torch.set_grad_enabled(residual):
            copied(*given[0], **given[1])
        return layers

    return dry_run(model, example, look)


def passes_around(outputs: Iterable[Tensor], sources: set[Node], node: Node) -> bool:
    """Whether each output that depends on the node also depends on a source by another path."""
    return all(
        node not in _made_from(output.grad_fn) or _made_from(output.grad_fn, {node}) & sources
        for output in outputs
    )


def _adds(output: Node | None, source: Node | None) -> bool:
    """Whether a layer is a residual block: it adds something to its input and returns the sum."""
    stream = _made_from(output, {source}, _CARRIES)
    for node in stream - {source} if source in stream else ():
        if _SUM.match(node.name()):
            terms = [term for term, _ in node.next_functions if term]
            # both terms depend on the input: a bias or a position embedding is no branch
            if len(terms) > 1 and all(source in _made_from(term, {source}) for term in terms):
                return True
    return False


def _made_from(
    start: Node | None, ends: Container[Node | None] = (), through: re.Pattern[str] = _ANY
) -> set[Node]:
    """The node and all nodes behind it: not those behind `ends`, or behind other operations."""
    seen: set[Node] = set()
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if node not in ends and through.match(node.name()):
                waiting += [below for below, _ in node.next_functions]
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
    """The layers of a model by name, type and parameters; with an example, shapes and calls too.

    The forward runs in evaluation on a deep copy, and the model is not touched.

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
    seen = {} if example_input is None else record_forward(model, example_input)
    rows = []
    for name, target in Index(model).modules.items():
        if name == target.name:
            kind = bare_type(target.module).__name__
            size = sum(p.numel() for p in target.module.parameters())
            met = (seen[name].shape, seen[name].calls) if seen else ()
            rows.append(LayerRow(name, kind, size, target.aliases, *met))
    columns: dict[str, Any] = {
        "name": lambda row: named(row.name or ".", row.aliases),
        "type": attrgetter("type"),
        **({"output": attrgetter("shape"), "calls": attrgetter("calls")} if seen else {}),
        "parameters": attrgetter("parameters"),
    }
    return Table(rows, columns)
