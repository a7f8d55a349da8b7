"""What the sites of one Attachment share: the time, the switches, the loss scale."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from .functional.masks import wide_dtype


class Control:
    """What the sites of one Attachment share: the time and the switches."""

    def __init__(self, root: str = "", grad_scaler: Any = None) -> None:
        self.root = root
        self.epoch = 0.0
        self.enabled = True
        self.installed = True
        self.stepped = False
        self.warned = False
        self.forwards = 0
        self.proved = False
        self.told: frozenset[str] = frozenset()
        self.keys: tuple[str, ...] = ()
        self.origin: weakref.ref[Control] | None = None
        self.copied_at = 0.0
        self.expects_scaler = grad_scaler is not None
        self.grad_scaler = grad_scaler

    def __deepcopy__(self, memo: dict[int, Any]) -> Control:
        copied = Control.__new__(Control)
        copied.__dict__.update(self.__dict__)  # the scaler stays the one of the training loop
        copied.origin, copied.copied_at = weakref.ref(self), self.epoch
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "grad_scaler": None, "origin": None}  # of the training loop

    def falls_behind(self) -> bool:
        """Whether this belongs to a copy (an EMA) that stands still while its original moves on."""
        origin = self.origin() if self.origin is not None else None
        if origin is None or not origin.installed:
            return False
        return origin.epoch != self.epoch == self.copied_at

    def grad_scale(self, device: torch.device) -> float | Tensor:
        """What the loss is multiplied by, read without waiting for the device."""
        scaler = self.grad_scaler
        if scaler is None or not _is_enabled(scaler):
            return 1.0
        # torch.compile refuses the methods of torch's scaler, and a number would be compiled in
        scale = getattr(scaler, "_scale", None)
        if isinstance(scale, Tensor):
            # wide, so that bound * scale fits; a copy, since the scaler changes its own in place
            return scale.to(device, wide_dtype(device), copy=True, non_blocking=True)
        initial = getattr(scaler, "_init_scale", None)
        return float(scaler.get_scale() if initial is None else initial)


def _is_enabled(scaler: Any) -> bool:
    enabled = getattr(scaler, "_enabled", None)
    return bool(getattr(scaler, "is_enabled", lambda: True)() if enabled is None else enabled)
