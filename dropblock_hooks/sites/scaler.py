"""The GradScaler of the training loop, which multiplies the loss, and its scale.

Setting `Attachment.grad_scaler` puts the scaler into the `Run`. The bounds of gradients are
multiplied by its scale, which `Run.loss_scale` returns.
"""

from typing import Any

import torch
from torch import Tensor

from .._torch import scale_tensor
from ..functional.masks import wide_dtype

_WRAPPED = ("_scaler", "scaler", "grad_scaler", "_precision", "precision_plugin", "accelerator")
"""The attributes in which timm's NativeScaler, Lightning's precision plugins and trainers,
accelerate's Accelerator and optimizers, Fabric and Transformers' Trainer keep their scaler."""


def checked_scaler(scaler: Any) -> Any:
    """Return the innermost scaler, an object with ``get_scale``.

    Args:
        scaler: a GradScaler, or an object that wraps one. False (the loss is not scaled) and None
            (unknown) are returned as they are.

    Raises:
        TypeError: if there is no scaler in it.
    """
    if scaler is False or scaler is None or callable(getattr(scaler, "get_scale", None)):
        return scaler
    for name in _WRAPPED:
        if hasattr(scaler, name):
            return checked_scaler(getattr(scaler, name))
    raise TypeError(
        f"grad_scaler must have get_scale(), got {type(scaler).__name__}: give the GradScaler "
        "itself, or an object that holds it as .scaler; or False, if the loss is not scaled"
    )


def is_enabled(scaler: Any) -> bool:
    """Return whether there is a scaler that is switched on."""
    if not scaler:
        return False
    return bool(scaler.is_enabled()) if hasattr(scaler, "is_enabled") else True


def is_under_float16_autocast(device: torch.device) -> bool:
    """Return whether operations run in float16 now, which needs a scaled loss."""
    name = device.type
    if not torch.amp.is_autocast_available(name) or not torch.is_autocast_enabled(name):
        return False
    return torch.get_autocast_dtype(name) == torch.float16


def loss_scale(scaler: Any, device: torch.device) -> float | Tensor:
    """Return the factor of the loss. With torch's GradScaler, this does not wait for the device."""
    if not is_enabled(scaler):
        return 1.0
    # read its tensor, because its `get_scale` waits for the device
    scale = scale_tensor(scaler)
    return as_factor(scaler.get_scale() if scale is None else scale, device)


def as_factor(scale: Any, device: torch.device) -> float | Tensor:
    """Return the factor of the loss for gradients on a device.

    None stands for 1, because an optimizer may have no ``grad_scale``.
    """
    if isinstance(scale, Tensor):
        # a wide dtype, so that bound * scale fits; a copy, because the scaler changes its tensor
        return scale.to(device, wide_dtype(device), copy=True, non_blocking=True).reshape(())
    return 1.0 if scale is None else float(scale)
