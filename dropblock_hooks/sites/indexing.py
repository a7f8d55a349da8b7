"""Finds tensors in the inputs and outputs of a layer, and replaces them in a copy."""

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..quoting import kind_of

Index = int | str | None


def get(value: Any, index: Index) -> Tensor:
    """The floating-point tensor itself, or at `index` of a tuple, list, dict or dataclass.

    ValueError describes the value if there is no such tensor.
    """
    found = value
    if index is not None:
        if index not in (_indices(value) or ()):
            raise ValueError(f"is {_shown(value)}: it has no element {index!r}")
        if isinstance(index, str) and not isinstance(value, Mapping):
            found = getattr(value, index)
        else:
            found = value[index]
    if not isinstance(found, Tensor) or not found.is_floating_point():
        if index is None and _indices(value) is not None:
            raise ValueError(f"is {_shown(value)}: say which element with index=")
        raise ValueError(f"must be a floating-point tensor, got {_shown(found)}")
    if found.is_nested or found.layout is not torch.strided:
        raise ValueError(
            f"must be a dense tensor, got {'a nested' if found.is_nested else 'a sparse'} tensor: "
            "call to_padded_tensor() or to_dense() before this layer, and build "
            "nn.TransformerEncoder with enable_nested_tensor=False"
        )
    return found


def put(value: Any, index: Index, new: Tensor) -> Any:
    """A copy of `value`, of the same type, with `new` at `index`."""
    if index is None:
        return new
    if isinstance(value, tuple):
        items = list(value)
        items[index] = new  # type: ignore[index]  # `get` has indexed it
        kind: Any = type(value)
        # the constructor of a named tuple may take other arguments
        return kind._make(items) if hasattr(kind, "_fields") else kind(items)
    if is_compiling():  # torch.compile can't trace copy.copy
        if dataclasses.is_dataclass(value):  # the outputs of Hugging Face are mappings, too
            if not all(f.init for f in dataclasses.fields(value)):
                raise TypeError("compiled code can't copy a dataclass with fields of init=False")
            return dataclasses.replace(value, **{str(index): new})  # type: ignore[type-var]
        changed = type(value)(value)
    else:
        changed = copy.copy(value)
    if isinstance(index, str) and not isinstance(value, Mapping):
        object.__setattr__(changed, index, new)  # also of a frozen class
    else:
        changed[index] = new
    return changed


class Nested:
    """All floating-point tensors in a nested value. Calling it puts others in their places.

    Attributes:
        tensors: the tensors in the value.
    """

    def __init__(self, value: Any) -> None:
        self.leaves, self.spec = tree_flatten(value)
        floats = [isinstance(x, Tensor) and x.is_floating_point() for x in self.leaves]
        self.places = [i for i, is_float in enumerate(floats) if is_float]
        self.tensors: list[Tensor] = [self.leaves[i] for i in self.places]

    def __call__(self, new: Sequence[Any]) -> Any:
        there = dict(zip(self.places, new, strict=True))
        return tree_unflatten([there.get(i, x) for i, x in enumerate(self.leaves)], self.spec)

    def nesting(self) -> Any:
        """The nested structure: the index of each tensor in its place, None in other places."""
        numbers = {place: number for number, place in enumerate(self.places)}
        return tree_unflatten([numbers.get(i) for i in range(len(self.leaves))], self.spec)


def _indices(value: Any) -> Collection[Any] | None:
    """What may be `index` of a tuple, list, mapping or dataclass; None for other values."""
    if isinstance(value, Mapping):
        return list(value)
    if isinstance(value, (tuple, list)):
        return range(-len(value), len(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [f.name for f in dataclasses.fields(value)]
    return None


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    name, indices = kind_of(value), _indices(value)
    if name == "Proxy":
        return (
            "a torch.fx.Proxy (symbolic tracing can't follow an active regularizer: call "
            "model.eval() before tracing, or attach to the traced model)"
        )
    if isinstance(indices, range):
        return f"a {name} of {len(value)} elements"
    if indices is None:
        return f"a {name}"
    return f"a {name} with the keys {', '.join(map(repr, indices)) or '(none)'}"
