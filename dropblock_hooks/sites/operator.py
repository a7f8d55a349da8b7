"""The way from compiled code to a site: operators that run the eager regularizer.

torch.compile does not trace into these operators. Compiled code holds a seed, which is drawn in the
graph so that a recomputation draws the same one, and a handle that names the site. When the code
runs, the operator finds the site, seeds the random number generator with it, and runs the same
regularizer as in eager mode, with the rates of now. So one graph serves all rates.

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
from .act import Call, act_on_activation, perform, regularize_grad
from .site import Site

_SEEDS = 2**63 - 1
_MOST_DRAWS = 16  # that a site keeps; without them, a backward draws from the seed again
_VIEW = "str layout, SymInt[] grid, SymInt prefix"
_KEY = torch._C.DispatchKey
_AUTOGRAD = (
    *(_KEY.AutogradFunctionality, _KEY.AutogradOther, _KEY.AutogradNestedTensor),
    *(_KEY.AutogradCPU, _KEY.AutogradCUDA, _KEY.ADInplaceOrView),
)


def regularize(site: Site, x: Tensor, call: Call) -> Tensor:
    """Regularize an activation in code that torch.compile traces."""
    form = site.form_of(x)
    linear = site.regularizer.linear
    needed = isinstance(call.input, Tensor) and not linear and call.input is not x
    y: Tensor
    y, _ = regularize_op(
        x,
        call.input if needed else None,
        site.handle,
        torch.randint(-_SEEDS, _SEEDS, (), device="cpu"),
        *_read(form),
        *(call.training, linear, len(site.values)),
    )
    return y


def watch_gradient(site: Site, x: Tensor, call: Call) -> Tensor:
    """Return a copy of an activation whose gradient is regularized, in traced code.

    The rates are those of the forward, whatever ``step`` does before the backward.
    """
    form = site.form_of(x)
    row = begin_op(site.handle, call.training, len(site.values))
    watched: Tensor = _Identity.apply(x, row, *_read(form))
    return watched


def _read(form: View) -> tuple[str, list[int], int]:
    """How axes are read, as arguments of an operator."""
    return form.layout, list(form.grid or ()), form.prefix


def _view(layout: str, grid: Sequence[int], prefix: int) -> View:
    """The inverse of `_read`."""
    return View(layout, tuple(grid) or None, prefix)


def tell_call(site: Site, training: bool) -> None:
    """Call ``site.note_call(training)`` when the compiled code runs."""
    begin_op(site.handle, training, 0)


class _Identity(torch.autograd.Function):
    """Identity function whose backward regularizes the gradient.

    The forward copies: an in-place operation on a view would take the gradient past the identity.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, *read: Any) -> Tensor:
        ctx.read = read
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(row)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if grad is not None:
            grad = gradient_op(grad, *ctx.saved_tensors, *ctx.read)
        return grad, None, None, None, None


@define_operator(
    "regularize",
    f"(Tensor x, Tensor? layer_input, Tensor handle, Tensor seed, {_VIEW}, bool training, "
    "bool linear, int n_rates) -> (Tensor, Tensor)",
    fake=lambda x, *given: (torch.empty_like(x), _empty_row(given[-1])),
)
def regularize_op(
    x: Tensor,
    layer_input: Tensor | None,
    handle: Tensor,
    seed: Tensor,
    layout: str,
    grid: Sequence[int],
    prefix: int,
    training: bool,
    linear: bool,
    n_rates: int,
) -> tuple[Tensor, Tensor]:
    """Run the site's regularizer on an activation and count it.

    Return the regularized activation, and a row of float64 numbers: whether the site was active (1
    or 0), and the rates that were used.
    """
    site: Site | None = find(handle)
    if site is None or not site.enter_compiled(training):
        return _new(x, x), torch.zeros(1 + n_rates, dtype=torch.float64)
    row = _row(1.0, site)
    call = Call(x if layer_input is None else layer_input, training)
    draws: list[Any] = []
    with _seeded(int(seed), x.device), reusing(draws):
        y = act_on_activation(site, x, _view(layout, grid, prefix), call)
    if linear and draws:
        site.kept_draws[int(seed)] = draws
        if len(site.kept_draws) > _MOST_DRAWS:  # of forwards without a backward
            site.kept_draws.pop(next(iter(site.kept_draws)))
    return _new(y, x), row


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, layer_input, handle, seed, *ctx.read, ctx.linear, _ = inputs
    kept = () if ctx.linear else (x, layer_input)
    ctx.has_input = layer_input is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(handle, seed, output[1], *(each for each in kept if each is not None))


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 10
    handle, seed, row, *kept = ctx.saved_tensors
    x, layer_input = (*kept, None, None)[:2]
    grads = regularize_backward_op(grad, x, layer_input, handle, seed, row, *ctx.read)
    return grads[0], (grads[1] if ctx.has_input and not ctx.linear else None), *[None] * 8


