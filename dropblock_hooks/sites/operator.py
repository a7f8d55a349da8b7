"""Operators through which compiled code runs the eager code of a site.

torch.compile does not trace into operators. Compiled code holds a handle that names the site, and a
seed, which is drawn in the graph so that a recomputation draws the same one. An operator finds the
site, seeds the random number generator, and runs the same regularizer as in eager mode, with the
rates of now. So one graph serves all rates. The backward has the rates of the forward.

``note`` and ``observe`` say that they change the handle, so that the compiler never leaves them
out or changes the order of calls. Autograd refuses to save a changed tensor, so a backward gets
the number of the handle. An operator may not return one of its inputs, and its output must have
the strides that its fake implementation promises. So other results are copied.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..axes.view import View
from ..checkpointing import NO_TASK, graph_task
from ..functional.sparse import reusing
from ..handles import define_operator, differentiate, find, is_exporting
from .act import (
    act_on_activation,
    may_get_gradient,
    perform,
    refuse_tracing,
    regularize_grad,
    see,
    see_gradient,
)
from .site import Site

_SEEDS = 2**63 - 1
_MOST_DRAWS = 16  # that a site keeps; without them, a backward draws from the seed again
_VIEW = "str layout, SymInt[] grid, SymInt prefix"
_NONE = -1  # in place of the number of a site that is off, or of a call that is not observed
_KEY = torch._C.DispatchKey
_AUTOGRAD = (
    *(_KEY.AutogradFunctionality, _KEY.AutogradOther, _KEY.AutogradNestedTensor),
    *(_KEY.AutogradCPU, _KEY.AutogradCUDA, _KEY.ADInplaceOrView),
)


def regularize(site: Site, x: Tensor, given: Any, training: bool) -> Tensor:
    """The same as `act`, in code that torch.compile or torch.export traces."""
    exporting = is_exporting()
    if exporting or torch._C._are_functorch_transforms_active():
        refuse_tracing(site, training)
    if exporting:  # the program keeps the present rates as constants
        return perform(site, x, None, site.values, given)
    gradient, linear, draws, n_rates, sure = site.traits
    if gradient and not may_get_gradient(x):
        note(site.handle, training)  # the first pass of a reentrant checkpoint, say
        return x
    layout, grid, prefix = sure if sure and len(sure[0]) == x.ndim else site.form_of(x)
    layer_input = None if linear or given is x or not isinstance(given, Tensor) else given
    seed = torch.randint(-_SEEDS, _SEEDS, (), device="cpu") if draws else None
    y: Tensor = regularize_op(
        *(x, layer_input, site.handle, seed, layout, grid or (), prefix),
        *(training, linear, n_rates),
    )[0]
    return y


@define_operator(
    "note",
    "(Tensor(a!) handle, bool training) -> ()",  # one that "changes" something is never left out
    fake=lambda handle, training: None,
)
def note(handle: Tensor, training: bool) -> None:
    """Count a forward in which nothing is done to the activation."""
    site: Site | None = find(handle)
    if site is None or graph_task() != NO_TASK:
        return
    site.run.compiled = True
    if site.enter(training) and site.regularizer.acts_on == "activation":
        site.counter.add(None, 0, 0.0)


@define_operator(
    "regularize",
    f"(Tensor x, Tensor? layer_input, Tensor handle, Tensor? seed, {_VIEW}, bool training, "
    "bool linear, int n_rates) -> (Tensor, Tensor)",
    fake=lambda x, *given: (
        torch.empty_like(x),
        torch.empty(1 + given[-1], dtype=torch.float64, device="cpu"),
    ),
)
def regularize_op(
    x: Tensor,
    layer_input: Tensor | None,
    handle: Tensor,
    seed: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Regularize an activation; return it, and a row with the number of the handle and the rates.

    The row is for the backward. Its number is `_NONE` if the site was not active.
    """
    *read, training, linear, n_rates = options
    site: Site | None = find(handle)
    active = False
    if site is not None:
        site.run.compiled = True
        active = site.enter(training)
    rates = site.values.values() if site is not None else [0.0] * n_rates
    number = float(handle) if active else _NONE
    row = torch.tensor([number, *rates], dtype=torch.float64, device="cpu")
    if site is None or not active or site.regularizer.acts_on == "gradient":
        return _new(x, x), row
    draws: list[Any] = []
    with _seeded(seed, x.device), reusing(draws):
        given = x if layer_input is None else layer_input
        y = act_on_activation(site, x, _form(*read), given, training)
    if linear and draws:
        site.kept_draws[int(seed or 0)] = draws
        if len(site.kept_draws) > _MOST_DRAWS:  # of forwards without a backward
            site.kept_draws.pop(next(iter(site.kept_draws)))
    return _new(y, x), row


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, layer_input, _, seed, *ctx.read, _, linear, _ = inputs
    ctx.set_materialize_grads(False)
    # not the handle, which other operators "change": autograd would refuse it
    ctx.save_for_backward(*((None, None) if linear else (x, layer_input)), seed, output[1])


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 10
    grads = regularize_gradients_op(grad, *ctx.saved_tensors, *ctx.read)
    return grads[0], grads[1] if len(grads) > 1 else None, *[None] * 8


