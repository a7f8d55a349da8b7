"""Finds tensors in the inputs and outputs of a layer, and replaces them in a copy.

A `SiteHook` calls `get` to find the tensor that its option ``index`` means, and `replaced_at` to
put the result there. An `ObserveHook` calls `flatten` for an observer of all tensors of a layer,
such as `Capture`. A `RetuneHook` calls it to find the device of a call in compiled code.
"""

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.utils.rnn import PackedSequence

from .._torch import tree_flatten, tree_map, tree_unflatten
from ..quoting import kind_of, with_article
from ..selectors.wrappers import is_distributed

Key = int | str | None


class Flattened(NamedTuple):
    """The dense floating-point tensors in a nested value.

    Attributes:
        tensors: the tensors, in the order of the value.
        rebuild: returns the value with other tensors in their places.
        nesting: returns the value with integers in place of the tensors, which are positions in
            `tensors`, and with None in place of all other leaves.
    """

    tensors: list[Tensor]
    rebuild: Callable[[Sequence[Tensor]], Any]
    nesting: Callable[[], Any]


def is_dense(value: Any) -> TypeGuard[Tensor]:
    """Return whether a value is a dense floating-point tensor that is whole on this process."""
    dense = isinstance(value, Tensor) and value.layout is torch.strided
    dense = dense and value.is_floating_point() and not value.is_nested
    # `is_distributed` takes longer, and this runs in every forward
    return dense and type(value).__name__ != "DTensor"


def get(value: Any, index: Key) -> Tensor:
    """Return the dense floating-point tensor itself, or at `index` of a tuple, list or dict.

    Raises:
        ValueError: if there is no such tensor. The caller adds a subject to the message.
    """
    if index is not None and index not in _indices(value):
        raise ValueError(f"is {_shown(value)}: it has no element {index!r}")
    element: Any = value if index is None else value[index]
    if is_dense(element):
        return element
    if is_distributed(element):
        raise ValueError(
            "is a DTensor, which may be spread over processes: build the layer with "
            "use_local_output=True, as parallelize_module does by default, or name another layer"
        )
    if isinstance(element, Tensor) and element.is_floating_point():
        kind = "a nested" if element.is_nested else "a sparse"
        raise ValueError(
            f"must be a dense tensor, got {kind} tensor: "
            "call to_padded_tensor() or to_dense() before this layer, and build "
            "nn.TransformerEncoder with enable_nested_tensor=False"
        )
    if isinstance(element, PackedSequence):
        raise ValueError(
            "is a PackedSequence, which has no batch axis: regularize the input of the layer "
            "before it is packed, or the output after pad_packed_sequence"
        )
    if index is None and _indices(value):
        raise ValueError(f"is {_shown(value)}: say which element with index=")
    raise ValueError(f"must be a floating-point tensor, got {_shown(element)}")


def replaced_at(value: Any, index: Key, new: Tensor) -> Any:
    """Return a copy of `value`, of the same type, with `new` at `index`."""
    if index is None:
        return new
    if isinstance(value, tuple):
        items: list[Any] = list(value)
        items[index] = new  # type: ignore[index]  # `get` has indexed it
        # the constructor of a named tuple may take other arguments
        return getattr(type(value), "_make", type(value))(items)

    # torch.compile can't trace copy.copy
    if is_compiling() and dataclasses.is_dataclass(value):  # an output of Hugging Face
        return dataclasses.replace(value, **{str(index): new})  # type: ignore[type-var]
    changed = type(value)(value) if is_compiling() else copy.copy(value)
    changed[index] = new
    return changed


def flatten(value: Any) -> Flattened:
    """Find all dense floating-point tensors in a nested value."""
    leaves, spec = tree_flatten(value)
    floats = [is_dense(x) for x in leaves]
    places = [i for i, is_float in enumerate(floats) if is_float]

    def rebuild(new: Sequence[Any]) -> Any:
        new_by_place = dict(zip(places, new, strict=True))
        new_leaves = [new_by_place.get(i, x) for i, x in enumerate(leaves)]
        return tree_unflatten(new_leaves, spec)

    def nesting() -> Any:
        position_by_place = {place: position for position, place in enumerate(places)}
        positions = [position_by_place.get(i) for i in range(len(leaves))]
        if is_compiling():
            return tree_unflatten(positions, spec)

        # In torch 2.6, a tuple that may refuse its fields, such as a PackedSequence, is a leaf. So
        # None stands in its place.
        if any(map(_may_refuse_fields, leaves)):
            return tree_unflatten(positions, spec)

        # Newer versions would make it anew from integers, which its constructor may refuse. So the
        # named tuple that it inherits from, which checks nothing, takes its place.
        unchecked = tree_map(_without_checks, value, is_leaf=_may_refuse_fields)
        _, spec_without_checks = tree_flatten(unchecked)
        return tree_unflatten(positions, spec_without_checks)

    tensors = [leaves[i] for i in places]
    return Flattened(tensors, rebuild, nesting)


def _may_refuse_fields(value: Any) -> bool:
    """Return whether the constructor of a tuple may refuse integers, as a ``PackedSequence`` does.

    Its class inherits from a named tuple.
    """
    return isinstance(value, tuple) and hasattr(type(value).__mro__[1], "_fields")


def _without_checks(value: Any) -> Any:
    """Return a tuple that may refuse fields as the named tuple that its class inherits from.

    Any other value is returned unchanged.
    """
    if not _may_refuse_fields(value):
        return value
    base: Any = type(value).__mro__[1]
    return base._make(value)


def _indices(value: Any) -> Collection[Any]:
    """Return the valid indices of a tuple, list or mapping; no indices for other values."""
    if isinstance(value, Mapping):
        return list(value)
    return range(-len(value), len(value)) if isinstance(value, (tuple, list)) else ()


def _shown(value: Any) -> str:
    """Describe a value in a message."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    name = kind_of(value)
    described = with_article(name)
    if name == "Proxy":
        return (
            "a torch.fx.Proxy (symbolic tracing can't follow an active regularizer: call "
            "model.eval() before tracing, or attach to the traced model)"
        )
    if isinstance(value, Mapping):
        return f"{described} with the keys {', '.join(map(repr, value)) or '(none)'}"
    if isinstance(value, (tuple, list)):
        return f"{described} of {len(value)} elements"
    return described
