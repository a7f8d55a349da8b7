"""Operators whose kernels become a part of the graph that torch.compile makes.

`operators.operator` calls `look_into` for each operator that has ``fits_graph``, a condition on its
tensors.

An operator of ``torch.library`` is opaque: compiled code calls its Python at each step. `look_into`
lets AOTAutograd trace into an operator, like into a ``torch.library.triton_op``. Then inductor
starts the kernels from the code that it writes.

If the tensors do not fit, the operator stays opaque. If the trace fails, it also stays opaque, and
a warning tells the reason.
"""

import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .. import messages
from .._torch import allowing_constants, analyze_kernels_once, look_into_operator
from ..compiling import is_exporting
from ..warn import warn
from .kernels import launch

SWITCH = "DROPBLOCK_HOOKS_IN_GRAPH"
"""The environment variable that keeps all operators opaque if its value is 0."""
enabled = os.environ.get(SWITCH) != "0"
"""Whether operators are traced; a test or a comparison changes it."""
CHANGED = ("state", "alive", "batches", "tails", "peaks", "branch")
"""The names of the arguments that operators change."""
_warned: set[str] = set()  # the operators that can't be traced, after a warning about each


def look_into(
    name: str, run: Callable[..., Any], fits: Callable[..., bool], library: torch.library.Library
) -> None:
    """Have AOTAutograd trace into an operator, where its tensors fit.

    Args:
        name: the name of the operator, without the namespace.
        run: the implementation of the operator, which consists of torch operations and
            `launch.start`. It changes only arguments with a name in `CHANGED`.
        fits: gets the arguments by name, and returns whether `run` can be traced, which needs
            tensors on a GPU.
        library: the library that has defined the operator.
    """
    names = list(inspect.signature(run).parameters)

    def rule(mode: Any, operator: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = dict(zip(names, args, strict=False))
        arguments.update(kwargs)
        if enabled and not is_exporting() and fits(**arguments):
            # otherwise torch compiles a kernel three times for each launch
            analyze_kernels_once(launch.is_ours)
            with mode, allowing_constants(), launch.tracing():
                changed = [x for key, x in arguments.items() if key in CHANGED and x is not None]
                # A trace that fails may have changed some of them. After a trace that succeeds,
                # nothing uses the copies, so the graph leaves them out.
                before = [x.clone() for x in changed]
                try:
                    return run(*args, **kwargs)
                except Exception as error:  # compilers raise many kinds
                    for x, value in zip(changed, before, strict=True):
                        x.copy_(value)
                    _tell(name, error)
        # the operator stays opaque
        return mode.__torch_dispatch__(operator, types, args, kwargs)

    look_into_operator(f"dropblock_hooks::{name}", rule, library)


def _tell(name: str, error: Exception) -> None:
    """Warn, once for each operator, that it can't be traced."""
    if name in _warned:
        return
    _warned.add(name)
    reason = f"{type(error).__name__}: {str(error)[:500]}"
    warn(messages.NOT_IN_GRAPH.format(operator=name, error=reason))


def fits_kernels(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether kernels that work on these tensors can be traced, and `x` is not empty."""
    on_one_device = all(other is None or other.device == x.device for other in others)
    uses_kernels = launch.is_on(x.device, x.dtype) and x.numel() > 0
    return on_one_device and uses_kernels and are_static([x, *others])


def are_static(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether a trace knows the sizes of all tensors, so that kernels can take them."""
    for x in tensors:
        if x is None:
            continue
        sizes = (*x.shape, *x.stride(), x.storage_offset())
        if not all(type(size) is int for size in sizes):
            return False
    return True
