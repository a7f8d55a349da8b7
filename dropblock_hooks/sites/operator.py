"""The way from compiled code to a site: one operator that runs the eager regularizer.

torch.compile does not trace into operators. Compiled code holds a handle that names the site, and a
seed, which is drawn in the graph so that a recomputation draws the same one. When the code runs,
``regularize`` finds the site, seeds the random number generator, and runs the same regularizer as
in eager mode, with the rates of now. So one graph serves all rates. ``regularize_backward`` does
the same with the gradient, with the rates of the forward. ``note`` counts a call in which nothing
is done.

An operator may not return one of its inputs, and its output must have the strides that its fake
implementation promises, so each result is copied where it is not a new tensor of those strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..axes.view import View
from ..functional.sparse import reusing
from ..handles import define_operator, differentiate, find
from .act import act_on_activation, perform, regularize_grad
from .site import Site

_SEEDS = 2**63 - 1
_MOST_DRAWS = 16  # that a site keeps; without them, a backward draws from the seed again
_VIEW = "str layout, SymInt[] grid, SymInt prefix"
_OFF = -1.0
_KEY = torch._C.DispatchKey
_AUTOGRAD = (
    *(_KEY.AutogradFunctionality, _KEY.AutogradOther, _KEY.AutogradNestedTensor),
    *(_KEY.AutogradCPU, _KEY.AutogradCUDA, _KEY.ADInplaceOrView),
)


def regularize(site: Site, x: Tensor, given: Any, training: bool) -> Tensor:
    """Regularize an activation, or its gradient, in code that torch.compile traces.

    `given` is the first input of the layer. The backward is the regularizer itself where that is
    linear, or acts on gradients; others need the activation and `given` again.
    """
    form, regularizer = site.form_of(x), site.regularizer
    linear = regularizer.linear or regularizer.acts_on == "gradient"
    needed = isinstance(given, Tensor) and not linear and given is not x
    y: Tensor
    y, _ = regularize_op(
        x,
        given if needed else None,
        site.handle,
        torch.randint(-_SEEDS, _SEEDS, (), device="cpu") if site.draws else None,
        *(form.layout, list(form.grid or ()), form.prefix),
        *(training, linear, len(site.values)),
    )
    return y


def note_call(site: Site, training: bool) -> None:
    """Call ``site.note_call(training)`` when the compiled code runs."""
    note_op(site.handle, training)


@define_operator(
    "note",
    "(Tensor(a!) handle, bool training) -> ()",  # one that "changes" something is never left out
    fake=lambda handle, training: None,
)
def note_op(handle: Tensor, training: bool) -> None:
    """Count a forward in which nothing is done to the activation."""
    site: Site | None = find(handle)
    if site is not None:
        site.note_call(training)


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
    layout: str,
    grid: Sequence[int],
    prefix: int,
    training: bool,
    linear: bool,
    n_rates: int,
) -> tuple[Tensor, Tensor]:
    """Run the site's regularizer on an activation and count it.

    Return the regularized activation, and what the backward has to know as a row of float64
    numbers: that of the handle, or -1 where the site was not active, and the rates that were used.
    """
    site: Site | None = find(handle)
    active = site is not None and site.enter(training, compiled=True)
    rates = site.values.values() if site is not None else [0.0] * n_rates
    number = float(handle) if active else _OFF
    row = torch.tensor([number, *rates], dtype=torch.float64, device="cpu")
    if site is None or not active or site.regularizer.acts_on == "gradient":
        return _new(x, x), row
    draws: list[Any] = []
    with _seeded(seed, x.device), reusing(draws):
        given = x if layer_input is None else layer_input
        y = act_on_activation(site, x, View(layout, tuple(grid) or None, prefix), given, training)
    if linear and draws:
        site.kept_draws[int(seed or 0)] = draws
        if len(site.kept_draws) > _MOST_DRAWS:  # of forwards without a backward
            site.kept_draws.pop(next(iter(site.kept_draws)))
    return _new(y, x), row


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, layer_input, _, seed, *ctx.read, linear, _ = inputs
    ctx.set_materialize_grads(False)
    # not the handle, which other operators "change": autograd would refuse it
    ctx.save_for_backward(*((None, None) if linear else (x, layer_input)), seed, output[1])


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 10
    grads = regularize_backward_op(grad, *ctx.saved_tensors, *ctx.read)
    return grads[0], None if ctx.saved_tensors[1] is None else grads[1], *[None] * 8


differentiate("regularize", _backward, _save)


@define_operator(
    "regularize_backward",
    "(Tensor grad, Tensor? x, Tensor? layer_input, Tensor? seed, Tensor row, "
    f"{_VIEW}, bool training) -> (Tensor, Tensor)",
    fake=lambda grad, x, layer_input, *given: (
        torch.empty_like(grad),
        grad.new_empty(0) if layer_input is None else torch.empty_like(layer_input),
    ),
)
def regularize_backward_op(
    grad: Tensor,
    x: Tensor | None,
    layer_input: Tensor | None,
    seed: Tensor | None,
    row: Tensor,
    layout: str,
    grid: Sequence[int],
    prefix: int,
    training: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of the activation and of the layer's input, with the mask of the forward.

    A regularizer of gradients, or one that multiplies by a diagonal matrix (``linear``), is applied
    to the gradient. Others are run a second time, with gradients; `x` is given for these only.
    """
    nothing = grad.new_empty(0) if layer_input is None else torch.zeros_like(layer_input)
    number, *values = row.tolist()
    if number == _OFF:
        return _new(grad, grad), nothing
    site: Site | None = find(number)
    if site is None:
        raise RuntimeError(
            "the attachment was removed and deleted between a compiled forward and its backward: "
            "call backward before attached.remove()"
        )
    form = View(layout, tuple(grid) or None, prefix)
    rates = dict(zip(site.values, values, strict=False))
    if site.regularizer.acts_on == "gradient":
        return _new(regularize_grad(site, form, rates, grad), grad), nothing
    draws = site.kept_draws.pop(int(seed or 0), None) or []
    with _seeded(seed, grad.device), reusing(draws):
        if x is None:
            return _new(perform(site, grad, form, rates, None, training), grad), nothing
        with _autograd():
            inputs = [t.detach().requires_grad_() for t in (x, layer_input) if t is not None]
            y = perform(site, inputs[0], form, rates, inputs[-1], training)
            found = torch.autograd.grad(y, inputs, grad, allow_unused=True)
    grads = [torch.zeros_like(t.detach()) for t in inputs]
    for to, each in zip(grads, found, strict=True):
        if each is not None:
            to.copy_(each)
    return grads[0], (nothing if layer_input is None else grads[1])


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
