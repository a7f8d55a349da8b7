"""Sites in compiled code: pure functions that torch.compile traces into the graph of the model.

They read the rates from the board, and add to its counts; see `sites.board`. Functions and
operations are few, because dynamo takes time for each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import scale_tensor
from ..axes.view import CHANNELS_FIRST, View
from ..functional.cells import CALLED, FIRST_RATE, ON, SIZE, added, code_of
from ..functional.operators import (
    count,
    count_in_backward,
    count_norms_in_backward,
    drop_and_count,
)
from ..regularizers.base import Now
from .counter import with_norms
from .scaler import as_factor
from .site import LiveSite, channels_first, may_get_grad, with_axes_of


def read(site: LiveSite, training: bool) -> Tensor:
    """Return a copy of the cells of a site, which holds the rates of this call.

    `Attachment.step` may write the cells before the backward of this call, and the backward must
    not read them again. The partitioner of AOTAutograd computes cheap results twice, but it keeps
    the results of reductions. Therefore the cells have equal copies, and this takes the smallest.
    """
    smallest: Tensor = site.cells[int(training)].amin(0)
    return smallest


def note(site: LiveSite, device: torch.device, training: bool) -> None:
    """Count a call of the layer in which no tensor is changed."""
    site.use_board(device)
    # one of the equal copies of the cells is enough, because no backward reads them
    count(site.counts, site.cells[int(training), 0, CALLED])


def regularize(site: LiveSite, x: Tensor, layer_input: Any, training: bool) -> Tensor:
    """Return the regularized activation, or a copy whose gradient will be regularized."""
    site.use_board(x.device)
    if site.of_gradients and not may_get_grad(x):
        site.note_no_gradient()
        note(site, x.device, training)  # for example, the first pass of a reentrant checkpoint
        return x

    view = site.reader.sure
    if not view or len(view.layout) != x.ndim:
        view = site.view_of(x)
    if site.block_options:
        return _drop_blocks(site, x, view, training)
    cells = read(site, training)
    if site.of_gradients:
        count(site.counts, cells[CALLED])
        scale = scale_tensor(site.run.scaler) if site.scaled else None
        copied: Tensor = _OnGradient.apply(x, cells, scale, site, view)
        return copied

    rates, called, _, elements, changed = cells.unbind()
    now = Now()
    now.input = layer_input
    _set_rates(now, site, rates)
    y, affected, number = _apply(site, x, view, now)

    # with `off`, the cells of a site that is off have these rates, at which `y` equals `x`
    if not site.regularizer.off:
        y = torch.where(rates[ON] > 0, y, x)
    if affected is not None:
        called = added(called, elements, changed, number, affected)
    count(site.counts, called)
    return y


def _drop_blocks(site: LiveSite, x: Tensor, view: View, training: bool) -> Tensor:
    """Return the activation without the dropped blocks, and count the call."""
    is_plain = view is site.reader.sure
    maps = x if is_plain else view.to_maps(x)
    y = drop_and_count(maps, site.cells, site.counts, training, site.block_options)
    return y if is_plain else view.from_maps(y, x)


def _set_rates(now: Now, site: LiveSite, rates: Tensor) -> None:
    """Set the rates of a call by their names."""
    for place, name in enumerate(site.values, start=FIRST_RATE):
        setattr(now, name, rates[place])


def _apply(site: LiveSite, x: Tensor, view: View, now: Now) -> tuple[Tensor, Any, int]:
    """Return the result of the regularizer, and the numbers of changed and of all elements."""
    regularizer = site.regularizer
    now.layout = view.layout
    has_channels_first = view.layout in CHANNELS_FIRST.values()
    is_plain = has_channels_first and view.grid is None and not view.prefix
    maps = x
    if site.reads_axes and not is_plain:
        maps = channels_first(site, x, view, now)

    y, affected = regularizer.apply(maps, now)
    if y.shape != maps.shape:
        raise site.error(f"must keep the shape {tuple(maps.shape)}, got {tuple(y.shape)}")
    if site.has_map:
        counts = site.gradient_counts if site.of_gradients else site.counts
        counts[SIZE].fill_(code_of(maps.shape[2:]))
    return with_axes_of(x, y, maps, view), affected, maps.numel()


class _OnGradient(torch.autograd.Function):
    """The identity, whose backward regularizes the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cells: Tensor, scale: Tensor | None, site: LiveSite, view: View
    ) -> Tensor:
        activation = x if site.regularizer.needs_activation else None
        ctx.save_for_backward(cells, scale, activation)
        ctx.site = site
        ctx.view = view
        # autograd makes a view of a returned input, and refuses in-place operations on this view
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        site = ctx.site
        (grad,) = grads
        cells, scale, activation = ctx.saved_tensors
        rates, _, gradient, elements, changed = cells.unbind()
        on = rates[ON] > 0

        now = Now()
        now.activation = activation
        _set_rates(now, site, rates)
        # set in any case, because otherwise dynamo reads the number from the class. With
        # dynamic=True, it makes an input of such a number, which it can't do in a backward
        now.grad_scale = 1.0 if scale is None else as_factor(scale, grad.device)

        y, affected, number = _apply(site, grad, ctx.view, now)
        if not site.regularizer.off:
            y = torch.where(on, y, grad)
        if affected is not None:
            gradient = added(gradient, elements, changed, number, affected)

        row = _in_backward(gradient, grad)
        count_in_backward(site.gradient_counts, row)
        if now.norms is not None and site.norm_cells is not None:
            _count_norms(site.norm_cells, now.norms, on)
        return y, None, None, None, None


def _count_norms(cells: Tensor, norms: Tensor, on: Tensor) -> None:
    """Add norms to a histogram in a compiled backward, if the site is on."""
    nothing = torch.zeros_like(cells)
    histogram = with_norms(nothing, norms)
    count_norms_in_backward(cells, torch.where(on, histogram, nothing))


def _in_backward(row: Tensor, grad: Tensor) -> Tensor:
    """Return the row of counts as a result that depends on the gradient.

    The partitioner of AOTAutograd moves operations that do not depend on a gradient into the
    forward. Then two forwards before their backwards would both add to the same old counts.
    """
    if not grad.numel():
        return row
    first = grad[(0,) * grad.ndim]
    zero = (first != first) * 0.0  # `first * 0.0` is NaN for Inf and NaN
    return row + zero