differentiate("regularize", _backward, _save)


@define_operator(
    "regularize_backward",
    "(Tensor grad, Tensor? x, Tensor? layer_input, Tensor handle, Tensor seed, Tensor row, "
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
    handle: Tensor,
    seed: Tensor,
    row: Tensor,
    layout: str,
    grid: Sequence[int],
    prefix: int,
    training: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of the activation and of the layer's input, with the mask of the forward.

    A regularizer that multiplies by a diagonal matrix (``linear``) is applied to the gradient.
    Others are run a second time, with gradients; `x` is given for these only.
    """
    nothing = grad.new_empty(0) if layer_input is None else torch.zeros_like(layer_input)
    active, *values = row.tolist()
    if not active:
        return _new(grad, grad), nothing
    site: Site | None = find(handle)
    if site is None:
        raise RuntimeError(
            "the attachment was removed and deleted between a compiled forward and its backward: "
            "call backward before attached.remove()"
        )
    form = _view(layout, grid, prefix)
    rates = dict(zip(site.values, values, strict=False))
    draws = site.kept_draws.pop(int(seed), None) or []
    with _seeded(int(seed), grad.device), reusing(draws):
        if x is None:
            y, *_ = perform(site, grad, form, rates, Call(None, training))
            return _new(y, grad), nothing
        with _autograd():
            inputs = [t.detach().requires_grad_() for t in (x, layer_input) if t is not None]
            y, *_ = perform(site, inputs[0], form, rates, Call(inputs[-1], training))
            found = torch.autograd.grad(y, inputs, grad, allow_unused=True)
    grads = [torch.zeros_like(t.detach()) for t in inputs]
    for to, each in zip(grads, found, strict=True):
        if each is not None:
            to.copy_(each)
    return grads[0], (nothing if layer_input is None else grads[1])


@define_operator(
    "begin",
    # it "changes" the handle, or the compiler would leave it out or move it into the backward
    "(Tensor(a!) handle, bool training, int n_rates) -> Tensor",
    fake=lambda handle, training, n_rates: _empty_row(n_rates),
)
def begin_op(handle: Tensor, training: bool, n_rates: int) -> Tensor:
    """Count a forward in which nothing is done to the activation.

    Return a row of float64 numbers: that of the handle, and the rates if `n_rates` is not 0. The
    backward holds this row, because autograd refuses tensors that were changed after saving.
    """
    site: Site | None = find(handle)
    if site is None:
        return torch.zeros(1 + n_rates, dtype=torch.float64)
    site.note_call(training)
    return _row(float(handle), site)[: 1 + n_rates].clone()


@define_operator(
    "gradient",
    f"(Tensor grad, Tensor row, {_VIEW}) -> Tensor",
    fake=lambda grad, *given: torch.empty_like(grad),
)
def gradient_op(grad: Tensor, row: Tensor, layout: str, grid: Sequence[int], prefix: int) -> Tensor:
    """Regularize the gradient of an activation and count it; `row` is that of ``begin``."""
    number, *rates = row.tolist()
    site: Site | None = find(number)
    if site is None:
        return _new(grad, grad)
    values = dict(zip(site.values, rates, strict=False))
    return _new(regularize_grad(site, _view(layout, grid, prefix), values, grad), grad)


def _empty_row(n_rates: int) -> Tensor:
    return torch.empty(1 + n_rates, dtype=torch.float64, device="cpu")


def _row(first: float, site: Site) -> Tensor:
    """The rates of a site behind another number."""
    return torch.tensor([first, *site.values.values()], dtype=torch.float64, device="cpu")


def _new(y: Tensor, x: Tensor) -> Tensor:
    """`y` as a new tensor with the dtype and the strides of ``torch.empty_like(x)``."""
    strides = torch.empty_like(x, device="meta").stride()
    aliased = torch._C._is_alias_of(y, x)  # type: ignore[attr-defined]  # torch's
    fits = not aliased and y.dtype == x.dtype and y.stride() == strides
    return y.detach() if fits else torch.empty_like(x).copy_(y.detach())


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and of a device within a ``with`` block."""
    generators = [torch.default_generator]
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        at = module.current_device() if device.index is None else device.index
        generators.append(module.default_generators[at])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
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
