"""Operators through which compiled code runs the eager code of a site.

Only classes need them that torch.compile does not trace: `Foreign`, `Capture`, and those of users
without ``traced = True``. `sites.compiled` and `sites.observed` are for all others.

Compiled code holds a handle, by which an operator finds the site and its present rates, so one
graph serves all rates; and a seed, drawn in the graph so that a recomputation draws the same one.
``note`` and ``observe`` say that they change the handle, so that no call is left out or moved.
Autograd refuses to save a changed tensor, so a backward gets the number of the handle, and the
rates of its forward. An operator may not return one of its inputs, and its output must have the
strides that its fake implementation promises. So other results are copied.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch import hooks_of_tensor, is_view, recording_autograd, shares_memory, transforming
from ..axes.view import View
from ..checkpointing import NO_TASK, graph_task
from ..compiling import define_operator, differentiate, find, is_exporting
from .site import (
    Site,
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
_NONE = -1  # in place of the number of a site that is off, or of a call that is not observed


def regularize(site: Site, x: Tensor, given: Any, training: bool) -> Tensor:
    """The same as `act`, in code that torch.compile or torch.export traces."""
    exporting = is_exporting()
    if exporting or transforming():
        refuse_tracing(site, training)
    if exporting:  # the program keeps the present rates as constants
        return perform(site, x, None, site.values, input=given)
    sure = site.reader.sure
    linear = site.regularizer.linear or site.of_gradients
    if site.of_gradients and not may_get_grad(x):
        note(site.handle, training)  # the first pass of a reentrant checkpoint, say
        return x
    layout, grid, prefix = sure if sure and len(sure.layout) == x.ndim else site.view_of(x)
    layer_input = None if linear or given is x or not isinstance(given, Tensor) else given
    seed = torch.randint(-_SEEDS, _SEEDS, (), device="cpu") if site.draws else None
    where = layout, grid or (), prefix, training, linear, len(site.values)
    y: Tensor = regularize_op(x, layer_input, site.handle, seed, *where)[0]
    return y


def _entered(handle: Tensor, training: bool) -> Site | None:
    """The site of a handle if it is to act in this call, which is counted."""
    site: Site | None = find(handle)
    if site is None:
        return None
    site.run.compiled = True
    return site if site.enter(training) else None


@define_operator("note", "(Tensor(a!) handle, bool training) -> ()", fake=lambda *given: None)
def note(handle: Tensor, training: bool) -> None:
    """Count a forward in which nothing is done to the activation."""
    site = _entered(handle, training)
    if site is not None and site.regularizer.acts_on == "activation" and graph_task() == NO_TASK:
        site.tally.add(None, 0, 0.0)


@define_operator(
    "regularize",
    f"(Tensor x, Tensor? layer_input, Tensor handle, Tensor? seed, {_VIEW}, bool training, "
    "bool linear, int n_rates) -> (Tensor, Tensor)",
    fake=lambda x, *given: (
        torch.empty_like(x),
        torch.empty(1 + given[-1], dtype=torch.float64, device="cpu"),
    ),
)
def regularize_op(x: Tensor, layer_input: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """Regularize an activation; return it, and a row with the number of the handle and the rates.

    The row is for the backward. Its number is `_NONE` if the site was not active.
    """
    handle, seed, layout, grid, prefix, training, _, n_rates = rest
    site = _entered(handle, training)
    rates = [0.0] * n_rates if site is None else site.values.values()
    number = _NONE if site is None else int(handle)
    row = torch.tensor([number, *rates], dtype=torch.float64, device="cpu")
    if site is None or site.regularizer.acts_on == "gradient":
        return _new(x, x), row
    with _seeded(seed, x.device):
        given = x if layer_input is None else layer_input
        y = act(site, x, given, training, View(layout, tuple(grid) or None, prefix))
    return _new(y, x), row


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, layer_input, _, seed, *ctx.read, _, linear, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*((None, None) if linear else (x, layer_input)), seed, output[1])


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 10
    grads = regularize_gradients_op(grad, *ctx.saved_tensors, *ctx.read)
    of_input = grads[1] if len(grads) > 1 else None
    return grads[0], of_input, *[None] * 8


differentiate("regularize", _backward, _save)


@define_operator(
    "regularize_gradients",
    f"(Tensor grad, Tensor? x, Tensor? layer_input, Tensor? seed, Tensor row, {_VIEW}) -> Tensor[]",
    fake=lambda grad, x, layer_input, *given: [
        torch.empty_like(each) for each in (grad, layer_input) if has_gradient(each)
    ],
)
def regularize_gradients_op(grad: Tensor, x: Tensor | None, *saved: Any) -> list[Tensor]:
    """The gradients of the activation and of `layer_input`, if given, with the mask of the forward.

    Only for regularizers that are not linear, `x` is given. These run again, with autograd. The
    results have the strides of `grad` and of `layer_input`.
    """
    layer_input, seed, row, layout, grid, prefix = saved
    number, *values = row.tolist()
    if number == _NONE:
        of_input = [torch.zeros_like(layer_input)] if has_gradient(layer_input) else []
        return [_new(grad, grad), *of_input]
    site: Site | None = find(number)
    if site is None:
        raise RuntimeError("call backward before attached.remove(): compiled code needs its site")
    view = View(layout, tuple(grid) or None, prefix)
    rates = dict(zip(site.values, values, strict=False))
    if site.regularizer.acts_on == "gradient":
        return [_new(regularize_grad(site, view, rates, grad), grad)]
    with _seeded(seed, grad.device):
        if x is None:
            return [_new(perform(site, grad, view, rates), grad)]
        with recording_autograd():
            leaves = [x.detach().requires_grad_()]
            given = leaves[0] if layer_input is None else layer_input
            if has_gradient(layer_input):
                given = layer_input.detach().requires_grad_()
                leaves.append(given)
            y = perform(site, leaves[0], view, rates, input=given)
            grads = torch.autograd.grad(y, leaves, grad, allow_unused=True, materialize_grads=True)
    likes = grad, layer_input
    return [_new(each, like) for each, like in zip(grads, likes, strict=False)]


def has_gradient(x: Tensor | None) -> bool:
    """Whether it is a tensor that may have a gradient; the input of an embedding has none."""
    return x is not None and (x.is_floating_point() or x.is_complex())


def _new(y: Tensor, x: Tensor) -> Tensor:
    """`y` as a new tensor with the dtype and the strides of ``torch.empty_like(x)``."""
    strides = torch.empty_like(x, device="meta").stride()
    aliased = shares_memory(y, x)
    fits = not aliased and y.dtype == x.dtype and y.stride() == strides
    return y.detach() if fits else torch.empty_like(x).copy_(y.detach())


@contextmanager
def _seeded(seed: Tensor | None, device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and of a device within a ``with`` block; None seeds none."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, seed is not None, device_type=device.type):
        if seed is not None:
            torch.default_generator.manual_seed(int(seed))
            for each in devices:
                generators: Any = torch.get_device_module(each).default_generators
                generators[each.index].manual_seed(int(seed))
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
def observe(handle: Tensor, tensors: Sequence[Tensor], *rest: Any) -> Tensor:
    """Hand the tensors of a call to an observer; return the numbers of handle and call."""
    given, nesting, training, differentiable = rest
    site, call = _entered(handle, training), None
    if site is not None and graph_task() == NO_TASK:
        if not is_due(site, training):
            return torch.tensor([_NONE, _NONE], device="cpu")  # no gradient is measured either
        read = partial(ast.literal_eval, nesting)
        call = see(
            site, tensors, given, nesting=read, training=training, differentiable=differentiable
        )
    return torch.tensor([int(handle), _NONE if call is None else call], device="cpu")


@define_operator(
    "observe_gradient", "(Tensor grad, Tensor ticket, int at) -> ()", fake=lambda *given: None
)
def observe_gradient(grad: Tensor, ticket: Tensor, at: int) -> None:
    number, call = ticket.tolist()
    site = find(number)
    if site is not None:
        see_grad(site, grad, at, call)


torch.fx.has_side_effect(observe_gradient)


def watch_gradient(x: Tensor, see: Callable[[Tensor | None], None]) -> Tensor:
    """Return the tensor; `see` is called with its gradient, if it may get one.

    A view and a leaf are copied: work in place would lose the hook of a view, and a parameter would
    keep it. So is a tensor whose gradient is regularized: of two hooks on it, the first acts first.
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
def observe_and_watch(handle: Tensor, tensors: Sequence[Tensor], *options: Any) -> list[Tensor]:
    """Observe one call; return its tensors with watched gradients, or nothing without any."""
    if transforming():
        return []
    *seen, gradients = options
    differentiable = any(map(may_get_grad, tensors))
    with torch.no_grad():
        ticket = observe(handle, tensors, *seen, differentiable)
    if not (gradients and differentiable):
        return []

    def hand_over(at: int, grad: Tensor | None) -> None:
        if grad is not None:  # as of a tensor that nothing was made of
            with torch.no_grad():
                observe_gradient(grad, ticket, at)

    return [watch_gradient(x, partial(hand_over, at)) for at, x in enumerate(tensors)]
