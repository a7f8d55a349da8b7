"""One element of what a layer takes or returns: found by index, put back in a copy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

Index = int | str | None


def get(value: Any, index: Index) -> Tensor:
    """The floating-point tensor at `index` of a tensor, tuple, list or dict.

    Raises:
        ValueError: where there is none; the message says what there is.
    """
    if index is None:
        found = value
        if isinstance(value, tuple | list | Mapping):
            raise ValueError(f"is {_shown(value)}: say which element with index=")
    else:
        try:
            found = value[index]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"is {_shown(value)}: it has no element {index!r}") from None
    if not isinstance(found, Tensor):
        raise ValueError(f"must be a tensor, got {_shown(found)}")
    if not found.is_floating_point():
        raise ValueError(f"must be a floating-point tensor, got {_shown(found)}")
    return found


def put(value: Any, index: Index, new: Tensor) -> Any:
    """A copy of `value`, of the same type, with `new` at `index`."""
    if index is None:
        return new
    if isinstance(value, tuple):
        items = list(value)
        items[index] = new  # type: ignore[index]  # `get` has indexed it
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    changed = copy.copy(value)
    changed[index] = new
    return changed


def _shown(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {name} with the keys {', '.join(map(repr, value))}"
    if isinstance(value, tuple | list):
        return f"a {name} of {len(value)} elements"
    return f"a {name}"