differentiate("regularize", _backward, _save)


@define_operator(
    "regularize_gradients",
    f"(Tensor grad, Tensor? x, Tensor? layer_input, Tensor? seed, Tensor row, {_VIEW}) -> Tensor[]",
    fake=lambda grad, x, layer_input, *given: [
        torch.empty_like(each) for each in (grad, layer_input) if each is not None
    ],
)
def regularize_gradients_op(
    grad: Tensor,
    x: Tensor | None,
    layer_input: Tensor | None,
    seed: Tensor | None,
    row: Tensor,
    *read: Any,
) -> list[Tensor]:
    """The gradients of the activation and of `layer_input`, if given, with the mask of the forward.

    A regularizer of gradients, or a linear one, is applied to the gradient. Others are run a second
    time, with autograd; `x` is given for these only.
    """
    nothing = [] if layer_input is None else [torch.zeros_like(layer_input)]
    number, *values = row.tolist()
    if number == _NONE:
        return [_new(grad, grad), *nothing]
    site: Site | None = find(number)
    if site is None:
        raise RuntimeError(
            "the attachment was removed and deleted between a compiled forward and its backward: "
            "call backward before attached.remove()"
        )
    form = _form(*read)
    rates = dict(zip(site.values, values, strict=False))
    if site.regularizer.acts_on == "gradient":
        return [_new(regularize_grad(site, form, rates, grad), grad), *nothing]
    draws = site.kept_draws.pop(int(seed or 0), None) or []
    with _seeded(seed, grad.device), reusing(draws):
        if x is None:
            return [_new(perform(site, grad, form, rates), grad), *nothing]
        with _autograd():
            inputs = [t.detach().requires_grad_() for t in (x, layer_input) if t is not None]
            y = perform(site, inputs[0], form, rates, inputs[-1])
            found = torch.autograd.grad(y, inputs, grad, allow_unused=True)
    grads = [torch.zeros_like(t.detach()) for t in inputs]
    for to, each in zip(grads, found, strict=True):
        if each is not None:
            to.copy_(each)
    return grads


def _form(layout: str, grid: Sequence[int], prefix: int) -> View:
    return View(layout, tuple(grid) or None, prefix)


def _new(y: Tensor, x: Tensor) -> Tensor:
    """`y` as a new tensor with the dtype and the strides of ``torch.empty_like(x)``."""
    strides = torch.empty_like(x, device="meta").stride()
    aliased = torch._C._is_alias_of(y, x)  # type: ignore[attr-defined]  # torch's
    fits = not aliased and y.dtype == x.dtype and y.stride() == strides
    return y.detach() if fits else torch.empty_like(x).copy_(y.detach())


