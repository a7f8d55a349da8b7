"""What a site does with one tensor in eager mode: regularize it, and count.

Compiled code runs the same functions, inside the operators of `operator`.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..axes.view import CHANNELS_FIRST, View
from ..checkpointing import NO_TASK, graph_task, tell_lost_random_state
from ..handles import is_exporting
from ..observers.base import Seen
from ..regularizers.base import Now
from ..regularizers.dropout import DropsShare
from .counter import Clipped, Counted
from .grad_scaler import seek
from .site import Site

PLAIN = frozenset(CHANNELS_FIRST.values())
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # batched gradients


class Call(NamedTuple):
    """One call of a layer.

    Attributes:
        input: its first input; for ``at="input"`` the value itself.
        training: its mode.
    """

    input: Any
    training: bool


def act(site: Site, x: Tensor, call: Call) -> Tensor:
    """Return the regularized activation, or a copy whose gradient will be regularized."""
    if torch._C._are_functorch_transforms_active() or torch._C._is_tracing():
        refuse_tracing(site, call.training)
    if site.idle:  # neither the layout nor the mask matters
        if graph_task() == NO_TASK:
            site.counter.add(
                0 if isinstance(site.regularizer, DropsShare) else None, x.numel(), 0.0
            )
        return x
    form = site.form_of(x)
    if site.regularizer.acts_on == "activation":
        return act_on_activation(site, x, form, call)
    if not may_get_gradient(x):
        return x
    watched: Tensor = GradIdentity.apply(x, partial(regularize_grad, site, form, site.values))
    return watched


def act_on_activation(site: Site, x: Tensor, form: View, call: Call) -> Tensor:
    """Regularize an activation, and count it unless a checkpoint recomputes it."""
    values = site.values
    if graph_task() != NO_TASK:
        if site.draws and site.rate != 0.0 and not site.recomputed:
            site.recomputed = True  # before the warning, which may be turned into an error
            tell_lost_random_state(site.key)
        return perform(site, x, form, values, call)[0]
    y, affected, inner = perform(site, x, form, values, call)
    # what always() adds in evaluation is not counted
    if call.training or site.regularizer.active == "always":
        size = None if site.regularizer.spatial is None else inner.shape[2:]
        known = affected if isinstance(affected, int) else _known(affected)
        site.counter.add(known, inner.numel(), site.rate or 0.0, size)
    return y


def perform(
    site: Site,
    x: Tensor,
    form: View,
    values: Mapping[str, float],
    call: Call,
    grad_scale: float | Tensor = 1.0,
    parameter: Tensor | None = None,
) -> tuple[Tensor, Counted, Tensor]:
    """Run the regularizer of a site.

    Returns:
        The result, the affected elements, and what the regularizer got: `x`, or a view of it.

    Raises:
        SiteError: if the regularizer refuses the tensor, or returns something else than it must.
    """
    regularizer = site.regularizer
    now = Now(
        input=call.input,
        layout=form.layout,
        training=call.training or site.is_on(call.training),
        grad_scale=grad_scale,
        **values,
    )
    if parameter is not None:
        now.parameter = parameter
    inner, plain = x, True
    try:
        if regularizer.spatial is not None or regularizer.channelwise:
            plain = form.layout in PLAIN and form.grid is None and not form.prefix
            inner = x if plain else form.take(x)
            if regularizer.needs_input and getattr(now.input, "shape", None) == x.shape:
                now.input = form.take(now.input)
        result = site.bound(inner, now)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
            raise TypeError(f"apply must return (tensor, count or None), got {_describe(result)}")
        y, affected = result
        if y.shape != inner.shape:
            raise ValueError(f"must keep the shape {tuple(inner.shape)}, got {tuple(y.shape)}")
        if now.norms is not None and isinstance(affected, Tensor):
            affected = Clipped(affected, now.norms)
        return (x if y is inner else y if plain else form.put(y, x)), affected, inner
    except (TypeError, ValueError) as error:
        raise site.error(error) from error


def _describe(result: object) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(item).__name__ for item in result)})"
    return type(result).__name__


def may_get_gradient(x: Tensor) -> bool:
    """Whether a gradient may be computed for what is made of this tensor now.

    Inside ``torch.func.grad`` the tensor does not tell: an outer transform may want its gradient.
    """
    return torch.is_grad_enabled() and (
        x.requires_grad or (not is_compiling() and is_transformed(x))
    )


class GradIdentity(torch.autograd.Function):
    """Identity function whose backward returns ``watch(gradient)``.

    The forward copies: an in-place operation on a view would take the gradient past the identity.
    With ``setup_context`` it works inside ``torch.func.grad``.
    """

    @staticmethod
    def forward(x: Tensor, watch: Callable[[Tensor], Tensor]) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.watch = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        # the gradient is None where nothing has been made of the copy
        return (None if grad is None else ctx.watch(grad)), None


def regularize_grad(
    site: Site,
    form: View,
    values: Mapping[str, Any],
    grad: Tensor,
    parameter: Tensor | None = None,
    scale: float | Tensor | None = None,
) -> Tensor:
    """Regularize the gradient of an activation or a parameter, and count it.

    Once the attachment is switched off or removed, the gradient is returned as it is. `values` are
    the rates of the forward, and `scale` is the factor of the loss; None asks the GradScaler.
    """
    run = site.run
    if not (run.installed and run.enabled):
        return grad
    if grad.layout is not torch.strided:
        raise site.error(
            f"the gradient is not dense, its layout is {grad.layout}: build the layer without "
            "sparse=True"
        )
    if scale is None:
        scale = run.scale.value(grad.device)
        if site.regularizer.reads_grad_scale and run.scale.is_unsaid:
            seek(run)
    if site.watch is not None:
        see_gradient(site, grad)
        return grad
    y, affected, inner = perform(
        site, grad, form, values, _OF_A_GRADIENT, grad_scale=scale, parameter=parameter
    )
    size = None if site.regularizer.spatial is None else inner.shape[2:]
    site.counter.add(_known(affected), inner.numel(), 0.0, size)
    return y


_OF_A_GRADIENT = Call(None, True)


def see_gradient(site: Site, grad: Tensor | None, at: int = 0, ticket: int | None = None) -> None:
    """Hand a gradient to an observer, and count it if the observer sees no values.

    The gradient is None if nothing was made of the tensor. For `at` and `ticket` see `Seen`.
    """
    run, observer = site.run, site.bound.observer
    if grad is None or not (has_data(grad) and run.installed and run.enabled):
        return
    if observer.sees_gradients:
        scale, grads = run.scale.value(grad.device), [grad.detach()]
        try:
            site.bound.update(
                Seen(grads, run.epoch, run.shared, True, at=at, scale=scale, ticket=ticket)
            )
        except ValueError as error:
            raise site.error(error) from None
    if not observer.sees_values:
        site.counter.add(None, 0, 0.0)


def _known(affected: Counted) -> Counted:
    """The count, if it is, or holds, one number; else None.

    It is unknown inside a function transform, which it must not outlive, and where there is no
    data: on the meta device and in fake tensors.
    """
    count = affected.changed if isinstance(affected, Clipped) else affected
    if not isinstance(count, Tensor):
        return affected
    if type(count) is not Tensor:
        fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
        if isinstance(count, fake):
            return None
    return None if count.is_meta or is_transformed(count) or _is_batched(count) else affected


def has_data(x: Tensor) -> bool:
    """Whether it is a tensor with numbers, outside of function transforms and batched gradients."""
    return _known(x) is x and not torch._C._are_functorch_transforms_active()


def refuse_tracing(site: Site, training: bool) -> None:
    """Raise SiteError where an active site is traced, exported or transformed and can't work.

    ``torch.func.grad`` works, except in compiled code.
    """
    if not site.is_on(training):
        return
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]  # torch's
    if tracing:
        raise site.error(
            "torch.jit.trace would record the present rate as a constant: call model.eval() before "
            "tracing, without active='always' and always(); torch.export is supported"
        )
    if is_exporting() and site.regularizer.acts_on == "gradient":
        raise site.error(
            "torch.export records the forward only, so gradients can't be regularized: call "
            "model.eval() before exporting"
        )
    if not torch._C._are_functorch_transforms_active():
        return
    unsupported = {"a compiled transform"}
    if not is_compiling():
        stack = torch._C._functorch.get_interpreter_stack() or ()
        unsupported = {each.key().name for each in stack} - {"Grad", "Functionalize"}
    if unsupported:
        raise site.error(
            f"{', '.join(sorted(unsupported))}: torch.func.vmap, torch.func.jvp and compiled "
            "torch.func transforms are not supported: call them on the model in evaluation mode, "
            "or inside `with attached.paused():`"
        )
