"""Handles: tensors by which an operator in compiled code finds a Python object.

A compiled graph takes the handle as an input. So another copy of a model, whose objects have other
handles, runs the same graph, and torch.compile compiles nothing anew.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

_TOO_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def new_handle(owner: Any) -> Tensor:
    """Return a 0-dim int64 tensor on the CPU that stands for `owner` as long as it lives."""
    number = next(_numbers)
    _owners[number] = owner
    with torch.inference_mode(False):
        return torch.tensor(number, device="cpu")


def find(handle: Tensor | float) -> Any:
    """Return the object that a handle, or its number, stands for; None once it is gone."""
    return _owners.get(int(handle))


def custom_op(
    name: str, schema: str, mutates_args: tuple[str, ...] = ()
) -> Callable[[Callable[..., object]], CustomOpDef]:
    """``torch.library.custom_op`` for operators that find a Python object by its handle.

    They take tensors of any strides, and inductor runs them outside of CUDA graphs.
    """
    tags = [
        getattr(torch.Tag, tag)
        for tag in ("flexible_layout", "cudagraph_unsafe")
        if hasattr(torch.Tag, tag)
    ]
    takes_tags = "tags" in inspect.signature(torch.library.custom_op).parameters  # torch >= 2.7
    options: dict[str, Any] = {"tags": tags} if takes_tags else {}
    made: Callable[[Callable[..., object]], CustomOpDef] = torch.library.custom_op(
        f"dropblock_hooks::{name}", mutates_args=mutates_args, schema=schema, **options
    )
    return made


def is_exporting() -> bool:
    """Whether torch.export traces: a program of its own can hold no site.

    In torch 2.9, ``torch.compiler.is_exporting()`` is true inside torch.compile as well.
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def check_version() -> None:
    """Raise RuntimeError where this torch is too old to compile what is attached."""
    if _TOO_OLD:
        raise RuntimeError(
            f"torch {torch.__version__} can't compile or export a model with active regularizers "
            "or observers: use torch >= 2.9, or call the model without torch.compile"
        )
