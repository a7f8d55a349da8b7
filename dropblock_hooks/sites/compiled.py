"""Sites in compiled code: pure functions that torch.compile traces into the graph of the model.

They read the rates from the board, and add to its counts; see `sites.board`. Dynamo takes time for
each function and each operation here, so there are few.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..axes.view import CHANNELS_FIRST, View
from ..regularizers.base import Now
from .board import CALLED, CHANGED, ELEMENTS, FIRST_RATE, GRADIENT, ON, RATES, SIZE
from .counter import as_number_of, with_norms
from .site import Site, may_get_grad


def read(site: Site, training: bool) -> Tensor:
    """The rows of the cells of a site, as they are in this call.

    `Attachment.step` may write the cells before the backward of this call. A backward must not read
    them again, but the partitioner of AOTAutograd prefers to compute cheap results twice. It keeps
    the results of reductions, so this is the smallest one of equal copies.
    """
    return site.cells[int(training)].amin(0)


def note(site: Site, training: bool) -> None:
    """Count a call in which nothing is done to the tensor."""
    site.counts.add_(read(site, training)[CALLED])


def regularize(site: Site, x: Tensor, layer_input: Any, training: bool) -> Tensor:
    """The regularized activation, or a copy whose gradient will be regularized."""
    site.use_board(x.device)
    if x.requires_grad or not site.of_gradients:
        sure = site.reader.sure
        view = sure if sure and len(sure.layout) == x.ndim else site.form_of(x)
    if site.of_gradients:
        if not may_get_grad(x):
            note(site, training)  # the first pass of a reentrant checkpoint, say
            return x
        cells = read(site, training)
        site.counts.add_(cells[CALLED])
        y: Tensor = _OnGradient.apply(x, cells, site, view)  # type: ignore[no-untyped-call]  # torch's
        return y

    cells = read(site, training)
    now = _now(site, cells, view)
    now.input = layer_input
    y, affected, elements = _apply(site, x, view, now)
    if not site.regularizer.off:
        y = torch.where(cells[RATES, ON] > 0, y, x)
    site.counts.add_(_counted(cells, cells[CALLED], affected, elements))
    return y


def _counted(cells: Tensor, row: Tensor, affected: Any, elements: int) -> Tensor:
    """The row of a call or a gradient with its elements, if it is known how many were changed."""
    if affected is None:
        return row
    return row + cells[ELEMENTS] * elements + cells[CHANGED] * affected


def _now(site: Site, cells: Tensor, view: View) -> Now:
    now = Now()
    now.layout = view.layout
    for place, name in enumerate(site.values, start=FIRST_RATE):
        setattr(now, name, cells[RATES, place])
    return now


def _apply(
    site: Site, x: Tensor, view: View, now: Now
) -> tuple[Tensor, Any, int]:
    """The result of the regularizer, how many elements it changed, and how many it was given."""
    regularizer = site.regularizer
    plain = view.layout in CHANNELS_FIRST.values() and view.grid is None and not view.prefix
    inner = x
    if site.reads_axes and not plain:
        inner = view.take(x)
        if regularizer.needs_input and getattr(now.input, "shape", None) == x.shape:
            now.input = view.take(now.input)
    y, affected = regularizer.apply(inner, now)
    if y.shape != inner.shape:
        raise site.error(f"must keep the shape {tuple(inner.shape)}, got {tuple(y.shape)}")
    if regularizer.spatial is not None:
        counts = site.gradient_counts if site.of_gradients else site.counts
        counts[SIZE].fill_(as_number_of(inner.shape[2:]))
    if inner is not x and y is not inner:
        y = view.put(y, x)
    return (x if y is inner else y), affected, inner.numel()


class _OnGradient(torch.autograd.Function):
    """The identity, whose backward regularizes the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cells: Tensor, site: Site, view: View) -> Tensor:
        ctx.save_for_backward(cells)
        ctx.site = site
        ctx.view = view
        return x.clone()  # work in place on a view of `x` would be refused

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (cells,) = ctx.saved_tensors
        site = ctx.site
        (grad,) = grads
        now = _now(site, cells, ctx.view)
        now.grad_scale = site.run.loss_scale(grad.device)
        y, affected, elements = _apply(site, grad, ctx.view, now)
        if not site.regularizer.off:
            y = torch.where(cells[RATES, ON] > 0, y, grad)
        row = _counted(cells, cells[GRADIENT], affected, elements)
        site.gradient_counts.add_(_in_backward(row, grad))
        if now.norms is not None and site.norm_cells is not None:
            counted = with_norms(site.norm_cells, now.norms)
            site.norm_cells.copy_(torch.where(cells[RATES, ON] > 0, counted, site.norm_cells))
        return y, None, None, None


def _in_backward(row: Tensor, grad: Tensor) -> Tensor:
    """The row, as a result that depends on the gradient.

    The partitioner of AOTAutograd moves what does not depend on a gradient into the forward. Then
    two forwards before their backwards would both add to the same old counts.
    """
    if not grad.numel():
        return row
    first = grad[(0,) * grad.ndim]
    return row + (first != first) * 0.0
