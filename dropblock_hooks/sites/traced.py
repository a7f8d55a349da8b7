"""What a site does while torch.compile traces it: rates from tensors, counts into one.

No number that changes is read, no branch depends on one, and no attribute is written, so that one
graph serves all rates, also inside a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..functional.axes import Form
from ..functional.masks import wide_dtype
from ..regularizers.base import Now
from .identity import GradIdentityTraced
from .site import Site


def trace(site: Site, x: Tensor, layer_input: Any, training: bool, told: Any = ()) -> Tensor:
    """The activation, regularized and counted."""
    form = site.traced_form_of(x, told)
    exporting = torch.compiler.is_exporting()  # nothing to count into; the rates of now are kept
    values: Mapping[str, Any] = site.values if exporting else _values_on(site, x.device)
    now = Now(
        input=layer_input,
        layout=form.layout,
        training=site.is_on(training),
        grad_scale=1.0,
        **values,
    )
    if exporting:
        return site.run(x, form, now)[0]
    site.record.meter.add_call()
    y, affected, total = site.run(x, form, now)
    site.record.meter.add_active(affected, total, next(iter(values.values()), 0.0))
    return y


def trace_grad(site: Site, x: Tensor, told: Any = ()) -> Tensor:
    """`x`, with its gradient regularized and counted in the backward.

    The values are those of the forward, whatever ``step`` does before the backward.
    """
    form, values = site.traced_form_of(x, told), _values_on(site, x.device)
    site.record.meter.add_call()
    scale = site.control.grad_scale(x.device)
    if not isinstance(scale, Tensor):  # no scaler, or one that has not scaled anything yet
        scale = torch.full((), scale, dtype=wide_dtype(x.device), device=x.device)
    watch = _TracedWatch(site, form, (*values, "grad_scale"))
    watched: Tensor = GradIdentityTraced.apply(x, watch, *values.values(), scale)
    return watched


def _values_on(site: Site, device: torch.device) -> dict[str, Tensor]:
    """The values on this device; the meter follows, at the price of one compilation."""
    site.record.meter.to(device)
    return {name: value.to(device, non_blocking=True) for name, value in site.tensors.items()}


class _TracedWatch:
    """What happens to a gradient in compiled code."""

    def __init__(self, site: Site, form: Form, names: tuple[str, ...]) -> None:
        self.site, self.form, self.names = site, form, names

    def __call__(self, grad: Tensor, *values: Tensor) -> Tensor:
        told = dict(zip(self.names, values, strict=True))
        now = Now(input=None, layout=self.form.layout, training=True, **told)
        y, affected, total = self.site.run(grad, self.form, now)
        self.site.record.meter.add_active(affected, total, 0.0)
        return y
