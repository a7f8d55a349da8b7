"""What a site remembers of shapes that it has seen."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

_T = TypeVar("_T")
_MOST = 256


class ShapeMemory(Generic[_T]):
    """A value for each of some shapes; more than `_MOST` are forgotten."""

    def __init__(self) -> None:
        self._known: dict[torch.Size, _T] = {}

    def get(self, shape: torch.Size) -> _T | None:
        """What is remembered of a shape, or None."""
        try:
            return self._known.get(shape)
        except TypeError:  # a symbolic size, as in make_fx, has no hash
            return None

    def put(self, shape: torch.Size, value: _T) -> None:
        """Remember a value, if the shape is made of numbers."""
        if len(self._known) >= _MOST:
            self._known.clear()
        if all(isinstance(edge, int) for edge in shape):
            self._known[shape] = value
