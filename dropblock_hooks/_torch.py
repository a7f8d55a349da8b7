"""Private names of torch, each behind a function that says what it is for.

Tried with torch 2.6 to 2.14.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

NO_TASK = -1
graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: NO_TASK)
"""The number of the backward that runs now in this thread, in which a checkpoint may call layers
again; `NO_TASK` outside of a backward. Without it, recomputed calls are counted twice.
"""
transforming: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)
"""Whether a transform of torch.func is active. Without it, `vmap` and others are not refused."""
is_tracing: Callable[[], bool] = getattr(torch._C, "_is_tracing", lambda: False)
"""Whether torch.jit.trace records. Without it, a trace of an active regularizer is not refused."""
_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
set_eval_frame: Callable[[Any], Any] = getattr(_eval_frame, "set_eval_frame", lambda callback: None)
"""Switches dynamo off (None), or on again with what it has returned. Without it, dynamo may compile
functions of the package that run beside compiled code.
"""
_run_as_python: list[Any] = []
_DYNAMO_CONFIG = "torch._dynamo.config"


def foreach_norm(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """The norms of all tensors by one operator; without the private name, by one for each."""
    if hasattr(torch, "_foreach_norm"):
        return list(torch._foreach_norm(list(tensors), norm_type, dtype=dtype))
    return [torch.linalg.vector_norm(x, norm_type, dtype=dtype) for x in tensors]


def foreach_mul_(tensors: Sequence[Tensor], factors: Tensor | float | Sequence[Tensor]) -> None:
    """Multiply all tensors by a number, or each by its own factor, in place."""
    if hasattr(torch, "_foreach_mul_"):
        torch._foreach_mul_(list(tensors), factors)  # type: ignore[arg-type]  # one of three overloads
        return
    if isinstance(factors, Tensor | float):
        factors = [torch.as_tensor(factors)] * len(tensors)
    for x, factor in zip(tensors, factors, strict=True):
        x.mul_(factor)


def foreach_sub_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Subtract a tensor from each tensor, in place."""
    if hasattr(torch, "_foreach_sub_"):
        torch._foreach_sub_(list(tensors), list(others))
        return
    for x, other in zip(tensors, others, strict=True):
        x.sub_(other)


def foreach_copy_(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write the values into the tensors, which may have another dtype."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(list(tensors), list(values))
        return
    for x, value in zip(tensors, values, strict=True):
        x.copy_(value)


def foreach_zero_(tensors: Sequence[Tensor]) -> None:
    """Set all elements of the tensors to 0."""
    if hasattr(torch, "_foreach_zero_"):
        torch._foreach_zero_(list(tensors))
        return
    for x in tensors:
        x.zero_()


def constant_when_traced(function: Function) -> Function:
    """Decorate a function that torch.compile calls while it traces, and whose result it keeps.

    It is what ``torch.compiler.assume_constant_result`` sets. That function imports dynamo, which
    takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # on a function
    return function


def run_as_python(function: Function) -> Function:
    """Decorate a function that dynamo shall not compile by itself; inside other code it is traced.

    ``torch.compiler.disable`` would break the graph there. `skip_functions` tells dynamo.
    """
    _run_as_python.append(function)
    return function


def skip_functions() -> None:
    """Tell dynamo what it shall not compile; ``torch._dynamo.reset`` forgets it.

    Without the private name, dynamo compiles these functions. Then the hook of a compiled model
    does not count its forwards, and a `Watchdog` looks in ``step`` only.
    """
    skip_code = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip_code is None:
        return
    for function in _run_as_python:
        skip_code(function.__code__)


def keep_address(tensor: Tensor) -> None:
    """Tell torch.compile that a tensor stays where it is in memory.

    Otherwise CUDA graphs are not used for a graph that changes the tensor. The address is no guard,
    so equal blocks of a model share compiled code.
    """
    from torch._dynamo import mark_static_address

    mark_static_address(tensor, guard=False)


def guard_hooks() -> None:
    """Make torch.compile check that the hooks of a module are those that it has compiled.

    By default dynamo does not check them (``skip_nnmodule_hook_guards``). Then it runs the code of
    a bare module for another one of the same class that has hooks, and the other way round. The
    setting is changed when dynamo is imported, so that a process that compiles nothing need not
    import it.
    """
    config = sys.modules.get(_DYNAMO_CONFIG)
    if config is not None:
        _guard_hooks_in(config)
    elif not any(isinstance(finder, _ImportOfDynamo) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportOfDynamo())


def _guard_hooks_in(config: ModuleType) -> None:
    if hasattr(config, "skip_nnmodule_hook_guards"):
        config.skip_nnmodule_hook_guards = False  # type: ignore[attr-defined]  # of dynamo


class _ImportOfDynamo(importlib.abc.MetaPathFinder):
    """Waits for the import of dynamo's settings, and changes one when they are loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _DYNAMO_CONFIG:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            _guard_hooks_in(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]  # of this one import
        return spec
