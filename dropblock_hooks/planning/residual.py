"""Finds shortcuts around a layer in the autograd graph.

`DropPath` zeroes whole samples of its layer's output. With a shortcut around the layer, the sample
skips a branch. Without one, the sample is lost.
"""

import re
from collections.abc import Callable, Iterable

from torch import Tensor
from torch.autograd.graph import Node

# operations that keep the residual stream: sums, views, and activations behind the sum
_CARRIES = re.compile(
    r"Add(Backward|$|_)|Relu|Gelu|Silu|Hardswish|Clone|View|Reshape|Permute|Transpose|Slice|Select|"
    "Expand|Squeeze|Unsqueeze|Flatten|Unflatten|Contiguous|ToCopy|Alias|AsStrided|Roll"
)
_SUM = re.compile(r"Add(Backward|$|_)")


def passes_around(outputs: Iterable[Tensor], sources: Iterable[Node], node: Node) -> bool:
    """Whether each output depends on a source by a path that does not go through `node`.

    Outputs that do not depend on the node are ignored.
    """
    return all(
        _made_from(output.grad_fn, lambda each: each is node) & set(sources)
        or node not in _made_from(output.grad_fn)
        for output in outputs
    )


def carries_stream(output: Node | None, source: Node | None) -> bool:
    """Whether a layer is a residual block: it adds something to its input and returns the sum."""
    if source is None:
        return False

    def ends(node: Node) -> bool:
        return node is source or not _CARRIES.match(node.name())

    # both terms depend on the input: a bias or a position embedding is no branch
    return any(
        _SUM.match(node.name())
        and source in _made_from(node, ends)
        and len(below := [each for each, _ in node.next_functions if each]) > 1
        and all(source in _made_from(each, lambda node: node is source) for each in below)
        for node in _made_from(output, ends)
        if node is not source
    )


def _made_from(start: Node | None, ends: Callable[[Node], bool] = lambda node: False) -> set[Node]:
    """The node and all nodes behind it, up to those where `ends` is true."""
    seen: set[Node] = set()
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if not ends(node):
                waiting += [below for below, _ in node.next_functions]
    return seen
