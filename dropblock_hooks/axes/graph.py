"""Finds the channels of a tensor in the autograd graph of this forward.

A `Reader` asks for them if the class of its regularizer needs channels, and neither ``layout=`` nor
the type of the layer gives them. It asks in the first three eager calls with each shape. Calls
without a graph are among the three.

A convolution has its channels on axis 1, and a layer norm on the last axis. `channels_of` follows
the axes of the tensor back to such a node, through permutations, views and elementwise operations.
"""

import math
import re
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from .view import FIRST, LAST, MIXED

UNKNOWN = "unknown"

_PACKAGE = __name__.partition(".")[0] + "."
# a search visits at most so many nodes, because the residual stream of a deep model is long
_MAX_NODES = 600
# operations on tensors whose channels are first
_FIRST = re.compile(r"Convolution|Conv\w*[123]d|BatchNorm|GroupNorm|PixelShuffle|PixelUnshuffle")
_VIEW = re.compile(r"(Unsafe)?View|Reshape|Squeeze|Unsqueeze")
# operations that keep the axes
_SAME = re.compile(
    "Add|Sub|Rsub|Mul|Div|Pow|Neg|Abs|Exp|Log|Sqrt|Rsqrt|Square|Reciprocal|Relu|LeakyRelu|Prelu|"
    "Gelu|Silu|Mish|Elu|Selu|Celu|Sigmoid|LogSigmoid|Tanh|Softplus|Hardswish|Hardsigmoid|Hardtanh|"
    "Threshold|Clamp|ClampMin|ClampMax|Minimum|Maximum|Where|MaskedFill|Lerp|Addcmul|NativeDropout|"
    "Erf|Sin|Cos|Slice|Split|SplitWithSizes|UnsafeSplit|Narrow|Cat|Roll|Flip|ConstantPadNd|Expand|"
    "Clone|Copy|ToCopy|NativeLayerNorm|Contiguous|Alias|Softmax|ChannelShuffle|"
    r"\w*Pool\dD\w*|Upsample\w+|\w+Pad\dD|GridSampler\dD|"
    "BackwardHookFunction"  # a full backward hook, which returns its tensors
)
# ``axes[i]`` is where axis i of the tensor that was asked about is at a node. It is None if the
# axis is lost, as the channels are behind a Linear layer.
_Axes = tuple[int | None, ...]


class _Step(NamedTuple):
    """A tensor on the way back through the graph.

    Attributes:
        node: the node that has returned it.
        output: which output of the node it is.
        axes: where the axes of the tensor that was asked about are in this one.
    """

    node: Any
    output: int
    axes: _Axes


def channels_of(x: Tensor) -> str:
    """Return the place of the channels: `FIRST` or `LAST`.

    It is `MIXED` if the graph shows both, `UNKNOWN` if it shows neither, and "" without a graph.
    """
    if x.grad_fn is None:
        return ""

    sides: set[str] = set()
    seen: set[tuple[Any, _Axes]] = set()
    queue = deque([_Step(x.grad_fn, x.output_nr, tuple(range(x.ndim)))])
    while queue and len(seen) < _MAX_NODES:
        node, output, axes = queue.popleft()
        if (node, axes) in seen:
            continue
        seen.add((node, axes))

        shape = _shape(node, output)
        side = _side(node, shape, axes)
        if side:
            sides.add(side)
        else:
            queue.extend(_behind(node, shape, axes))

    if len(sides) > 1:
        return MIXED
    return next(iter(sides), UNKNOWN)


def _shape(node: Any, output: int) -> tuple[int, ...]:
    """Return the shape of an output of a node; empty if autograd does not keep it."""
    metadata = getattr(node, "_input_metadata", ())
    return tuple(metadata[output].shape) if output < len(metadata) else ()


