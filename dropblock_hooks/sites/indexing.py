"""One element of what a layer takes or returns: found by index, put back in a copy."""

import copy
import dataclasses
import sys
from collections import defaultdict
from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

Index = int | str | None


def get(value: Any, index: Index) -> Tensor:
    """The floating-point tensor itself, or at `index` of a tuple, list, dict or dataclass.

    Raises:
        ValueError: where there is none; the message says what there is.
    """
    if index is None and isinstance(value, Tensor) and value.is_floating_point():
        return value
    if _is_proxy(value):
        raise ValueError(_PROXY)
    if index is None:
        found = value
        if isinstance(value, tuple | list | Mapping) or _is_record(value):
            raise ValueError(f"is {_shown(value)}: say which element with index=")
    elif _has(value, index):
        found = getattr(value, str(index)) if _is_record(value) else value[index]
    else:
        raise ValueError(f"is {_shown(value)}: it has no element {index!r}")
    if _is_proxy(found):
        raise ValueError(_PROXY)
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
        kind: Any = type(value)
        # a constructor of a named one may take other arguments
        return kind._make(items) if hasattr(kind, "_fields") else kind(items)
    if _is_record(value):
        return _put_in_record(value, str(index), new)
    changed = _copied(value)
    changed[index] = new
    return changed


def _copied(value: Any) -> Any:
    """A copy of a list or a mapping; torch.compile can't trace ``copy.copy``."""
    if not is_compiling():
        return copy.copy(value)
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, value)
    if dataclasses.is_dataclass(value):  # also a mapping, as outputs of Hugging Face's models are
        return dataclasses.replace(value)  # type: ignore[type-var]  # a dataclass
    return type(value)(value)


def _put_in_record(value: Any, name: str, new: Tensor) -> Any:
    """A copy of a dataclass; not made anew, which would set again what its constructor sets."""
    if is_compiling():  # which can't trace copy
        changed = object.__new__(type(value))
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        for key in dict.fromkeys((*names, *getattr(value, "__dict__", ()))):
            object.__setattr__(changed, key, getattr(value, key))
    else:
        changed = copy.copy(value)
    object.__setattr__(changed, name, new)  # also where it is frozen
    return changed


_PROXY = (
    "is a torch.fx.Proxy: symbolic tracing can't follow a regularizer that acts: call "
    "model.eval() before tracing, or attach to the traced model; active='always' can't be traced"
)


def _is_proxy(value: Any) -> bool:
    proxy = getattr(sys.modules.get("torch.fx"), "Proxy", ())
    return isinstance(value, proxy)


def _has(value: Any, index: Index) -> bool:
    if isinstance(value, MutableMapping):
        return index in value
    if isinstance(value, tuple | list):
        return isinstance(index, int) and -len(value) <= index < len(value)
    return _is_record(value) and index in {f.name for f in dataclasses.fields(value)}


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, Mapping | type)


def _shown(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        keys = ", ".join(map(repr, value))
        return f"a {name} with {f'the keys {keys}' if keys else 'no keys'}"
    if _is_record(value):
        return f"a {name} with the fields {', '.join(f.name for f in dataclasses.fields(value))}"
    if isinstance(value, tuple | list):
        return f"a {name} of {len(value)} elements"
    return f"a {name}"