@contextmanager
def _seeded(seed: Tensor | None, device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and of a device within a ``with`` block; None seeds none."""
    generators = [] if seed is None else [torch.default_generator]
    if seed is not None and device.type != "cpu":
        module: Any = torch.get_device_module(device)
        at = module.current_device() if device.index is None else device.index
        generators.append(module.default_generators[at])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(int(seed or 0))
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def _autograd() -> Iterator[None]:
    """Record a graph inside an operator, where torch has switched autograd off."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def written(nesting: Any) -> str:
    """Return a nested structure of numbers and None as a Python literal."""
    if isinstance(nesting, dict):
        return "{" + "".join([f"{key!r}: {written(each)}, " for key, each in nesting.items()]) + "}"
    if isinstance(nesting, (list, tuple)):
        inside = "".join([f"{written(each)}, " for each in nesting])
        return f"[{inside}]" if isinstance(nesting, list) else f"({inside})"
    return str(nesting)


@define_operator(
    "observe",
    "(Tensor(a!) handle, Tensor[] tensors, Tensor[] given, str nesting, bool training, "
    "bool differentiable) -> Tensor",
    fake=lambda *given: torch.empty(2, dtype=torch.int64, device="cpu"),
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
    number = int(handle)
    site, call = find(number), None
    if site is not None and graph_task() == NO_TASK and site.enter(training):
        read = partial(ast.literal_eval, nesting)
        call = see(site, tensors, given, read, training, differentiable)
    return torch.tensor([number, _NONE if call is None else call], device="cpu")


@define_operator(
    "observe_gradient",
    "(Tensor grad, Tensor ticket, int at) -> ()",
    fake=lambda grad, ticket, at: None,
)
def observe_gradient(grad: Tensor, ticket: Tensor, at: int) -> None:
    """Hand a gradient to an observer."""
    number, call = ticket.tolist()
    site = find(number)
    if site is not None:
        see_gradient(site, grad, at, call)


torch.fx.has_side_effect(observe_gradient)


def watch_gradient(x: Tensor, see: Callable[[Tensor | None], None]) -> Tensor:
    """Return the tensor; `see` is called with its gradient, if it may get one.

    A view and a leaf are copied: work in place would lose the hook of a view, and a parameter would
    keep it. So is a tensor whose gradient is regularized: of two hooks on it, the first acts first.
    """
    if not may_get_gradient(x):
        return x
    hooks: dict[int, Any] = x._backward_hooks or {}
    regularized = any(getattr(hook, "func", None) is regularize_grad for hook in hooks.values())
    if regularized or x._is_view() or x.is_leaf:
        x = x.clone()
    x.register_hook(see)  # type: ignore[no-untyped-call]  # torch's
    return x


# Dynamo traces one operator faster than the Python code in it, which AOTAutograd decomposes later.
@define_operator(
    "observe_and_watch",
    "(Tensor(a!) handle, Tensor[] tensors, Tensor[] given, str nesting, bool training, "
    "bool gradients) -> Tensor[]",
)
def observe_and_watch(handle: Tensor, tensors: Sequence[Tensor], *options: Any) -> list[Tensor]:
    """Observe one call; return its tensors with watched gradients, or nothing without any."""
    if torch._C._are_functorch_transforms_active():
        return []
    *seen, gradients = options
    differentiable = any(map(may_get_gradient, tensors))
    with torch.no_grad():
        ticket = observe(handle, tensors, *seen, differentiable)
    if not (gradients and differentiable):
        return []

    def hand_over(at: int, grad: Tensor | None) -> None:
        if grad is not None:  # as of a tensor that nothing was made of
            with torch.no_grad():
                observe_gradient(grad, ticket, at)

    return [watch_gradient(x, partial(hand_over, at)) for at, x in enumerate(tensors)]
