"""Ways around a layer, read from the graph that autograd has built.

`DropPath` zeroes a sample at its site. Where a shortcut runs around the site, that is a branch
dropped; where none does, the sample is lost from there on.
"""

import re
from collections.abc import Callable, Iterable

from torch import Tensor
from torch.autograd.graph import Node

# what hands a residual stream on: sums, views, and what is put behind the sum
_CARRIES = re.compile(
    r"Add(Backward|$|_)|Relu|Gelu|Silu|Hardswish|Clone|View|Reshape|Permute|Transpose|Slice|Select|"
    "Expand|Squeeze|Unsqueeze|Flatten|Unflatten|Contiguous|ToCopy|Alias|AsStrided|Roll|GradIdentity"
)
_SUM = re.compile(r"Add(Backward|$|_)")


def passes_around(outputs: Iterable[Tensor], sources: Iterable[Node], node: Node) -> bool:
    """Whether each output depends on a source on a way that does not pass through `node`.

    An output that does not depend on the node is none of its business.
    """
    wanted = set(sources) - {node}
    return all(
        _made_from(output.grad_fn, lambda each: each is node) & wanted
        or node not in _made_from(output.grad_fn)
        for output in outputs
    )


def carries_stream(output: Node | None, source: Node | None) -> bool:
    """Whether a layer adds something to its input, and hands the sum on: a residual block."""
    if source is None:
        return False

    def ends(node: Node) -> bool:
        return node is source or not _CARRIES.match(node.name())

    # both sides come from the input: neither a bias nor a table of positions is a branch
    return any(
        _SUM.match(node.name())
        and source in _made_from(node, ends)
        and len(below := [each for each, _ in node.next_functions if each]) > 1
        and all(source in _made_from(each, lambda node: node is source) for each in below)
        for node in _made_from(output, ends)
        if node is not source
    )


def without_gradient(outputs: Iterable[Tensor], parameter: Tensor) -> bool:
    """Whether no gradient of the outputs can come to a parameter, as far as their graph shows.

    A reentrant checkpoint hides its part of the graph, and outputs without one show nothing.
    """
    nodes = set().union(*(_made_from(output.grad_fn) for output in outputs))
    return bool(nodes) and not any(
        getattr(node, "variable", None) is parameter or "Checkpoint" in node.name()
        for node in nodes
    )


def _made_from(start: Node | None, ends: Callable[[Node], bool] = lambda node: False) -> set[Node]:
    """All nodes that a node was made from, with itself; ways go no further where they end."""
    seen: set[Node] = set()
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if not ends(node):
                waiting += [below for below, _ in node.next_functions]
    return seen
