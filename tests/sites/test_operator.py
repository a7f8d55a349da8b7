"""The operators of sites are what torch expects of operators."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dropblock_hooks import (
    ClampGrad,
    DropBlock2d,
    Dropout2d,
    Foreign,
    GaussianNoise,
    Regularizer,
    StochasticDepth,
    attach,
)
from tests.cases import rest_slow

LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "NHWC view": lambda x: x.permute(0, 2, 3, 1),
    "expanded": lambda x: x[:, :1].expand(-1, 4, -1, -1),
}
TYPES = [torch.float32, torch.float16]
REGULARIZERS = {
    "DropBlock2d": DropBlock2d(0.3, 3),
    "Dropout2d": Dropout2d(0.3),
    "at rate 0": Dropout2d(0.0),
    "GaussianNoise": GaussianNoise(0.1),
    "StochasticDepth": StochasticDepth(0.5),
}

ALL = list(itertools.product(REGULARIZERS, LAYOUTS))
SOME = [(name, layout) for name, layout in ALL if name == "DropBlock2d" or layout == "NHWC view"]


def activation(layout, dtype):
    torch.manual_seed(0)
    return LAYOUTS[layout](torch.randn(2, 4, 6, 6)).to(dtype)


def read(layout):
    """How the operators are told to read the axes."""
    return "NHWC" if layout == "NHWC view" else "NCHW", [], 0


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", rest_slow(TYPES), ids=str)
@pytest.mark.parametrize(("name", "layout"), rest_slow(ALL, SOME))
def test_the_operators_of_activations_pass_torchs_check(name, layout, dtype):
    regularizer = REGULARIZERS[name]
    (site,) = attach(nn.Sequential(nn.Identity()), {"0": regularizer}).sites
    x, seed = activation(layout, dtype), torch.tensor(7)
    ops, linear = torch.ops.dropblock_hooks, regularizer.linear
    layer_input = x * 2 if regularizer.needs_input else None
    for given in (x, x.detach().requires_grad_()):
        torch.library.opcheck(
            ops.regularize.default,
            (given, layer_input, site._live.handle, seed, *read(layout), True, linear, 1),
        )
    y, row = ops.regularize(x, layer_input, site._live.handle, seed, *read(layout), True, linear, 1)
    assert y.stride() == torch.empty_like(x).stride()
    assert row.tolist() == [site._live.handle, site.rate]
    saved = (None, None) if linear else (x, layer_input)
    torch.library.opcheck(
        ops.regularize_gradients.default,
        (torch.ones_like(y), *saved, seed, row, *read(layout)),
    )


@pytest.mark.parametrize("dtype", rest_slow(TYPES), ids=str)
@pytest.mark.parametrize("layout", rest_slow(LAYOUTS, ["contiguous", "NHWC view"]))
def test_the_operators_of_gradients_pass_torchs_check(layout, dtype):
    (site,) = attach(nn.Sequential(nn.Identity()), {"0": ClampGrad(-0.1, 0.1)}).sites
    ops = torch.ops.dropblock_hooks
    torch.library.opcheck(ops.note.default, (site._live.handle, True))
    x = activation(layout, dtype)
    given = (None, site._live.handle, None, *read(layout), True, True, 2)
    torch.library.opcheck(ops.regularize.default, (x.detach().requires_grad_(), *given))
    y, row = ops.regularize(x, *given)
    assert torch.equal(y, x)
    assert row[1:].tolist() == [-0.1, 0.1]
    torch.library.opcheck(
        ops.regularize_gradients.default, (x, None, None, None, row, *read(layout))
    )


@dataclass(frozen=True, repr=False)
class Turns(Regularizer):
    """Returns a tensor of other strides and of another type, or the same tensor."""

    same: bool = False

    def apply(self, x, now):
        return (x if self.same else x.mT.contiguous().mT.double() * 2), None


@pytest.mark.parametrize("same", rest_slow([False, True]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_an_apply_returns_gets_the_strides_and_the_type_of_the_activation(layout, same):
    (site,) = attach(nn.Sequential(nn.Identity()), {"0": Turns(same)}).sites
    x = activation(layout, torch.float32).requires_grad_()
    given = (x, None, site._live.handle, torch.tensor(7), *read(layout), True, False, 0)
    torch.library.opcheck(torch.ops.dropblock_hooks.regularize.default, given)
    y, _ = torch.ops.dropblock_hooks.regularize(*given)
    assert torch.equal(y, x if same else 2 * x)


@pytest.mark.parametrize("name", REGULARIZERS)
def test_the_backward_is_that_of_the_forward(name):
    """Against autograd through the same regularizer with the same random numbers."""
    regularizer = REGULARIZERS[name]
    model = nn.Sequential(nn.Identity())
    (site,) = attach(model, {"0": regularizer}).sites
    x = activation("contiguous", torch.float64).requires_grad_()
    layer_input = (x.detach() * 2).requires_grad_() if regularizer.needs_input else None
    y, _ = torch.ops.dropblock_hooks.regularize(
        x,
        layer_input,
        site._live.handle,
        torch.tensor(3),
        "NCHW",
        [],
        0,
        True,
        regularizer.linear,
        1,
    )
    grad = torch.randn_like(y)
    y.backward(grad)
    torch.manual_seed(3)
    plain = x.detach().requires_grad_()
    given = None if layer_input is None else layer_input.detach().requires_grad_()
    model[0].forward = lambda _: plain
    wanted = model(given if given is not None else plain)
    wanted.backward(grad)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(x.grad, plain.grad)
    if given is not None:
        torch.testing.assert_close(layer_input.grad, given.grad)


FORMATS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "expanded": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "transposed": lambda x: x.transpose(2, 3),
    "every second": lambda x: x.repeat(1, 1, 1, 2)[..., ::2],
}


@pytest.mark.parametrize("name", ["StochasticDepth", "Turns", "at rate 0", "DropBlock2d"])
@pytest.mark.parametrize(("of_x", "of_grad"), list(itertools.product(FORMATS, FORMATS)))
def test_each_pair_of_formats_gets_the_strides_that_are_promised(name, of_x, of_grad):
    """Inductor may choose other formats for an activation than for its gradient."""
    regularizer = Turns() if name == "Turns" else REGULARIZERS[name]
    (site,) = attach(nn.Sequential(nn.Identity()), {"0": regularizer}).sites
    x = FORMATS[of_x](torch.randn(2, 4, 6, 6))
    grad = FORMATS[of_grad](torch.randn(2, 4, 6, 6))
    read, seed, rates = ("NCHW", [], 0), torch.tensor(7), len(regularizer.rates)
    linear, ops = regularizer.linear, torch.ops.dropblock_hooks
    of_forward = (x, grad, site._live.handle, seed, *read, True, linear, rates)
    _, row = ops.regularize(*of_forward)
    calls = [(ops.regularize, of_forward)]
    saved = [(None, None)] if linear else [(x, grad), (x, None)]
    calls += [(ops.regularize_gradients, (grad, *each, seed, row, *read)) for each in saved]
    for operator, given in calls:
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in given]
            promised = operator(*fakes)
        made = operator(*given)
        assert [(y.shape, y.stride(), y.dtype) for y in made] == [
            (y.shape, y.stride(), y.dtype) for y in promised
        ]


class AddsNoise(Regularizer):
    """Not linear, so that the backward runs it again."""

    def apply(self, x, now):
        return x + torch.rand_like(x), None


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("regularizer", [AddsNoise(), Foreign(nn.Dropout, p=0.2)], ids=repr)
def test_a_layer_whose_input_are_integers(regularizer, backend):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    attached = attach(model, {"0": regularizer})
    y = torch.compile(model, backend=backend)(torch.randint(0, 20, (3, 5)))
    y.logsumexp(-1).mean().backward()
    assert model[0].weight.grad.isfinite().all()
    assert attached.verify() == []


class NeedsInput(Regularizer):
    needs_input = True

    def apply(self, x, now):
        return x * (now.input != 0)[..., None], None


def test_a_regularizer_may_read_an_input_of_integers():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Embedding(20, 8))
    attach(model, {"0": NeedsInput()})
    ids = torch.tensor([[0, 3], [5, 0]])
    torch.compile(model, backend="aot_eager")(ids).sum().backward()
    used = model[0].weight.grad.abs().sum(1).nonzero().flatten()
    assert used.tolist() == [3, 5]


@dataclass(frozen=True, repr=False)
class ScaledByInput(Regularizer):
    """Multiplies the output of a layer by the mean of its input."""

    linear = True
    needs_input = True
    random = False

    def apply(self, x, now):
        return x * now.input.mean(), None


def test_a_linear_class_may_need_the_input_of_its_layer():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    attach(model, {"1": ScaledByInput()})
    torch._dynamo.reset()
    results = []
    for call in (model, torch.compile(model, backend="aot_eager")):
        x = torch.arange(12.0).view(4, 3).requires_grad_()
        y = call(x)
        y.square().sum().backward()
        results.append((y, x.grad))
    (y, grad), (y_compiled, grad_compiled) = results
    torch.testing.assert_close(y_compiled, y)
    torch.testing.assert_close(grad_compiled, grad)


@pytest.mark.slow
@pytest.mark.parametrize("regularizer", [Turns(), Foreign(nn.Dropout, p=0.2)], ids=repr)
def test_inductor_may_choose_another_format_for_the_gradient(regularizer):
    torch._dynamo.reset()
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1), nn.Softplus(), nn.GroupNorm(1, 4), nn.Conv2d(4, 4, 3)
    )
    attached = attach(model, {"1": regularizer})
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    torch.compile(model, backend="inductor")(x).square().sum().backward()
    assert x.grad.isfinite().all()
    assert attached.verify() == []
