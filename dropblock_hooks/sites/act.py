"""What a site does in one call of its layer: the same for activations and gradients, in eager mode
and while torch.compile traces.

Eager mode has the rates as numbers and counts into the `Record`. Traced code has them as tensors
and counts into the `Meter`: no number that changes is read, no branch depends on one, and no
attribute is written, so that one graph serves all rates, also inside a checkpoint.
"""

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map_only

from ..checkpointing import NO_TASK, graph_task
from ..functional import axes
from ..functional.axes import Form
from ..functional.gradients import Clipped, whole
from ..functional.masks import wide_dtype
from ..regularizers.base import Now
from ..selectors.wrappers import is_dtensor
from .grad_scaler import seek
from .identity import (
    GradIdentity,
    GradIdentityTraced,
    GradIdentityTransformed,
    is_transformed,
    may_get_gradient,
)
from .meter import Counted, Meter
from .record import Record
from .site import Site

_is_batched = torch._C._functorch.is_legacy_batchedtensor  # batched gradients


class Call(NamedTuple):
    """One call of a layer.

    Attributes:
        input: its first input; for ``at="input"`` the value itself.
        told: all that it took, and gave: sizes of maps may be among it.
        training: its mode.
    """

    input: Any
    told: tuple[Any, ...]
    training: bool


def act(site: Site, x: Tensor, call: Call) -> Tensor:
    """The activation, regularized and counted; or a copy, whose gradient will be."""
    if is_compiling():
        return _trace(site, x, call)
    if torch._C._is_tracing():
        refuse_tracing(site, call.training)
    on = call.training or site.is_on(call.training)
    again = on and graph_task() != NO_TASK
    values = site.values_of_the_forward(again)
    if site.regularizer.acts_on == "gradient":
        if not may_get_gradient(x):
            return x
        watch = partial(regularize_grad, site, site.form_of(x, call.told), values)
        kind = GradIdentityTransformed if is_transformed(x) else GradIdentity
        watched: Tensor = kind.apply(x, watch)
        return watched
    form = site.form_of(x, call.told)
    now = Now(input=call.input, layout=form.layout, training=on, grad_scale=1.0, **values)
    y, affected, total = _apply(site, x, form, now, site.record)
    # what always() adds is no training, and not counted
    if on and not again and (call.training or site.regularizer.active == "always"):
        site.record.add_active(_known(affected, total), total, next(iter(values.values()), 0.0))
        if y is x:
            site.remember_idle(x, form, 0 if affected is None else total)
    return y


def _trace(site: Site, x: Tensor, call: Call) -> Tensor:
    """The same in compiled code."""
    refuse_tracing(site, call.training)
    gradient = site.regularizer.acts_on == "gradient"
    if gradient:
        refuse_transforms(site)
        if not may_get_gradient(x):
            return x
    exporting = torch.compiler.is_exporting()  # nothing to count into; the rates of now are kept
    form, meter = site.form_of(x, call.told), None
    if not exporting and (call.training or site.regularizer.active == "always"):
        meter = site.record.meter
    values: Mapping[str, Any] = site.values if exporting else site.traced_values(x.device)
    if meter is not None:
        meter.add_call()
    if gradient:  # the values are those of the forward, whatever `step` does before the backward
        values = {**values, "grad_scale": scale_in_graph(site, x.device)}
        watch = _TracedWatch(site, form, tuple(values))
        watched: Tensor = GradIdentityTraced.apply(x, watch, *values.values())
        return watched
    on = site.is_on(call.training)
    now = Now(input=call.input, layout=form.layout, training=on, grad_scale=1.0, **values)
    y, affected, total = _apply(site, x, form, now, meter)
    if meter is not None:
        meter.add_active(affected, total, next(iter(values.values()), 0.0))
    return y


def scale_in_graph(site: Site, device: torch.device) -> Tensor:
    """What the loss is multiplied by, as compiled code takes it."""
    scale = site.control.grad_scale(device)
    if isinstance(scale, Tensor):
        return scale
    return torch.full((), scale, dtype=wide_dtype(device), device=device)  # none, or not used yet


def regularize_grad(
    site: Site,
    form: Form,
    values: Mapping[str, float],
    grad: Tensor,
    parameter: Tensor | None = None,
) -> Tensor:
    """The gradient, of a parameter or not, regularized and counted; not once the Attachment is
    switched off or removed.
    """
    control = site.control
    if not (control.installed and control.enabled):
        return grad
    if site.regularizer.reads_grad_scale and not control.scaler_sought:
        seek(control, site.key)
    scale = control.grad_scale(grad.device)
    if site.watch is not None:
        site.watch.see_gradient(grad, 0, scale, None)
        site.record.add_active(None, 0, 0.0)
        return grad
    return _regularized(site, form, grad, scale, values, parameter)


def regularize_update(
    site: Site,
    grad: Tensor,
    scale: float | Tensor,
    measured: Mapping[str, Tensor],
    parameter: Tensor,
) -> Tensor:
    """The gradient that a parameter has accumulated, of a loss times `scale`."""
    values = {**site.values, **measured}
    return _regularized(site, site.form_of(grad), grad, scale, values, parameter)


