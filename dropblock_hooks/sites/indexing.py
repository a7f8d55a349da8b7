"""Finds tensors in the inputs and outputs of a layer, and replaces them in a copy."""

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.utils.rnn import PackedSequence

from .._torch import tree_flatten, tree_map, tree_unflatten
from ..quoting import kind_of
from ..selectors.wrappers import is_distributed

Index = int | str | None


class Flattened(NamedTuple):
    """The dense floating-point tensors in a nested value.

    Attributes:
        tensors: the tensors, in the order of the value.
        put: returns the value with other tensors in their places.
        nesting: returns the value with the index of each tensor in its place, and None elsewhere.
    """

    tensors: list[Tensor]
    put: Callable[[Sequence[Tensor]], Any]
    nesting: Callable[[], Any]


def is_dense(value: Any) -> TypeGuard[Tensor]:
    """Return whether a value is a dense floating-point tensor that is whole on this process."""
    dense = isinstance(value, Tensor) and value.layout is torch.strided
    dense = dense and value.is_floating_point() and not value.is_nested
    # `is_distributed` takes longer, and this runs in every forward
    return dense and type(value).__name__ != "DTensor"


def get(value: Any, index: Index) -> Tensor:
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


def put(value: Any, index: Index, new: Tensor) -> Any:
    """Return a copy of `value`, of the same type, with `new` at `index`."""
    if index is None:
        return new
    if isinstance(value, tuple):
        items: list[Any] = list(value)
        items[index] = new  # type: ignore[index]  # `get` has indexed it
        # the constructor of a named tuple may take other arguments
        return getattr(type(value), "_make", type(value))(items)
    if is_compiling() and dataclasses.is_dataclass(value):  # an output of Hugging Face
        return dataclasses.replace(value, **{str(index): new})  # type: ignore[type-var]
    # torch.compile can't trace copy.copy
    changed = type(value)(value) if is_compiling() else copy.copy(value)
    changed[index] = new
    return changed


def flat(value: Any) -> Flattened:
    """Find all dense floating-point tensors in a nested value."""
    leaves, spec = tree_flatten(value)
    floats = [is_dense(x) for x in leaves]
    places = [i for i, is_float in enumerate(floats) if is_float]

    def put(new: Sequence[Any]) -> Any:
        new_by_place = dict(zip(places, new, strict=True))
        return tree_unflatten([new_by_place.get(i, x) for i, x in enumerate(leaves)], spec)

    def nesting() -> Any:
        index_by_place = {place: index for index, place in enumerate(places)}
        indices = [index_by_place.get(i) for i in range(len(leaves))]
        if is_compiling():
            return tree_unflatten(indices, spec)
        if any(map(_checks, leaves)):  # torch 2.6 does not open such tuples
            return tree_unflatten(indices, spec)
        unchecked = tree_map(_plain, value, is_leaf=_checks)
        return tree_unflatten(indices, tree_flatten(unchecked)[1])

    tensors = [leaves[i] for i in places]
    return Flattened(tensors, put, nesting)


def _checks(value: Any) -> bool:
    """Return whether a named tuple may refuse other fields, as a ``PackedSequence`` does."""
    return isinstance(value, tuple) and hasattr(type(value).__mro__[1], "_fields")


def _plain(value: Any) -> Any:
    """Return a named tuple without the checks of its subclass, and any other value unchanged."""
    base: Any = type(value).__mro__[1]
    return base._make(value) if _checks(value) else value


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
    if name == "Proxy":
        return (
            "a torch.fx.Proxy (symbolic tracing can't follow an active regularizer: call "
            "model.eval() before tracing, or attach to the traced model)"
        )
    if isinstance(value, Mapping):
        return f"a {name} with the keys {', '.join(map(repr, value)) or '(none)'}"
    return f"a {name} of {len(value)} elements" if isinstance(value, (tuple, list)) else f"a {name}"
