"""Regularizes a tensor, or shows it to an observer, and counts; `operator` calls the same."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from ..axes.view import CHANNELS_FIRST, View
from ..checkpointing import NO_TASK, graph_task, tell_lost_random_state
from ..findings import tell
from ..handles import is_exporting
from ..observers.base import Seen
from ..regularizers.base import Now
from .site import Site

NOT_DENSE = "the gradient is not dense: build the layer without sparse=True"
PLAIN = frozenset(CHANNELS_FIRST.values())
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def act(site: Site, x: Tensor, given: Any, training: bool) -> Tensor:
    """Return the regularized activation, or a copy whose gradient will be regularized."""
    if torch._C._are_functorch_transforms_active() or torch._C._is_tracing():
        refuse_tracing(site, training)
    if site.idle:  # without reading the layout or drawing a mask
        site.count_idle(x.numel(), training)
        return x
    if site.regularizer.acts_on == "activation":
        return act_on_activation(site, x, None, given, training)
    form = site.form_of(x)
    if not may_get_gradient(x):
        return x
    copied = x.clone()  # others may use `x` too, and work in place on a view would lose the hook
    copied.register_hook(partial(regularize_grad, site, form, site.values))  # type: ignore[no-untyped-call]  # torch's
    return copied


def act_on_activation(
    site: Site, x: Tensor, form: View | None, given: Any, training: bool
) -> Tensor:
    """Regularize an activation, and count it unless a checkpoint recomputes it."""
    recomputes = graph_task() != NO_TASK
    if recomputes and site.draws and site.rate != 0.0 and not site.recomputed:
        site.recomputed = True  # before the warning, which may be turned into an error
        tell_lost_random_state(site.key)
    # what always() adds in evaluation is not counted
    counts = not recomputes and (training or site.always)
    return perform(site, x, form, site.values, given, counts=counts)


def perform(
    site: Site,
    x: Tensor,
    form: View | None,
    values: Mapping[str, float],
    given: Any = None,
    grad_scale: float | Tensor = 1.0,
    parameter: Tensor | None = None,
    counts: bool = False,
) -> Tensor:
    """Run the regularizer of a site on an activation or a gradient; a refusal is a SiteError."""
    regularizer = site.regularizer
    now = Now(input=given, grad_scale=grad_scale, parameter=parameter, **values)
    inner, plain = x, True
    try:
        if form is None:
            form = site.reader.view(x)
        now.layout = form.layout
        if regularizer.spatial is not None or regularizer.channelwise:
            plain = form.layout in PLAIN and form.grid is None and not form.prefix
            inner = x if plain else form.take(x)
            if regularizer.needs_input and getattr(given, "shape", None) == x.shape:
                now.input = form.take(given)
        result = site.bound(inner, now)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
            raise TypeError("apply must return a pair: a tensor, and a count or None")
        y, affected = result
        if y.shape != inner.shape:
            raise ValueError(f"must keep the shape {tuple(inner.shape)}, got {tuple(y.shape)}")
    except (TypeError, ValueError) as error:
        raise site.error(error) from error
    if counts:
        size = None if regularizer.spatial is None else inner.shape[2:]
        known = affected if isinstance(affected, int) or has_data(affected) else None
        rate = site.rate if regularizer.acts_on == "activation" else None
        site.counter.add(known, inner.numel(), rate or 0.0, size, now.norms)
    return x if y is inner else y if plain else form.put(y, x)


def may_get_gradient(x: Tensor) -> bool:
    # inside torch.func.grad the tensor does not tell: an outer transform may want its gradient
    asked = x.requires_grad or (not is_compiling() and is_transformed(x))
    return asked and torch.is_grad_enabled()


def regularize_grad(
    site: Site,
    form: View | None,
    values: Mapping[str, Any],
    grad: Tensor | None,
    parameter: Tensor | None = None,
    scale: float | Tensor | None = None,
) -> Any:
    """Regularize a gradient, and count it; a `scale` of None asks the GradScaler."""
    run = site.run
    if grad is None or not (run.installed and run.enabled):
        return grad
    if grad.layout is not torch.strided:
        raise site.error(NOT_DENSE)
    if scale is None:
        scale = run.scale.value(grad.device)
        if site.regularizer.reads_grad_scale and run.scale.seek():
            tell(run.scale.findings(run.epoch), run.told)
    if site.watch is not None:
        see_gradient(site, grad)
        return grad
    return perform(site, grad, form, values, grad_scale=scale, parameter=parameter, counts=True)


def see(
    site: Site,
    tensors: Sequence[Tensor],
    given: Sequence[Tensor],
    nesting: Callable[[], Any],
    training: bool,
    differentiable: bool,
) -> int | None:
    """Count one call of the layer and hand its tensors to the observer; return its ticket."""
    run, observer = site.run, site.bound.observer
    if observer.sees_values or not observer.sees_gradients:
        site.counter.add(None, 0, 0.0)
    if not tensors or not observer.sees_values:
        return None
    seen = Seen(
        tensors if observer.keeps_graph else [x.detach() for x in tensors],
        run.epoch,
        run.shared,
        training=training,
        differentiable=differentiable,
        nesting=nesting,
        given=[x.detach() for x in given],
        form=site.form_or_none,
    )
    return _update(site, seen)


def see_gradient(site: Site, grad: Tensor | None, at: int = 0, ticket: int | None = None) -> None:
    """Hand a gradient to an observer, and count it if the observer sees no values."""
    run, observer = site.run, site.bound.observer
    if grad is None or not (has_data(grad) and run.installed and run.enabled):
        return
    if observer.sees_gradients:
        scale, grads = run.scale.value(grad.device), [grad.detach()]
        _update(site, Seen(grads, run.epoch, run.shared, True, at=at, scale=scale, ticket=ticket))
    if not observer.sees_values:
        site.counter.add(None, 0, 0.0)


def _update(site: Site, seen: Seen) -> int:
    try:
        return int(site.bound.update(seen))
    except (TypeError, ValueError) as error:
        raise site.error(error) from error


def has_data(x: Any) -> bool:
    """Whether it is a tensor with numbers; one of a function transform must not outlive that."""
    transformed = torch._C._are_functorch_transforms_active()
    return isinstance(x, Tensor) and not (transformed or x.is_meta or isinstance(x, FakeTensor))


def refuse_tracing(site: Site, training: bool) -> None:
    """Raise SiteError where an active site is traced, exported or transformed and can't work."""
    refused = is_exporting() and site.regularizer.acts_on == "gradient"
    transformed = torch._C._are_functorch_transforms_active()
    if transformed and not is_compiling():  # torch.func.grad works in eager mode
        stack = torch._C._functorch.get_interpreter_stack() or ()
        transformed = not {each.key().name for each in stack} <= {"Grad", "Functionalize"}
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]  # torch's
    if site.is_on(training) and (tracing or refused or transformed):
        raise site.error(
            "active regularizers can't be used in torch.jit.trace, torch.func.vmap, "
            "torch.func.jvp or a compiled torch.func transform, and regularizers of gradients "
            "can't be used in torch.export: call model.eval() before, or use "
            "`with attached.paused():`"
        )