def _regularized(
    site: Site,
    form: Form,
    grad: Tensor,
    scale: float | Tensor,
    values: Mapping[str, Any],
    parameter: Tensor | None,
) -> Tensor:
    now = Now(input=None, layout=form.layout, training=True, grad_scale=scale, **values)
    now.parameter = parameter
    y, affected, total = _apply(site, grad, form, now, site.record)
    if is_dtensor(grad):  # all processes are here; one alone may read what was counted
        affected = tree_map_only(Tensor, whole, affected)
    site.record.add_active(_known(affected, total), total, 0.0)
    return y


class _TracedWatch:
    """The same in compiled code, which is given the values as tensors."""

    def __init__(self, site: Site, form: Form, names: tuple[str, ...]) -> None:
        self.site, self.form, self.names = site, form, names

    def __call__(self, grad: Tensor, *values: Tensor) -> Tensor:
        meter, named = self.site.record.meter, dict(zip(self.names, values, strict=True))
        now = Now(input=None, layout=self.form.layout, training=True, **named)
        y, affected, total = _apply(self.site, grad, self.form, now, meter)
        meter.add_active(affected, total, 0.0)
        return y


def _apply(
    site: Site, x: Tensor, form: Form, now: Now, counts: Record | Meter | None
) -> tuple[Tensor, Counted, int]:
    """The tensor regularized, how much of it was affected, and out of how many elements."""
    regularizer = site.regularizer
    apply = regularizer.apply if regularizer.traceable and is_compiling() else site.bound
    try:
        if regularizer.spatial is None and not regularizer.channelwise:
            return *_applied(apply, x, now), x.numel()
        inner = axes.as_map(x, form)
        if regularizer.needs_input and getattr(now.input, "shape", None) == x.shape:
            now.input = axes.as_map(now.input, form)
        if counts is not None and regularizer.spatial is not None:
            counts.see_map(inner.shape[2:])
        y, affected = _applied(apply, inner, now)
        return (x if y is inner else axes.put_back(y, x, form)), affected, inner.numel()
    except (TypeError, ValueError) as error:
        raise site.error(error) from error


def _applied(apply: Any, x: Tensor, now: Now) -> tuple[Tensor, Counted]:
    """What ``apply`` returns, if it is what it must be."""
    result = apply(x, now)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
        raise TypeError(f"apply must return (tensor, count or None), got {_types(result)}")
    y, changed = result
    if y.shape != x.shape:
        raise ValueError(f"must keep the shape {tuple(x.shape)}, got {tuple(y.shape)}")
    if now.norms is not None and isinstance(changed, Tensor):
        return y, Clipped(changed, now.norms)
    return y, changed


def _types(result: object) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(item).__name__ for item in result)})"
    return type(result).__name__


def _known(affected: Counted, total: int) -> Counted:
    """The count, if it is, or holds, one number, out of a number of elements; else None.

    Not so inside a function transform or batched gradients, which it must not outlive, and where
    there is no data: on the meta device, in fake tensors, and of symbolic sizes, as in make_fx.
    """
    count = affected.changed if isinstance(affected, Clipped) else affected
    if type(total) is not int:
        return None
    if not isinstance(count, Tensor):
        return affected
    if type(count) is not Tensor:
        fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
        if isinstance(count, fake):
            return None
    return None if count.is_meta or is_transformed(count) or _is_batched(count) else affected


def has_data(x: Tensor) -> bool:
    """Whether it is a tensor with numbers, outside of function transforms and batched gradients."""
    return _known(x, 0) is x and not torch._C._are_functorch_transforms_active()


def is_exported() -> bool:
    """Whether a program is made of this forward: it has nowhere to keep what is seen."""
    tracing: bool = not is_compiling() and torch._C._is_tracing()
    return tracing or torch.compiler.is_exporting()


def refuse_tracing(site: Site, training: bool) -> None:
    """Raise SiteError where a trace or an export would not keep what the site does."""
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]  # torch's
    if tracing and site.is_on(training):
        raise site.error(
            "torch.jit.trace would keep the rate of now for good: call model.eval() before "
            "tracing, and leave active='always' and always() out; torch.export can hold it"
        )
    if torch.compiler.is_exporting() and site.regularizer.acts_on == "gradient":
        raise site.error(
            "torch.export keeps a forward alone, without what acts on gradients: call "
            "model.eval() before exporting"
        )


def refuse_transforms(site: Site) -> None:
    """Raise SiteError in a graph of ``torch.func``, which would lose what acts on gradients.

    Where torch.compile may break the graph, it does, and eager mode follows.
    """
    if torch._C._are_functorch_transforms_active():
        raise site.error(
            "torch.compile can't trace what acts on gradients inside torch.func.grad, vmap and the "
            "like: leave fullgraph=True out, or call it without torch.compile"
        )
