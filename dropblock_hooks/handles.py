"""Handles: tensors by which an operator in compiled code finds a Python object.

A compiled graph takes the handle as an input. So another copy of a model, whose objects have other
handles, runs the same graph, and torch.compile compiles nothing anew.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

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
