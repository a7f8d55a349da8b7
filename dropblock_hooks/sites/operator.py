"""Operators through which compiled code runs the eager code of a site.

They serve the classes that torch.compile does not trace: `Foreign`, `Capture`, and classes of users
without ``traced = True``. `sites.compiled` and `sites.observed` serve all others. While
torch.compile or torch.export traces, a `SiteHook` calls `regularize`, and an `ObserveHook` calls
`observe_and_watch`.

- Handle: compiled code holds a handle. An operator finds the site and its present rates by this
  handle, so one graph serves all rates. ``note`` and ``observe`` declare that they change the
  handle, so that no call is left out or moved.
- Seed: the seed is drawn in the graph, so that a recomputation draws the same seed.
- Row: autograd refuses to save a changed tensor. Therefore a backward gets a row with the number of
  the handle and the rates of its forward.
- Copies: an operator may not return one of its inputs. Its output must have the strides that its
  fake implementation promises. Results that break a rule are copied.
"""

import ast
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .._torch import (
    NO_TASK,
    graph_task,
    hooks_of_tensor,
    is_view,
    recording_autograd,
    shares_memory,
    transforming,
)
from ..axes.view import View
from ..compiling import define_operator, differentiate, is_exporting, owner_of
from .seeds import seeded
from .site import (
    LiveSite,
    Rates,
    act,
    is_due,
    may_get_grad,
    perform,
    refuse_tracing,
    regularize_grad,
    see,
    see_grad,
)

_SEEDS = 2**63 - 1
_VIEW = "str layout, SymInt[] grid, SymInt prefix"
_NONE = -1  # the number of a handle if the site is off, and of a call that is not observed


def regularize(site: LiveSite, x: Tensor, layer_input: Any, training: bool) -> Tensor:
    """Regularize as `act` does, in code that torch.compile or torch.export traces."""
    exporting = is_exporting()
    if exporting or transforming():
        refuse_tracing(site, training)
    if exporting:  # the program keeps the present rates as constants
        return perform(site, x, None, site.values, input=layer_input)
    if site.of_gradients and not may_get_grad(x):
        note(site.handle, training)  # for example, the first pass of a reentrant checkpoint
        return x

    reads_activation = site.regularizer.needs_activation
    # whether the backward needs only the gradient, so that no activation is saved
    if site.of_gradients:
        linear = not reads_activation
    else:  # a factor that depends on the input of the layer needs this input in the backward
        linear = site.regularizer.linear and not site.regularizer.needs_input
    # whether the operator gets no input of the layer
    without_input = linear or reads_activation

    seed = torch.randint(-_SEEDS, _SEEDS, (), device="cpu") if site.draws else None
    view = _view_of(site, x)

    y: Tensor
    y, _ = regularize_op(
        x,
        None if without_input else _other_input(x, layer_input),
        site.handle,
        seed,
        view.layout,
        view.grid or (),
        view.prefix,
        training,
        linear,
        len(site.values),
    )
    return y


def _view_of(site: LiveSite, x: Tensor) -> View:
    """Return the view of a tensor. A layout that is certain is not read again."""
    sure = site.reader.sure
    if sure and len(sure.layout) == x.ndim:
        return sure
    return site.view_of(x)


def _other_input(x: Tensor, layer_input: Any) -> Tensor | None:
    """Return the input of the layer if it is a tensor, and another one than `x`."""
    if layer_input is x or not isinstance(layer_input, Tensor):
        return None
    return layer_input


def _entered(handle: Tensor, training: bool) -> LiveSite | None:
    """Count a call of the site of a handle; return the site if it acts in this call."""
    site: LiveSite | None = owner_of(handle)
    if site is None:
        return None
    site.run.compiled = True
    return site if site.enter(training) else None


def _fake_note(handle: Tensor, training: bool) -> None:
    """Return nothing."""


@define_operator("note", "(Tensor(a!) handle, bool training) -> ()", fake=_fake_note)
def note(handle: Tensor, training: bool) -> None:
    """Count a forward of a site that regularizes gradients, if the activation gets no gradient."""
    _entered(handle, training)


def _fake_regularize(
    x: Tensor,
    layer_input: Tensor | None,
    handle: Tensor,
    seed: Tensor | None,
    layout: str,
    grid: Sequence[int],
    prefix: int,
    training: bool,
    linear: bool,
    n_rates: int,
) -> tuple[Tensor, Tensor]:
    row = torch.empty(1 + n_rates, dtype=torch.float64, device="cpu")
    return torch.empty_like(x), row


