"""Tensors inside what a layer takes or returns: found, and replaced in a copy."""

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._pytree import tree_flatten, tree_unflatten

Index = int | str | None


def get(value: Any, index: Index) -> Tensor:
    """The floating-point tensor itself, or at `index` of a tuple, list, dict or dataclass.

    Raises:
        ValueError: where there is none; the message says what there is.
    """
    found = value
    if index is not None:
        if not _has(value, index):
            raise ValueError(f"is {_shown(value)}: it has no element {index!r}")
        found = getattr(value, str(index)) if _is_record(value) else value[index]
    if isinstance(found, Tensor) and found.is_floating_point():
        if found.is_nested or found.layout is not torch.strided:
            raise ValueError(f"must be a dense tensor, got {_not_dense(found)}")
        return found
    if index is None and (isinstance(value, (tuple, list, Mapping)) or _is_record(value)):
        raise ValueError(f"is {_shown(value)}: say which element with index=")
    raise ValueError(f"must be a floating-point tensor, got {_shown(found)}")


def _not_dense(x: Tensor) -> str:
    if not x.is_nested:
        return f"one of the layout {x.layout}: call to_dense() before this layer"
    return (
        "a nested tensor: build nn.TransformerEncoder with enable_nested_tensor=False, or call "
        "to_padded_tensor() before this layer"
    )


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
        if dataclasses.is_dataclass(value):  # some are mappings, too: those of Hugging Face
            if not all(f.init for f in dataclasses.fields(value)):
                raise TypeError("compiled code can't copy a dataclass with fields of init=False")
            return dataclasses.replace(value, **{str(index): new})  # type: ignore[type-var]
        changed = type(value)(value)
    else:
        changed = copy.copy(value)
    if _is_record(value):
        object.__setattr__(changed, str(index), new)  # also where it is frozen
    else:
        changed[index] = new
    return changed


class Nested:
    """All floating-point tensors in a nested value. Calling it puts others in their places.

    Attributes:
        tensors: what the value holds now.
    """

    def __init__(self, value: Any) -> None:
        self.leaves, self.spec = tree_flatten(value)
        floats = [isinstance(x, Tensor) and x.is_floating_point() for x in self.leaves]
        self.places = [i for i, is_float in enumerate(floats) if is_float]
        self.tensors: list[Tensor] = [self.leaves[i] for i in self.places]

    def __call__(self, new: Sequence[Any]) -> Any:
        leaves = list(self.leaves)
        for place, x in zip(self.places, new, strict=True):
            leaves[place] = x
        return tree_unflatten(leaves, self.spec)

    def nesting(self) -> Any:
        """The nested structure: the index of each tensor in its place, None in other places."""
        numbers: list[int | None] = [None] * len(self.leaves)
        for number, place in enumerate(self.places):
            numbers[place] = number
        return tree_unflatten(numbers, self.spec)


def _has(value: Any, index: Index) -> bool:
    if isinstance(value, MutableMapping):
        return index in value
    if isinstance(value, (tuple, list)):
        return isinstance(index, int) and -len(value) <= index < len(value)
    return _is_record(value) and index in {f.name for f in dataclasses.fields(value)}


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, (Mapping, type))


def _shown(value: Any) -> str:
    name = type(value).__name__
    if name == "Proxy":
        return (
            "a torch.fx.Proxy (symbolic tracing can't follow an active regularizer: call "
            "model.eval() before tracing, or attach to the traced model)"
        )
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        keys = ", ".join(map(repr, value))
        return f"a {name} with {f'the keys {keys}' if keys else 'no keys'}"
    if _is_record(value):
        return f"a {name} with the fields {', '.join(f.name for f in dataclasses.fields(value))}"
    if isinstance(value, (tuple, list)):
        return f"a {name} of {len(value)} elements"
    return f"a {name}"
