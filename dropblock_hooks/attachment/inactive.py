"""Likely causes: why a layer is not called by a forward, or called and never active."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..selectors.wrappers import find_module, named_modules

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def why_not_called(
    base: nn.Module, name: str, calls: Mapping[str, int], compiled: bool = False
) -> str:
    """The likely cause; the same words for layers in the same situation.

    Args:
        base: the model.
        name: the layer.
        calls: calls by name of other layers, as far as they are known.
        compiled: whether compiled code ran, which does not count calls that change nothing.
    """
    module = find_module(base, name)
    local = name.rpartition(".")[2]
    if module is None:
        return "the model has no layer of this name any more: attach again"
    if compiled and base.training and not module.training:
        return "the layer is in evaluation mode inside a training model (frozen)"
    parent_name, parent = _parent(base, name)
    if parent is None:
        return "the model itself was not called, only layers inside it"
    if _is_called_inside(name, module, calls) or (
        isinstance(module, _CONTAINERS) and _has_forward_of_container(module)
    ):
        by = ", as gradient checkpointing does" if _checkpoints(base, name) else ""
        inside = [calls.get(f"{name}.{below}") for below, _ in named_modules(module) if below]
        if 0 in inside and not any(inside):
            return "a branch not taken: nothing inside it was called either"
        return f"a container that the model loops over{by}: name the layers inside it"
    if calls.get(parent_name) == 0:
        return f"a branch not taken: its parent '{parent_name}' was not called either"
    if isinstance(parent, nn.MultiheadAttention):
        return (
            "fused attention: nn.MultiheadAttention takes the weight of this layer and does not "
            "call it; name the attention itself, with index=0"
        )
    if _is_fused(parent) and _is_dropout_like(local, module):
        return (
            "fused attention: scaled_dot_product_attention drops by itself and leaves this layer "
            "out; name the projection behind it, or set fused_attn = False"
        )
    use = _use(_class_of(parent), local)
    if use == "weight":
        return f"{type(parent).__name__} takes its weight and does not call it: name its parent"
    if use == "forward":
        return f"{type(parent).__name__} calls its forward() directly, and hooks are passed by"
    return "a branch not taken, or a layer that the model does not use"


def why_inactive(base: nn.Module, module: nn.Module, enabled: bool, acts_on: str) -> str:
    """Why a layer was called and its regularizer never active."""
    if base.training and not module.training:
        return "the layer is in evaluation mode inside a training model (frozen)"
    if not enabled:
        return "the attachment is paused"
    if acts_on == "gradient":
        return "no gradient has come through it"
    return "only evaluation was run"


def _parent(base: nn.Module, name: str) -> tuple[str, nn.Module | None]:
    """The next module above, other than containers without a forward of their own."""
    while name:
        name = name.rpartition(".")[0]
        parent = find_module(base, name)
        if not isinstance(parent, _CONTAINERS) or not name:
            return name, parent
    return "", None


def _is_called_inside(name: str, module: nn.Module, calls: Mapping[str, int]) -> bool:
    inside = (f"{name}.{below}" for below, _ in named_modules(module) if below)
    return any(calls.get(each) for each in inside)


def _has_forward_of_container(module: nn.Module) -> bool:
    """Whether it does no more than to run, or hold, its children, of which there are some."""
    plain = type(module).forward in (nn.Sequential.forward, nn.Module.forward)
    return plain and len(module._modules) > 0


def _checkpoints(base: nn.Module, name: str) -> bool:
    parts = name.split(".")
    above = (find_module(base, ".".join(parts[:cut])) for cut in range(len(parts)))
    return any(getattr(module, "grad_checkpointing", False) is True for module in above)


def _is_fused(attention: nn.Module) -> bool:
    if not getattr(attention, "fused_attn", True):
        return False
    codes = _codes(_class_of(attention))
    return any("scaled_dot_product_attention" in code.co_names for code in codes)


def _is_dropout_like(local: str, module: nn.Module) -> bool:
    kinds = (nn.modules.dropout._DropoutNd, nn.Identity, nn.Softmax)
    return isinstance(module, kinds) or "drop" in local


def _class_of(module: nn.Module) -> Any:  # Any: mypy takes no class as hashable here
    return type(module)


@functools.lru_cache(maxsize=1024)
def _codes(kind: Any) -> tuple[types.CodeType, ...]:
    """The code of the methods of a class that its forward can reach by their names."""
    methods: dict[str, list[types.CodeType]] = {}
    for cls in kind.__mro__:
        if cls in (nn.Module, torch.jit.ScriptModule):
            break
        for name, method in vars(cls).items():
            function = getattr(method, "fget", None) or getattr(method, "__wrapped__", method)
            code = getattr(function, "__code__", None)
            if isinstance(code, types.CodeType):
                methods.setdefault(name, []).append(code)  # more than one: by super()
    reached: dict[types.CodeType, None] = {}
    waiting = list(methods.get("forward", ()))
    while waiting:
        code = waiting.pop()
        if code not in reached:
            reached[code] = None
            waiting += [below for name in code.co_names for below in methods.get(name, ())]
    return tuple(reached)


def _use(kind: Any, local: str) -> str | None:
    """What the code of a class does with its child other than calling it."""
    for code in _codes(kind):
        for first, second in _attributes(code):
            if first == local and second in ("weight", "forward"):
                return second
    return None


def _attributes(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """Attributes that are read one from the other: ``self.qkv.weight`` gives (qkv, weight)."""
    before = None
    for instruction in dis.get_instructions(code):
        name = instruction.argval if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") else None
        if before and isinstance(name, str):
            yield before, name
        before = name if isinstance(name, str) else None
