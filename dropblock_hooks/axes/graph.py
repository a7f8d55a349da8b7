"""Where the axes of a tensor come from: read in the graph that autograd has kept of this forward.

A convolution puts channels on axis 1, a layer norm works on the last one. From the tensor back to
such a node the axes are followed through permutations, views and elementwise operations, so that
sizes that are equal by chance mislead nobody. An unknown node ends the walk.
"""

import math
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .view import FIRST, LAST, MIXED

UNTOLD = "untold"

_PACKAGE = __name__.partition(".")[0] + "."
_MOST = 600  # nodes; the residual stream of a deep model is long
_FIRST = re.compile(r"Convolution|Conv\w*[123]d|BatchNorm|GroupNorm|PixelShuffle|PixelUnshuffle")
_VIEW = re.compile(r"(Unsafe)?View|Reshape|Squeeze|Unsqueeze")
_SAME = re.compile(
    "Add|Sub|Rsub|Mul|Div|Pow|Neg|Abs|Exp|Log|Sqrt|Rsqrt|Square|Reciprocal|Relu|LeakyRelu|Prelu|"
    "Gelu|Silu|Mish|Elu|Selu|Celu|Sigmoid|LogSigmoid|Tanh|Softplus|Hardswish|Hardsigmoid|Hardtanh|"
    "Threshold|Clamp|ClampMin|ClampMax|Minimum|Maximum|Where|MaskedFill|Lerp|Addcmul|NativeDropout|"
    "Erf|Sin|Cos|Slice|Split|SplitWithSizes|UnsafeSplit|Narrow|Cat|Roll|Flip|ConstantPadNd|Expand|"
    "Clone|Copy|ToCopy|NativeLayerNorm|Contiguous|Alias|Softmax|ChannelShuffle|"
    r"\w*Pool\dD\w*|Upsample\w+|\w+Pad\dD|GridSampler\dD"
)
_Axes = tuple[int | None, ...]
_Shape = tuple[int, ...]


def channels_of(x: Tensor) -> str:
    """`FIRST` or `LAST`: where the channels of a tensor are, behind the axis of the samples.

    `MIXED` if the graph has both, `UNTOLD` if it does not show it, and "" without a graph.
    """
    if x.grad_fn is None:
        return ""
    found: set[str] = set()
    seen: set[tuple[Any, _Axes]] = set()
    queue: deque[tuple[Any, int, _Axes]] = deque()
    queue.append((x.grad_fn, x.output_nr, tuple(range(x.ndim))))
    while queue and len(seen) < _MOST:
        node, number, axes = queue.popleft()
        if (node, axes) in seen:
            continue
        seen.add((node, axes))
        shape = _shape(node, number)
        side = _side(_source(node, shape), axes)
        if side:
            found.add(side)
        else:
            queue.extend(_behind(node, shape, axes))
    if len(found) > 1:
        return MIXED
    return found.pop() if found else UNTOLD


def _shape(node: Any, number: int) -> _Shape:
    """The shape of the output of a node in the forward; () if it is not kept."""
    kept = getattr(node, "_input_metadata", ())
    return tuple(kept[number].shape) if number < len(kept) else ()


def _source(node: Any, shape: _Shape) -> str:
    """The names of the axes where an operation gives them: C, S for space, ? for others."""
    name, spatial = node.name().removesuffix("Backward0"), len(shape) - 2
    if _FIRST.search(name) and spatial >= 0:
        return "?C" + "S" * spatial
    normalized = getattr(node, "_saved_normalized_shape", ())
    norm = "LayerNorm" in name or "RmsNorm" in name
    return "?" * (len(shape) - 1) + "C" if norm and len(normalized) == 1 else ""


def _side(source: str, axes: _Axes) -> str:
    """Where the channels of the tensor are, if its axes come from these; "" if that is unknown."""
    names = "".join("?" if axis is None else source[axis] for axis in axes) if source else ""
    if names[1:2] == "C" or (len(names) > 3 and set(names[2:]) == {"S"}):
        return FIRST
    if names[-1:] == "C" or (len(names) > 3 and set(names[1:-1]) == {"S"}):
        return LAST
    return ""


def _behind(node: Any, shape: _Shape, axes: _Axes) -> Iterator[tuple[Any, int, _Axes]]:
    """The nodes that a node has taken from, and where the axes were there."""
    name, rank = re.sub(r"Backward\d*$", "", node.name()), len(shape)
    forward: Any = getattr(type(node), "_forward_cls", None)
    ours = forward is not None and forward.__module__.startswith(_PACKAGE)
    for before, number in node.next_functions:
        taken = _shape(before, number) if before is not None else ()
        moves: list[int | None] = list(range(rank))  # for each axis, the one that it was
        if not taken:
            continue
        if name == "Permute":
            moves = [_signed(axis) % rank for axis in node._saved_dims]
        elif name == "Transpose":
            a, b = _signed(node._saved_dim0) % rank, _signed(node._saved_dim1) % rank
            moves[a], moves[b] = b, a
        elif _VIEW.match(name):
            yield from _before_linear(before, shape, axes)
            moves = [_place(shape, axis, taken) for axis in range(rank)]
        elif len(taken) != rank or not (ours or _SAME.fullmatch(name)):
            continue
        yield before, number, tuple(None if axis is None else moves[axis] for axis in axes)


def _before_linear(node: Any, shape: _Shape, axes: _Axes) -> Iterator[tuple[Any, int, _Axes]]:
    """The input of a linear layer, if this node is its product of rows: it keeps their axes."""
    if node.name() in ("AddmmBackward0", "MmBackward0"):
        kept = tuple(None if axis == len(shape) - 1 else axis for axis in axes)
        for rows, _ in node.next_functions:
            sizes = getattr(rows, "_saved_self_sym_sizes", ())
            if len(sizes) == len(shape) and tuple(sizes[:-1]) == shape[:-1]:
                yield from ((before, n, kept) for before, n in rows.next_functions if before)


def _signed(axis: int) -> int:
    return axis - 2**64 if axis >= 2**63 else axis  # saved without a sign


def _place(shape: _Shape, axis: int, other: _Shape) -> int | None:
    """The axis of another shape of as many elements that is this very axis, if there is one."""
    before = math.prod(shape[:axis])
    for place, edge in enumerate(other):
        if edge == shape[axis] and math.prod(other[:place]) == before:
            return place
    return None
