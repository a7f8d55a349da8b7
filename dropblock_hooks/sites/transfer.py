"""Numbers of tensors, brought from their devices at once."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from ..functional.masks import wide_dtype

_FORMATS = {torch.int64: "q", torch.float64: "d", torch.float32: "f"}


def numbers_of(tensors: Sequence[Tensor]) -> dict[int, list[float]]:
    """The numbers of each tensor, by its identity; each device is waited for once.

    They travel as bytes: a float64 does not hold all that an int64 does.
    """
    found: dict[int, list[float]] = {}
    for device in {each.device for each in tensors}:
        here = {id(each): _plain(each) for each in tensors if each.device == device}
        raw = bytes(torch.cat([each.view(torch.uint8) for each in here.values()]).tolist())
        formats = (f"{each.numel()}{_FORMATS[each.dtype]}" for each in here.values())
        numbers = iter(struct.unpack(f"={''.join(formats)}", raw))
        found |= {key: list(islice(numbers, each.numel())) for key, each in here.items()}
    return found


def _plain(tensor: Tensor) -> Tensor:
    """In one row, whole where it is spread over devices, and of a type that can be read."""
    whole: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    wide = wide_dtype(whole.device) if whole.is_floating_point() else torch.int64
    return whole.to(wide).reshape(-1)
