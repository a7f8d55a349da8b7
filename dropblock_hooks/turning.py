"""Whether code may turn the axes of a map: read in the functions themselves, at attaching."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_TURNS = {
    "permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint", "mT", "T",
    "mH", "H", "einsum", "tensordot", "rearrange", "as_strided",
}  # fmt: skip
_DEEPEST = 4


def may_turn(module: nn.Module) -> bool:
    """Whether the code of this very module, not of its children, can change the order of axes.

    True for what can't be read, such as a ScriptModule.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return True
    own = (value for value in vars(module).values() if callable(value))
    kind: Any = type(module)
    return _class_turns(kind) or any(_turns(function, 0) for function in own)


@functools.cache
def _class_turns(kind: Any) -> bool:
    for parent in kind.__mro__:
        if parent is nn.Module:
            return False
        for name, value in vars(parent).items():
            if name != "__init__" and _turns(value, 0):
                return True
    return False


def _turns(value: Any, depth: int) -> bool:
    """Whether a function, or one that it calls by its name, uses what changes the order of axes."""
    if isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)  # of methods, static and bound
    if getattr(value, "__name__", None) in _TURNS:
        return True
    if not isinstance(value, types.FunctionType) or depth > _DEEPEST:
        return False
    names = set(_names(value.__code__))
    if names & _TURNS:
        return True
    called = (value.__globals__.get(name) for name in names)
    return any(_is_users(function) and _turns(function, depth + 1) for function in called)


def _names(code: types.CodeType) -> Iterator[str]:
    """All names that code uses, and the functions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_users(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return callable(value) and not isinstance(value, type) and not module.startswith("torch.")
