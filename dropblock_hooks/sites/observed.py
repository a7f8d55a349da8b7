"""Observers in compiled code: their state is a tensor that operators change.

An `ObserveHook` calls `observe` while torch.compile traces. It calls one of two operators: `watch`
for a `Watchdog`, and `measure` for an observer of statistics.

They are operators because dynamo traces an operator faster than Python code. AOTAutograd traces
into them. They call the operators of `functional.measures` in the forward and, by a hook of the
tensor, in the backward.
"""

import hashlib
import inspect
import sys
from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from .._torch import scale_tensor
from ..functional import measures, outliers, residual
from ..functional.operators import define
from ..observers.watchdog import guess_channels_first
from .operator import watch_gradient
from .site import LiveSite, may_get_grad

# caches of torch.compile on disk know an operator only by its name and arguments, so the hash of
# the code that AOTAutograd traces is an argument
_TRACED = (sys.modules[__name__], measures, outliers, residual)
_SOURCES = "".join(map(inspect.getsource, _TRACED))
_CODE = hashlib.sha256(_SOURCES.encode()).hexdigest()[:12]


def observe(
    site: LiveSite, tensors: list[Tensor], arguments: list[Tensor], training: bool
) -> list[Tensor]:
    """Observe a call of a layer, and the gradients of its tensors.

    Returns:
        The tensors, if one of them had to be copied to observe its gradient; otherwise [].
    """
    x = tensors[0]
    if site.of_gradients and not any(map(may_get_grad, tensors)):
        site.note_no_gradient()
    mapped = _maps_of(site, x) if site.finds_dead and x.ndim > 1 else None
    batch = arguments[0] if training and site.reads_batches else None
    shortcut = site.shortcut_of(x, arguments) if site.compares_input else None

    # `index` makes a symbolic size a number; a layer that is compiled alone may have one
    channels = 0 if mapped is None else index(mapped.shape[1])
    site.use_observed(x.device, channels, batch is not None)
    observed: Any = site.observed
    scale = _scale_on(site, x.device) if site.scaled else None
    if observed.watches:
        bounds = observed.constants
        watched: list[Tensor] = watch(
            tensors,
            arguments,
            mapped,
            scale,
            observed.state,
            observed.gradients,
            observed.alive,
            training,
            bounds,
            _CODE,
        )
        return watched

    every, first, last = observed.constants
    sums = observed.sums
    measured: list[Tensor] = measure(
        tensors,
        mapped,
        batch,
        shortcut,
        scale,
        observed.state,
        observed.gradients,
        observed.alive,
        observed.batches,
        sums.get("tails"),
        sums.get("peaks"),
        sums.get("branch"),
        observed.sees_values,
        training,
        every,
        first,
        last,
        _CODE,
    )
    return measured


def _scale_on(site: LiveSite, device: torch.device) -> Tensor | None:
    """Return the scale of the GradScaler on a device; None if it has no scale yet."""
    scale = scale_tensor(site.run.scaler)
    return None if scale is None else scale.to(device)


def _maps_of(site: LiveSite, x: Tensor) -> Tensor | None:
    """Return a tensor with channels on axis 1; None if the axis of the channels is unknown."""
    view = site.view_or_none(x)
    if view is not None:
        return view.to_maps(x)
    return guess_channels_first(x) if site.guesses_channels else None


@define(
    "watch(Tensor[] tensors, Tensor[] given, Tensor? mapped, Tensor? scale, Tensor(a!) state, "
    "Tensor gradients, Tensor(b!)? alive, bool training, float[] bounds, str code) -> Tensor[]"
)
def watch(
    tensors: Sequence[Tensor],
    given: Sequence[Tensor],
    mapped: Tensor | None,
    scale: Tensor | None,
    state: Tensor,
    gradients: Tensor,
    alive: Tensor | None,
    training: bool,
    bounds: Sequence[float],
    code: str,
) -> list[Tensor]:
    """Watch a call and its gradients; see `functional.measures.add_watched`.

    `gradients` is the state for gradients. `code` is the hash of the traced code, which caches on
    disk see.
    """
    with torch.no_grad():  # detaching the tensors would add nodes to the graph
        measures.add_watched(tensors, given, mapped, training, bounds, state, alive)
    if not any(map(may_get_grad, tensors)):
        return []

    def see(grad: Tensor | None) -> None:
        if grad is None:  # the output was not used
            return
        with torch.no_grad():
            measures.add_watched_gradient(grad, scale, training, gradients)

    return _with_hooks(tensors, see)


@define(
    "measure(Tensor[] tensors, Tensor? mapped, Tensor? batch, Tensor? shortcut, Tensor? scale, "
    "Tensor(a!) state, Tensor? gradients, Tensor(b!)? alive, Tensor(c!)? batches, "
    "Tensor(d!)? tails, Tensor(e!)? peaks, Tensor(f!)? branch, bool values, bool training, "
    "int every, int first, int last, str code) -> Tensor[]"
)
def measure(
    tensors: Sequence[Tensor],
    mapped: Tensor | None,
    batch: Tensor | None,
    shortcut: Tensor | None,
    scale: Tensor | None,
    state: Tensor,
    gradients: Tensor | None,
    alive: Tensor | None,
    batches: Tensor | None,
    tails: Tensor | None,
    peaks: Tensor | None,
    branch: Tensor | None,
    values: bool,
    training: bool,
    every: int,
    first: int,
    last: int,
    code: str,
) -> list[Tensor]:
    """Measure the values of a call, or without `values` its gradients.

    See `functional.measures.add_statistics` and `functional.measures.add_measured_gradient`.

    `gradients` is the state for gradients. `code` is the hash of the traced code, which caches on
    disk see.
    """
    bins = every, first, last
    if values:
        x = tensors[0]
        with torch.no_grad():  # detaching the tensors would add nodes to the graph
            if tails is not None:
                outliers.add_tails(x, mapped, training, every, state, tails, peaks)
            if branch is not None and shortcut is not None:
                residual.add_branch(x, shortcut, training, every, state, branch)
            measures.add_statistics(
                x,
                mapped,
                batch,
                None,  # the scale, which only gradients have
                training,
                True,  # it is a call
                *bins,
                state,
                alive,
                batches,
            )
        return []

    measures.add_call(training, state)
    if not any(map(may_get_grad, tensors)):
        return []

    def see(grad: Tensor | None) -> None:
        if grad is None:  # the output was not used
            return
        with torch.no_grad():
            measures.add_measured_gradient(grad, scale, training, *bins, gradients)

    return _with_hooks(tensors, see)


def _with_hooks(tensors: Sequence[Tensor], see: Any) -> list[Tensor]:
    """Put a hook on each tensor, or on a copy; return the results, or [] if none is a copy."""
    hooked = [watch_gradient(x, see) for x in tensors]
    are_same = all(new is old for new, old in zip(hooked, tensors, strict=True))
    return [] if are_same else hooked
