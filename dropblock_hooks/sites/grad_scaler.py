"""The GradScaler that multiplies the loss: unwrapped, and reported where it is missing."""

from __future__ import annotations

import gc
from typing import Any

from torch.amp.grad_scaler import GradScaler

from ..findings import Finding, Kind, Severity, tell
from .run import Run, is_enabled

_WRAPPED = ("_scaler", "scaler", "grad_scaler", "_precision", "precision_plugin", "accelerator")
"""Where timm's NativeScaler, Lightning's precision plugins and trainers, accelerate's Accelerator
and optimizers, Fabric and Transformers' Trainer keep theirs."""


def checked_scaler(given: Any) -> Any:
    """Return the scaler (an object with ``get_scale``) that is given, or that is inside, or None.

    A wrapper that holds None scales nothing. False says that nothing scales the loss.

    Raises:
        TypeError: for an object that is no scaler and holds none.
    """
    if given is False:
        return False
    found, scaler = _unwrapped(given, depth=3)
    if not found:
        raise TypeError(
            f"grad_scaler must have get_scale(), got {type(given).__name__}: give the "
            "torch.amp.GradScaler itself, or what holds it as .scaler or ._scaler; or False, "
            "where the loss is not scaled"
        )
    return scaler


def _unwrapped(given: Any, depth: int) -> tuple[bool, Any]:
    """Whether a scaler, or a place for one, was found, and that scaler."""
    if given is None or callable(getattr(given, "get_scale", None)):
        return True, given
    for name in _WRAPPED if depth else ():
        if hasattr(given, name):
            found, scaler = _unwrapped(getattr(given, name), depth - 1)
            if found:
                return True, scaler
    return False, None


def seek(run: Run) -> None:
    """Look for a GradScaler in use that the attachment was not given, and warn of it.

    This searches Python's objects once, when a bound has met its first gradient.
    """
    run.scale.unknown = in_use()
    tell(missing_scaler(run), run.told)


def missing_scaler(run: Run) -> list[Finding]:
    """The finding that a GradScaler is in use which the attachment was not given; or nothing."""
    if run.scale.scaler is not None or not run.scale.unknown:
        return []
    text = (
        "a GradScaler is in use in this process, and the attachment does not know it; gradient "
        "bounds are in units of the unscaled loss"
    )
    cure = (
        "If it scales this model's loss, pass it, attach(..., grad_scaler=scaler), or set "
        "attached.grad_scaler = scaler; otherwise pass grad_scaler=False"
    )
    return [Finding(Kind.GRAD_SCALER, Severity.WARNING, (), text, cure, run.epoch)]


def in_use() -> bool:
    """Whether an enabled GradScaler has scaled a loss, and was given to no live attachment."""
    if not _is_in_memory():
        return False
    gc.collect()  # a scaler that nobody holds scales nothing
    return _is_in_memory()


def _is_in_memory() -> bool:
    things = gc.get_objects()
    given = {id(r.scale.scaler) for r in things if type(r) is Run and r.installed}
    # type() instead of isinstance(), which would ask proxies for their class
    scalers = [thing for thing in things if issubclass(type(thing), GradScaler)]
    used = [each for each in scalers if getattr(each, "_scale", None) is not None]
    return any(id(each) not in given and is_enabled(each) for each in used)
