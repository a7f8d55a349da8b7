"""The GradScaler that multiplies the loss: found in what wraps it, and told where it is missing."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch.amp.grad_scaler import GradScaler

from ..warn import warn
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
    """Warn, once, of a GradScaler in use that ``attach`` was not given.

    It is looked for at the first gradient that a bound has met, or when someone looks at the
    Attachment after it, since compiled code can't warn.
    """
    if control.installed and not control.scaler_sought:
        key = key_of_bounded(sites)
        if key is not None:
            seek(control, key)


def seek(control: Control, key: str) -> None:
    """Look for a GradScaler in use, once, and warn if there is one."""
    control.scaler_sought = True
    if in_use():
        warn(f"{key}: {MISSING}")


def key_of_bounded(sites: Iterable[Site]) -> str | None:
    """The first site whose bound, in the unit of the loss, has met a gradient."""
    sites = [site for site in sites if not site.regularizer.accumulates]  # those are unscaled
    bounded = [site for site in sites if site.regularizer.reads_grad_scale]
    return bounded[0].key if any(site.active_calls for site in bounded) else None


MISSING = (
    "a GradScaler is in use in this process: if it scales this model's loss, pass it, "
    "attach(..., grad_scaler=scaler) or attached.grad_scaler = scaler, since what acts is in "
    "the unit of the unscaled loss; else pass grad_scaler=False"
)


def in_use() -> bool:
    """Whether an enabled GradScaler that has scaled a loss lives in this process.

    One that a live Attachment was given scales the loss of that one's model; one that nobody holds
    any more, but what waits for Python's collector, scales nothing.
    """
    if not _is_in_memory():
        return False
    gc.collect()
    return _is_in_memory()


def _is_in_memory() -> bool:
    scalers, given = [], set()
    # instances refer to their class: asked so, the search runs in C
    for thing in gc.get_referrers(Control, *_family(GradScaler)):
        kind = type(thing)  # isinstance would ask proxies for their class
        if kind is Control and thing.installed:
            given.add(id(thing.grad_scaler))
        elif issubclass(kind, GradScaler) and getattr(thing, "_scale", None) is not None:
            scalers.append(thing)
    return any(id(scaler) not in given and is_enabled(scaler) for scaler in scalers)


def _family(kind: type[Any]) -> Iterator[type[Any]]:
    """A class and all that derive from it."""
    yield kind
    for derived in kind.__subclasses__():
        yield from _family(derived)
