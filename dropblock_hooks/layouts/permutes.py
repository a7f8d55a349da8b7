"""Whether code may turn the axes of a map: read in the functions themselves, at attaching."""

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_TURNS = {
    "permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint", "mT", "T",
    "mH", "H", "einsum", "tensordot", "rearrange", "as_strided", "stack", "unbind",
}  # fmt: skip
_DEEPEST = 4


def may_turn(module: nn.Module) -> bool:
    """Whether the code of this very module, not of its children, can change the order of axes.

    True for what can't be read, such as a ScriptModule.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return True
    kind: Any = type(module)
    own = (value for value in vars(module).values() if not isinstance(value, nn.Module))
    return _class_turns(kind) or any(_turns(value, 0) or _object_turns(value) for value in own)


def _object_turns(value: Any) -> bool:
    """Whether a method of a helper object, which is no module, can."""
    kind: Any = type(value)
    theirs = (kind.__module__ or "").partition(".")[0] in ("builtins", "torch", "collections")
    return not theirs and not callable(getattr(value, "__code__", None)) and _class_turns(kind)


@functools.cache
def _class_turns(kind: Any) -> bool:
    for parent in kind.__mro__:
        if parent in (nn.Module, object):
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
    value = getattr(value, "fget", value)  # of properties
    if getattr(value, "__name__", None) in _TURNS:
        return True
    if not isinstance(value, types.FunctionType) or depth > _DEEPEST:
        return False
    names = set(_names(value.__code__))
    if names & _TURNS:
        return True
    used = _used_by(value, names)
    return any(_is_users(each) and _turns(each, depth + 1) for each in used)


def _used_by(function: types.FunctionType, names: set[str]) -> Iterator[Any]:
    """What a function can reach by these names: globals, what modules hold, what it encloses."""
    for cell in function.__closure__ or ():  # a decorator encloses the function that it wraps
        with contextlib.suppress(ValueError):  # not assigned yet
            yield cell.cell_contents
    for name in names:
        value = function.__globals__.get(name)
        yield value
        if isinstance(value, types.ModuleType) and _is_users(value):
            yield from (getattr(value, attribute, None) for attribute in names)


def _names(code: types.CodeType) -> Iterator[str]:
    """All names that code uses, and the functions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_users(value: Any) -> bool:
    """Whether a function, or a module of code, is none of torch's."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] != "torch"
    module = getattr(value, "__module__", None) or ""
    return callable(value) and not isinstance(value, type) and not module.startswith("torch.")
