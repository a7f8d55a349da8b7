"""Where the channels of a tensor are, by the graph that autograd has kept of this forward.

A convolution puts channels on axis 1, a layer norm works on the last one. From the tensor back to
such a node the axes are followed through permutations, views and elementwise operations.
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
_Axes = tuple[int | None, ...]  # for each axis of the tensor, the one that it was at a node
_Place = tuple[Any, int, _Axes]  # a node, and which of its outputs


def channels_of(x: Tensor) -> str:
    """`FIRST` or `LAST`; `MIXED` if the graph has both, `UNTOLD` if neither, "" without a graph."""
    if x.grad_fn is None:
        return ""
    found: set[str] = set()
    seen: set[tuple[Any, _Axes]] = set()
    queue: deque[_Place] = deque([(x.grad_fn, x.output_nr, tuple(range(x.ndim)))])
    while queue and len(seen) < _MOST:
        node, number, axes = queue.popleft()
        if (node, axes) in seen:
            continue
        seen.add((node, axes))
        shape = _shape(node, number)
        if side := _side(node, shape, axes):
            found.add(side)
        else:
            queue.extend(_behind(node, shape, axes))
    return MIXED if len(found) > 1 else next(iter(found), UNTOLD)


def _shape(node: Any, number: int) -> tuple[int, ...]:
    kept = getattr(node, "_input_metadata", ())
    return tuple(kept[number].shape) if number < len(kept) else ()


def _side(node: Any, shape: tuple[int, ...], axes: _Axes) -> str:
    """Where the channels of the tensor are, if the operation says where it has them; or ""."""
    name, rank = node.name(), len(shape)
    norm = "LayerNorm" in name or "RmsNorm" in name
    if _FIRST.search(name) and rank > 1:
        channels, spatial = 1, set(range(2, rank))
    elif norm and len(getattr(node, "_saved_normalized_shape", ())) == 1:
        channels, spatial = rank - 1, set()
    else:
        return ""
    if axes[1:2] == (channels,) or (len(axes) > 3 and spatial.issuperset(axes[2:])):
        return FIRST
    if axes[-1:] == (channels,) or (len(axes) > 3 and spatial.issuperset(axes[1:-1])):
        return LAST
    return ""


def _behind(node: Any, shape: tuple[int, ...], axes: _Axes) -> Iterator[_Place]:
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
            moves = [_axis(axis, rank) for axis in node._saved_dims]
        elif name == "Transpose":
            a, b = _axis(node._saved_dim0, rank), _axis(node._saved_dim1, rank)
            moves[a], moves[b] = b, a
        elif _VIEW.match(name):
            yield from _before_linear(before, shape, axes)
            moves = [_place(shape, axis, taken) for axis in range(rank)]
        elif len(taken) != rank or not (ours or _SAME.fullmatch(name)):
            continue
        yield before, number, tuple(None if axis is None else moves[axis] for axis in axes)


def _before_linear(node: Any, shape: tuple[int, ...], axes: _Axes) -> Iterator[_Place]:
    """The input of a linear layer, if this node is its product of rows: it keeps their axes."""
    if node.name() in ("AddmmBackward0", "MmBackward0"):
        kept = tuple(None if axis == len(shape) - 1 else axis for axis in axes)
        for rows, _ in node.next_functions:
            sizes = getattr(rows, "_saved_self_sym_sizes", ())
            if len(sizes) == len(shape) and tuple(sizes[:-1]) == shape[:-1]:
                yield from ((before, n, kept) for before, n in rows.next_functions if before)


def _axis(saved: int, rank: int) -> int:
    return (saved - 2**64 if saved >= 2**63 else saved) % rank  # saved without a sign


def _place(shape: tuple[int, ...], axis: int, other: tuple[int, ...]) -> int | None:
    """The axis of another shape of as many elements that is this very axis, if there is one."""
    before = math.prod(shape[:axis])
    for place, edge in enumerate(other):
        if edge == shape[axis] and math.prod(other[:place]) == before:
            return place
    return None