@define_operator(
    "regularize",
    f"(Tensor x, Tensor? layer_input, Tensor handle, Tensor? seed, {_VIEW}, bool training, "
    "bool linear, int n_rates) -> (Tensor, Tensor)",
    fake=_fake_regularize,
)
def regularize_op(
    x: Tensor,
    layer_input: Tensor | None,
    handle: Tensor,
    seed: Tensor | None,
    layout: str,
    grid: Sequence[int],
    prefix: int,
    training: bool,
    linear: bool,
    n_rates: int,
) -> tuple[Tensor, Tensor]:
    """Regularize an activation; return it, and a row with the number of the handle and the rates.

    The row is for the backward. Its number is `_NONE` if the site was not active.
    """
    site = _entered(handle, training)
    if site is None:
        number = _NONE
        rates = [0.0] * n_rates
    else:
        number = int(handle)
        rates = list(site.values.values())
    row = torch.tensor([number, *rates], dtype=torch.float64, device="cpu")
    if site is None or site.of_gradients:
        return _new(x, x), row

    site.refuse_same_masks()
    view = View(layout, tuple(grid) or None, prefix)
    with _seeded(seed, x.device):
        y = act(site, x, x if layer_input is None else layer_input, training, view)
    return _new(y, x), row


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the tensors for the backward. A linear regularizer needs no activation."""
    x, layer_input, _, seed, layout, grid, prefix, _, linear, _ = inputs
    _, row = output
    ctx.view = (layout, grid, prefix)
    ctx.set_materialize_grads(False)
    if linear:
        ctx.save_for_backward(None, None, seed, row)
    else:
        ctx.save_for_backward(x, layer_input, seed, row)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 10
    grads = regularize_gradients_op(grad, *ctx.saved_tensors, *ctx.view)
    of_input = grads[1] if len(grads) > 1 else None
    return grads[0], of_input, *[None] * 8


differentiate("regularize", _backward, _save)


def _fake_regularize_gradients(
    grad: Tensor,
    x: Tensor | None,
    layer_input: Tensor | None,
    seed: Tensor | None,
    row: Tensor,
    layout: str,
    grid: Sequence[int],
    prefix: int,
) -> list[Tensor]:
    return [torch.empty_like(like) for like in (grad, layer_input) if has_gradient(like)]


@define_operator(
    "regularize_gradients",
    f"(Tensor grad, Tensor? x, Tensor? layer_input, Tensor? seed, Tensor row, {_VIEW}) -> Tensor[]",
    fake=_fake_regularize_gradients,
)
def regularize_gradients_op(
    grad: Tensor,
    x: Tensor | None,
    layer_input: Tensor | None,
    seed: Tensor | None,
    row: Tensor,
    layout: str,
    grid: Sequence[int],
    prefix: int,
) -> list[Tensor]:
    """Return the gradients of the activation and of `layer_input`, with the mask of the forward.

    A linear regularizer is applied to the gradient. Other regularizers run again with autograd, on
    `x` and `layer_input`. Regularizers of gradients that read the activation also get `x`. The
    results have the strides of `grad` and of `layer_input`.
    """
    number, *values = row.tolist()
    if number == _NONE:
        of_input = [torch.zeros_like(layer_input)] if has_gradient(layer_input) else []
        return [_new(grad, grad), *of_input]
    site: LiveSite | None = owner_of(number)
    if site is None:
        raise RuntimeError("call backward before attached.remove(): compiled code needs its site")

    view = View(layout, tuple(grid) or None, prefix)
    rates = dict(zip(site.values, values, strict=False))
    if site.of_gradients:
        return [_new(regularize_grad(site, view, rates, grad, activation=x), grad)]
    with _seeded(seed, grad.device):
        if x is None:
            return [_new(perform(site, grad, view, rates), grad)]
        return _run_again(site, view, rates, grad, x, layer_input)


def _run_again(
    site: LiveSite,
    view: View,
    rates: Rates,
    grad: Tensor,
    x: Tensor,
    layer_input: Tensor | None,
) -> list[Tensor]:
    """Run a regularizer again, with autograd, for the gradients of its inputs."""
    with recording_autograd():
        leaf = x.detach().requires_grad_()
        leaves = [leaf]
        likes = [grad]
        second = leaf if layer_input is None else layer_input
        if has_gradient(layer_input):
            second = layer_input.detach().requires_grad_()
            leaves.append(second)
            likes.append(layer_input)
        y = perform(site, leaf, view, rates, input=second)
        grads = torch.autograd.grad(y, leaves, grad, allow_unused=True, materialize_grads=True)
    return [_new(result, like) for result, like in zip(grads, likes, strict=True)]


def has_gradient(x: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether `x` is a tensor that can have a gradient, unlike the input of an embedding."""
    return x is not None and (x.is_floating_point() or x.is_complex())


