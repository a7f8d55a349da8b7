"""The GradScaler that multiplies the loss: unwrapped, and reported where it is missing."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.amp.grad_scaler import GradScaler

from ..findings import Finding, Kind, Severity, tell
from .shared import Control, is_enabled

if TYPE_CHECKING:
    from .site import Site

_WRAPPED = ("_scaler", "scaler", "grad_scaler", "_precision", "precision_plugin", "accelerator")
"""Where timm's NativeScaler, Lightning's precision plugins and trainers, accelerate's Accelerator
and optimizers, Fabric and Transformers' Trainer keep theirs."""


def checked_scaler(given: Any) -> Any:
    """The GradScaler (anything with ``get_scale``) that is given, or that is inside; or None.

    A wrapper that holds None scales nothing. False, that there is none, is given back.

    Raises:
        TypeError: for what is no scaler and holds none.
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


def tell_missing(control: Control, sites: Iterable[Site]) -> None:
    """Warn, once, of a GradScaler in use that the attachment was not given."""
    if control.installed:
        tell(missing_scaler(control, sites), control.told)


def missing_scaler(control: Control, sites: Iterable[Site]) -> list[Finding]:
    """The finding that a GradScaler is in use which the attachment was not given; or nothing.

    Python's objects are searched once, when a bound has met its first gradient.
    """
    if not control.scaler_sought and _has_met_a_gradient(sites):
        control.scaler_sought, control.misses_scaler = True, in_use()
    if control.grad_scaler is not None or not control.misses_scaler:
        return []
    return [Finding(Kind.GRAD_SCALER, Severity.WARNING, (), _TEXT, _CURE, control.epoch)]


def seek(control: Control, key: str) -> None:
    """Look for a GradScaler in use, now that the bound of a site has met a gradient."""
    control.scaler_sought, control.misses_scaler = True, in_use()
    tell_missing(control, ())


def _has_met_a_gradient(sites: Iterable[Site]) -> bool:
    """Whether a bound in the unit of the loss has met a gradient."""
    bounded = [site for site in sites if site.regularizer.reads_grad_scale]
    return any(site.active_calls for site in bounded if not site.regularizer.accumulates)


_TEXT = (
    "a GradScaler is in use in this process, and the attachment does not know it; gradient bounds "
    "are in units of the unscaled loss"
)
_CURE = (
    "If it scales this model's loss, pass it, attach(..., grad_scaler=scaler), or set "
    "attached.grad_scaler = scaler; otherwise pass grad_scaler=False"
)


def in_use() -> bool:
    """Whether this process has an enabled GradScaler that has scaled a loss.

    A scaler that a live attachment was given scales the loss of that attachment's model, and one
    that only waits for the garbage collector scales nothing.
    """
    if not _is_in_memory():
        return False
    gc.collect()
    return _is_in_memory()


def _is_in_memory() -> bool:
    things = gc.get_objects()
    given = {id(c.grad_scaler) for c in things if type(c) is Control and c.installed}
    # type() instead of isinstance(), which would ask proxies for their class
    scalers = [thing for thing in things if issubclass(type(thing), GradScaler)]
    used = [each for each in scalers if getattr(each, "_scale", None) is not None]
    return any(id(each) not in given and is_enabled(each) for each in used)
