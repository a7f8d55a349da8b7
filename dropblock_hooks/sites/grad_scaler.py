"""Finds the GradScaler that multiplies the loss, reads its scale, and reports a forgotten one."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ..findings import Finding, Kind, Severity
from ..functional.masks import wide_dtype

_WRAPPED = ("_scaler", "scaler", "grad_scaler", "_precision", "precision_plugin", "accelerator")
"""Where timm's NativeScaler, Lightning's precision plugins and trainers, accelerate's Accelerator
and optimizers, Fabric and Transformers' Trainer keep theirs."""


def checked_scaler(given: Any) -> Any:
    """The scaler (an object with ``get_scale``) that is given, or that is inside; or False or None.

    A wrapper that holds None scales nothing.
    """
    if given is False:
        return False
    level = [given]
    for _ in range(4):
        scalers = [x for x in level if x is None or callable(getattr(x, "get_scale", None))]
        if scalers:
            return next((each for each in scalers if each is not None), None)
        level = [getattr(x, name) for x in level for name in _WRAPPED if hasattr(x, name)]
    raise TypeError(
        f"grad_scaler must have get_scale(), got {type(given).__name__}: give the "
        "torch.amp.GradScaler itself, or an object that holds it as .scaler or ._scaler; or "
        "False, if the loss is not scaled"
    )


class LossScale:
    """The GradScaler of an attachment."""

    def __init__(self, scaler: Any = None) -> None:
        self.scaler = scaler  # False where the loss is not scaled, None where nobody has said
        self.unknown: bool | None = None  # whether one is in use that nobody gave, once sought

    def __deepcopy__(self, memo: dict[int, Any]) -> LossScale:
        return LossScale(self.scaler)  # the one of the training loop

    def __reduce__(self) -> Any:
        return LossScale, (False if self.scaler is False else None,)  # a GradScaler is not saved

    def value(self, device: torch.device) -> float | Tensor:
        """Return the number that the loss is multiplied by, without waiting for the device."""
        if not self.scaler or not is_enabled(self.scaler):
            return 1.0
        scale = getattr(self.scaler, "_scale", None)
        return as_factor(self.scaler.get_scale() if scale is None else scale, device)

    def seek(self) -> bool:
        """Whether a GradScaler is in use that no attachment was given; looks only once."""
        if self.scaler is not None or self.unknown is not None:
            return False
        gc.collect()  # a scaler that nobody holds scales nothing
        things = gc.get_objects()
        given = {id(thing.scaler) for thing in things if type(thing) is LossScale}
        # type() instead of isinstance(), which would ask proxies for their class
        scalers = [thing for thing in things if issubclass(type(thing), GradScaler)]
        used = [each for each in scalers if getattr(each, "_scale", None) is not None]
        self.unknown = any(id(each) not in given and is_enabled(each) for each in used)
        return self.unknown

    def findings(self, epoch: float) -> list[Finding]:
        """The finding that a GradScaler is in use that nobody gave, or nothing."""
        if self.scaler is not None or not self.unknown:
            return []
        text = (
            "a GradScaler is in use in this process, and the attachment does not know it; gradient "
            "bounds are in units of the unscaled loss"
        )
        cure = (
            "If it scales this model's loss, pass it, attach(..., grad_scaler=scaler), or set "
            "attached.grad_scaler = scaler; otherwise pass grad_scaler=False"
        )
        return [Finding(Kind.GRAD_SCALER, Severity.WARNING, (), text, cure, epoch)]


def is_enabled(scaler: Any) -> bool:
    """Whether a GradScaler is switched on."""
    return bool(getattr(scaler, "is_enabled", lambda: True)())


def as_factor(scale: Any, device: torch.device) -> float | Tensor:
    """The scale of a loss for gradients on a device; None is 1."""
    if isinstance(scale, Tensor):
        # wide, so that bound * scale fits; a copy, since the scaler changes its own in place
        return scale.to(device, wide_dtype(device), copy=True, non_blocking=True).reshape(())
    return 1.0 if scale is None else float(scale)