def _side(node: Any, shape: tuple[int, ...], axes: _Axes) -> str:
    """Return the place of the channels, `FIRST` or `LAST`, if the operation shows it; else "".

    Args:
        node: the operation.
        shape: the shape of its output.
        axes: where the axes of the tensor that was asked about are in this output.
    """
    name = node.name()
    rank = len(shape)
    is_norm = "LayerNorm" in name or "RmsNorm" in name
    if _FIRST.search(name) and rank > 1:
        channels = 1
        spatial = set(range(2, rank))
    elif is_norm and len(getattr(node, "_saved_normalized_shape", ())) == 1:
        channels = rank - 1
        spatial = set()
    else:
        return ""

    # The channels of `x` lead to those of the operation. If this axis was lost on the way, a map is
    # still recognized if all its other axes lead to spatial axes.
    is_map = len(axes) > 3
    rest_if_first = axes[2:]
    if axes[1:2] == (channels,) or (is_map and spatial.issuperset(rest_if_first)):
        return FIRST
    rest_if_last = axes[1:-1]
    if axes[-1:] == (channels,) or (is_map and spatial.issuperset(rest_if_last)):
        return LAST
    return ""


def _behind(node: Any, shape: tuple[int, ...], axes: _Axes) -> Iterator[_Step]:
    """Yield the inputs of a node whose axes can be followed, with their axes."""
    name = re.sub(r"Backward\d*$", "", node.name())
    for previous, output in node.next_functions:
        input_shape = () if previous is None else _shape(previous, output)
        if not input_shape:
            continue
        if _VIEW.match(name):
            # a linear layer merges axes for its matrix product, so follow both of its views at once
            yield from _before_linear(previous, shape, axes)

        moves = _moves(node, name, shape, input_shape)
        if moves is not None:
            moved = tuple(None if axis is None else moves[axis] for axis in axes)
            yield _Step(previous, output, moved)


def _moves(
    node: Any, name: str, shape: tuple[int, ...], input_shape: tuple[int, ...]
) -> list[int | None] | None:
    """Return a list with the axis of the input for each axis of the output, None if it is lost.

    The result is None in place of a list if nothing is known about the operation.
    """
    rank = len(shape)
    same: list[int | None] = list(range(rank))
    if name == "Permute":
        return [_axis(axis, rank) for axis in node._saved_dims]
    if name == "Transpose":
        a = _axis(node._saved_dim0, rank)
        b = _axis(node._saved_dim1, rank)
        same[a] = b
        same[b] = a
        return same
    if _VIEW.match(name):
        return [_same_axis(shape, axis, input_shape) for axis in range(rank)]

    # the autograd functions of this package return tensors with the axes of their inputs
    keeps_axes = _is_ours(node) or _SAME.fullmatch(name)
    return same if keeps_axes and len(input_shape) == rank else None


def _is_ours(node: Any) -> bool:
    """Return whether a node belongs to an autograd function of this package."""
    forward: Any = getattr(type(node), "_forward_cls", None)
    return forward is not None and forward.__module__.startswith(_PACKAGE)


def _before_linear(node: Any, shape: tuple[int, ...], axes: _Axes) -> Iterator[_Step]:
    """Yield the input of a linear layer, if this node is the matrix product of its rows.

    A linear layer views its input as a matrix, multiplies it, and views the product with the axes
    of the input. `shape` and `axes` belong to the last view.
    """
    if node.name() not in ("AddmmBackward0", "MmBackward0"):
        return

    # the product keeps the rows, but the last axis has new features
    row_axes = tuple(None if axis == len(shape) - 1 else axis for axis in axes)
    for view, _ in node.next_functions:
        sizes = getattr(view, "_saved_self_sym_sizes", ())
        if len(sizes) == len(shape) and tuple(sizes[:-1]) == shape[:-1]:
            for previous, output in view.next_functions:
                if previous:
                    yield _Step(previous, output, row_axes)


def _axis(saved: int, rank: int) -> int:
    """Return an axis that autograd has saved. It saves negative axes as unsigned numbers."""
    signed = saved - 2**64 if saved >= 2**63 else saved
    return signed % rank


def _same_axis(shape: tuple[int, ...], axis: int, other: tuple[int, ...]) -> int | None:
    """Return the axis of `other` that a view leaves as it is; None if the view changes it.

    Such an axis has the same length, and the same product of the axes before it. Both shapes have
    the same number of elements.
    """
    before = math.prod(shape[:axis])
    for other_axis, edge in enumerate(other):
        if edge == shape[axis] and math.prod(other[:other_axis]) == before:
            return other_axis
    return None
