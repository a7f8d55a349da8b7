"""Numbers that somebody gave to draw."""

from typing import Any

import torch
from torch import Tensor

from ..quoting import kind_of


def as_values(name: str, given: Any) -> Tensor:
    """A tensor, or what is an array (of NumPy, or an image of PIL), in float32 on the CPU.

    Raises:
        ValueError: for something else, and for a tensor that has no real numbers to draw.
    """
    values = given
    if not isinstance(given, Tensor) and _is_array(given):
        import numpy

        values = numpy.asarray(given)
        values = torch.from_numpy(values.copy()) if values.dtype.kind in "biuf" else given
    if not isinstance(values, Tensor):
        maps = ": give one of its maps, as in cam.maps[0]" if hasattr(given, "maps") else ""
        raise ValueError(f"{name} must be a tensor or an array, got {kind_of(given)}{maps}")
    if values.is_meta or values.is_complex():
        what = "a tensor on the meta device" if values.is_meta else str(values.dtype)
        raise ValueError(f"{name} must hold real numbers, got {what}")
    dense = values.detach().to_dense() if values.layout is not torch.strided else values.detach()
    return dense.float().cpu()


def _is_array(given: Any) -> bool:
    return hasattr(given, "__array__") or hasattr(given, "__array_interface__")
