"""Ways around a layer, read from the graph that autograd has built.

`DropPath` zeroes a sample at its site. Where a shortcut runs around the site, that is a branch
dropped; where none does, the sample is lost from there on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node

# what hands a residual stream on: sums, views, and what is put behind the sum
_SUM = re.compile(r"Add(Backward|$|_)")
_CARRIES = re.compile(
    "Add|Relu|Gelu|Silu|Hardswish|Clone|View|Reshape|Permute|Transpose|Slice|Select|Expand|Squeeze|"
    "Unsqueeze|Flatten|Unflatten|Contiguous|ToCopy|Alias|AsStrided|Roll"
    "|GradIdentity"
)


def passes_around(outputs: Iterable[Tensor], sources: Iterable[Node], node: Node) -> bool:
    """Whether each output depends on a source on a way that does not pass through `node`.

    An output that does not depend on the node is none of its business.
    """
    wanted = set(sources)
    for output in outputs:
        start = output.grad_fn
        if start is None or not _reaches(start, {node}, None):
            continue
        if start is node or not _reaches(start, wanted, node):
            return False
    return True


def carries_stream(output: Node | None, source: Node | None) -> bool:
    """Whether a layer adds something to its input, and hands the sum on: a residual block."""
    if output is None or source is None:
        return False
    seen: set[tuple[Node, bool]] = set()
    waiting = [(output, False)]
    while waiting:
        node, added = waiting.pop()
        if node is source and added:
            return True
        if node is source or (node, added) in seen or not _CARRIES.match(node.name()):
            continue
        seen.add((node, added))
        below = [each for each, _ in node.next_functions if each]
        if not added and _SUM.match(node.name()) and len(below) > 1:
            # both sides come from the input: neither a bias nor a table of positions is a branch
            added_here = all(each is source or _reaches(each, {source}, None) for each in below)
        else:
            added_here = False
        waiting += [(each, added or added_here) for each in below]
    return False


def without_gradient(outputs: Iterable[Tensor], parameter: Tensor) -> bool:
    """Whether no gradient of the outputs can come to a parameter, as far as their graph shows.

    A reentrant checkpoint hides its part of the graph, and outputs without one show nothing.
    """
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        if getattr(node, "variable", None) is parameter or "Checkpoint" in node.name():
            return False
        seen.add(node)
        waiting += [below for below, _ in node.next_functions if below is not None]
    return bool(seen)


def _reaches(start: Node, wanted: set[Node], closed: Node | None) -> bool:
    seen: set[Node] = set()
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node is closed or node in seen:
            continue
        if node in wanted:
            return True
        seen.add(node)
        waiting += [below for below, _ in node.next_functions if below is not None]
    return False