def _new(y: Tensor, x: Tensor) -> Tensor:
    """Return `y` as a new tensor with the dtype and the strides of ``torch.empty_like(x)``."""
    strides = torch.empty_like(x, device="meta").stride()
    aliased = shares_memory(y, x)
    fits = not aliased and y.dtype == x.dtype and y.stride() == strides
    return y.detach() if fits else torch.empty_like(x).copy_(y.detach())


def _seeded(seed: Tensor | None, device: torch.device) -> AbstractContextManager[None]:
    """Seed the generators of the CPU and of a device within a ``with`` block; None seeds none."""
    return nullcontext() if seed is None else seeded(int(seed), device)


def written(nesting: Any) -> str:
    """Return a nested structure of numbers and None as a Python literal."""
    if isinstance(nesting, dict):
        items = [f"{key!r}: {written(value)}, " for key, value in nesting.items()]
        return "{" + "".join(items) + "}"
    if isinstance(nesting, (list, tuple)):
        inside = "".join([f"{written(value)}, " for value in nesting])
        return f"[{inside}]" if isinstance(nesting, list) else f"({inside})"
    return str(nesting)


def _fake_observe(
    handle: Tensor,
    tensors: Sequence[Tensor],
    given: Sequence[Tensor],
    nesting: str,
    training: bool,
    differentiable: bool,
) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device="cpu")


@define_operator(
    "observe",
    "(Tensor(a!) handle, Tensor[] tensors, Tensor[] given, str nesting, bool training, "
    "bool differentiable) -> Tensor",
    fake=_fake_observe,
)
def observe(
    handle: Tensor,
    tensors: Sequence[Tensor],
    given: Sequence[Tensor],
    nesting: str,
    training: bool,
    differentiable: bool,
) -> Tensor:
    """Hand the tensors of a call to an observer; return the numbers of handle and call."""
    site = _entered(handle, training)
    if site is None or graph_task() != NO_TASK:
        # a recomputation is no new call, but its gradient is measured
        return torch.tensor([int(handle), _NONE], device="cpu")
    if not is_due(site, training):
        return torch.tensor([_NONE, _NONE], device="cpu")  # no gradient is measured either

    read = partial(ast.literal_eval, nesting)
    call = see(site, tensors, given, nesting=read, training=training, differentiable=differentiable)
    watch: Any = site.watch
    # replaces that of the call before, whose gradient has come, or is lost
    watch.awaited = watch.await_gradient()
    return torch.tensor([int(handle), _NONE if call is None else call], device="cpu")


def _fake_observe_gradient(grad: Tensor, ticket: Tensor, at: int) -> None:
    """Return nothing."""


@define_operator(
    "observe_gradient", "(Tensor grad, Tensor ticket, int at) -> ()", fake=_fake_observe_gradient
)
def observe_gradient(grad: Tensor, ticket: Tensor, at: int) -> None:
    """Hand a gradient to an observer; `ticket` holds the numbers of handle and call."""
    number, call = ticket.tolist()
    site = owner_of(number)
    if site is not None:
        watch: Any = site.watch
        see_grad(site, grad, at, call, watch.awaited)


torch.fx.has_side_effect(observe_gradient)


def watch_gradient(x: Tensor, see: Callable[[Tensor | None], None]) -> Tensor:
    """Return the tensor with a hook that calls `see` with its gradient.

    A copy gets the hook in three cases. A view would lose the hook by an in-place operation. A leaf
    is a parameter, which would keep the hook. A tensor whose gradient is regularized already has a
    hook, which would run before this one.
    """
    if not may_get_grad(x):
        return x
    hooks = hooks_of_tensor(x)
    regularized = any(getattr(hook, "func", None) is regularize_grad for hook in hooks.values())
    if regularized or is_view(x) or x.is_leaf:
        x = x.clone()
    x.register_hook(see)  # type: ignore[no-untyped-call]  # torch's
    return x


# Dynamo traces one operator faster than the Python code in it, which AOTAutograd decomposes later.
@define_operator(
    "observe_and_watch",
    "(Tensor(a!) handle, Tensor[] tensors, Tensor[] given, str nesting, bool training, "
    "bool gradients) -> Tensor[]",
)
def observe_and_watch(
    handle: Tensor,
    tensors: Sequence[Tensor],
    given: Sequence[Tensor],
    nesting: str,
    training: bool,
    gradients: bool,
) -> list[Tensor]:
    """Observe one call; return its tensors with watched gradients, or [] if none is watched."""
    if transforming():
        return []
    differentiable = any(map(may_get_grad, tensors))
    with torch.no_grad():
        ticket = observe(handle, tensors, given, nesting, training, differentiable)
    if not (gradients and differentiable):
        return []

    def hand_over(at: int, grad: Tensor | None) -> None:
        if grad is not None:  # the output was used
            with torch.no_grad():
                observe_gradient(grad, ticket, at)

    return [watch_gradient(x, partial(hand_over, at)) for at, x in enumerate(tensors)]
