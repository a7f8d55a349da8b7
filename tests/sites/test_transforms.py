"""``torch.func``: functional calls, gradients of functions, vectorized maps."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from dropblock_hooks import (
    ActivationStats,
    Capture,
    ClampGrad,
    ClipGradNorm,
    Dropout,
    Dropout2d,
    GradientStats,
    ScaleGrad,
    Watchdog,
    ZeroGrad,
    attach,
)
from tests.stacks import ACTIVATIONS, GRADIENT_SITES, GRADIENTS, make_net, put_on, regularizers

# torch's own use of what it has deprecated, in its forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")


def loss_of(net):
    def loss(parameters, x):
        return functional_call(net, parameters, (x,)).square().sum()

    return loss


def detached(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("regularizer", regularizers().values(), ids=regularizers())
def test_the_gradient_of_a_function_is_that_of_the_backward(regularizer):
    net = make_net(regularizer)
    attached = put_on(net, regularizer)
    x = net.example()
    torch.manual_seed(2)
    net(x).square().sum().backward()
    torch.manual_seed(2)
    found = grad(loss_of(net))(detached(net), x)
    for name, p in net.named_parameters():
        assert torch.allclose(found[name], p.grad, rtol=1e-5, atol=1e-7), name
    assert attached.sites[0].calls == 2
    net.zero_grad()
    net(x).square().sum().backward()
    assert attached.sites[0].active_calls == 3, "the parameters themselves are hooked again"


@pytest.mark.parametrize(("name", "selector"), GRADIENT_SITES)
def test_gradients_by_sample(name, selector):
    """Each sample is a batch of its own: as a loop over the samples."""
    if name == "ClipGradNorm" and selector == "body.0":
        regularizer = ClipGradNorm(1e-2, per="sample")
    else:
        regularizer = GRADIENTS[name]
    net = make_net(regularizer)
    attach(net, {selector: regularizer})
    x = net.example()[:, None]
    function = grad(loss_of(net))
    together = vmap(function, (None, 0), randomness="different")(detached(net), x)
    if not regularizer.random:
        for i, sample in enumerate(x):
            alone = function(detached(net), sample)
            for key, wanted in alone.items():
                assert torch.allclose(together[key][i], wanted, rtol=1e-4, atol=1e-6), key
    assert all(torch.isfinite(g).all() for g in together.values())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_masks_of_a_vectorized_map(name):
    net = make_net(ACTIVATIONS[name])
    put_on(net, ACTIVATIONS[name])
    x = torch.stack([net.example(batch=8)] * 3)
    different, same = (vmap(net, randomness=r)(x) for r in ("different", "same"))
    assert not torch.equal(different[0], different[1]) or not torch.equal(*different[1:])
    assert torch.equal(same[0], same[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(net)(x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_forward_mode_and_reverse_mode_agree(name):
    net = make_net(ACTIVATIONS[name])
    put_on(net, ACTIVATIONS[name])
    x = net.example()
    torch.manual_seed(1)
    _, tangent = jvp(lambda x: net(x).sum(), (x,), (torch.ones_like(x),))
    torch.manual_seed(1)
    assert torch.allclose(jacrev(lambda x: net(x).sum())(x).sum(), tangent, rtol=1e-3, atol=1e-4)


def test_forward_mode_passes_gradient_regularizers_by():
    """There is no gradient that goes backward: a tangent is none."""
    model = nn.Sequential(nn.Linear(3, 3))
    x = torch.randn(2, 3)
    bare = jvp(model, (x,), (x,))[1]
    with attach(model, {"0": ZeroGrad()}):
        assert torch.equal(jvp(model, (x,), (x,))[1], bare)


def test_a_frozen_function_of_hooked_parameters():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    attach(model, {"param:0.weight": [ClampGrad(-1e-3, 1e-3), ScaleGrad(2.0)], "1": Dropout(0.0)})
    found = grad(loss_of(model))(detached(model), torch.randn(4, 3))
    assert found["0.weight"].abs().max() == pytest.approx(2e-3)
    model(torch.randn(4, 3)).square().sum().backward()
    assert model[0].weight.grad.abs().max() == pytest.approx(2e-3)


def test_parameters_that_stand_in_for_one_call_do_not_take_the_hook_along():
    """A mean teacher: the student's forward, the teacher's with its own weights, the backward."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    attach(model, {"param:1.weight": ClampGrad(-1e-3, 1e-3)})
    teacher = {name: p.detach().clone() for name, p in model.named_parameters()}
    for grad_enabled in (False, True):
        model.zero_grad()
        loss = model(torch.full((2, 3), 100.0)).square().sum()
        with torch.set_grad_enabled(grad_enabled):
            torch.func.functional_call(model, teacher, torch.ones(2, 3))
        loss.backward()
        assert 0 < model[1].weight.grad.abs().max() <= 1e-3


def by_samples(model, x):
    return sum(model(sample) for sample in x)


VECTORIZED = {
    "backward of vmap": lambda model, x: backward(model, vmap(model)(x)),
    "grad of vmap": lambda model, x: grad(lambda p: vmap(call(model, p))(x).sum())(detached(model)),
    "vmap of grad": lambda model, x: {
        name: g.sum(0)
        for name, g in vmap(grad(lambda p, x: call(model, p)(x)), (None, 0))(
            detached(model), x
        ).items()
    },
    "vjp of vmap": lambda model, x: torch.func.vjp(
        lambda p: vmap(call(model, p))(x).sum(), detached(model)
    )[1](torch.tensor(1.0))[0],
    "jacrev of vmap": lambda model, x: jacrev(lambda p: vmap(call(model, p))(x).sum())(
        detached(model)
    ),
    "vmap in vmap": lambda model, x: backward(model, vmap(vmap(model))(x[:, None])),
    "backward of vmap, batched": lambda model, x: dict(
        zip(
            detached(model),
            [
                g[0]
                for g in torch.autograd.grad(
                    vmap(model)(x).sum(),
                    list(model.parameters()),
                    torch.ones(1),
                    is_grads_batched=True,
                )
            ],
            strict=True,
        )
    ),
}


def call(model, parameters):
    return lambda x: functional_call(model, parameters, (x,))


def backward(model, y):
    model.zero_grad()
    y.sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def summed():
    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))

        def forward(self, x):
            return self.layers(x).square().sum()

    return Summed()


@pytest.mark.parametrize("at", ["output", "input"])
@pytest.mark.parametrize("how", VECTORIZED)
def test_each_sample_of_a_vectorized_map_has_a_gradient_of_its_own(how, at):
    spec = [ScaleGrad(-10.0, at=at), ClipGradNorm(0.5, at=at), ClampGrad(-0.3, 0.3, at=at)]
    model, x = summed(), torch.randn(5, 3)
    bare = backward(model, by_samples(model, x))
    attached = attach(model, {"layers.2": spec})
    wanted = backward(model, by_samples(model, x))
    assert not torch.allclose(wanted["layers.0.weight"], bare["layers.0.weight"])
    found = VECTORIZED[how](model, x)
    for name, each in wanted.items():
        assert torch.allclose(found[name], each, rtol=1e-4, atol=1e-6), name
    assert {site.active_calls for site in attached} == {6}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["backward of vmap", "grad of vmap", "vmap of grad"])
def test_compiled_a_transform_breaks_the_graph_or_is_refused(how):
    model, x = summed(), torch.randn(5, 3)
    attach(model, {"layers.2": [ScaleGrad(-10.0), ClampGrad(-0.3, 0.3)]})
    wanted = backward(model, by_samples(model, x))
    for fullgraph in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x: VECTORIZED[how](model, x) if "grad" in how else vmap(model)(x),
            backend="aot_eager",
            fullgraph=fullgraph,
        )
        if fullgraph:
            with pytest.raises(RuntimeError, match="can't trace what acts on gradients inside"):
                compiled(x)
            continue
        found = compiled(x) if "grad" in how else backward(model, compiled(x))
        for name, each in wanted.items():
            assert torch.allclose(found[name], each, rtol=1e-4, atol=1e-6), name
    torch._dynamo.reset()


def test_the_gradient_of_a_gradient():
    """Forward over reverse and reverse over reverse: as without a transform."""
    model, x = summed(), torch.randn(3)
    attach(model, {"layers.0": [ScaleGrad(-2.0), ClipGradNorm(1e-2)]})
    found = torch.func.hessian(model)(x)
    assert torch.allclose(found, jacrev(jacrev(model))(x), rtol=1e-4, atol=1e-6)
    assert torch.allclose(found, torch.autograd.functional.hessian(model, x), rtol=1e-4, atol=1e-6)


def test_make_fx_with_symbolic_sizes():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.ones(2, 3, 8, 8)
    bare = model(x)
    attach(model, {"0": Dropout2d(0.0)})
    traced = make_fx(model, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    assert torch.equal(traced(x), bare)


def watched_and_plain():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return copy.deepcopy(net), net


@pytest.mark.parametrize("function", [grad, jacrev, hessian])
def test_observers_stand_aside_where_a_part_is_differentiated(function):
    """What the first layer gives is an ordinary tensor, which a transform lets nobody write."""
    everything = [Capture(gradients=True), ActivationStats(), GradientStats(), Watchdog(every=1)]
    plain, watched = watched_and_plain()
    attach(watched, {"*": everything})
    x = torch.randn(5, 3)
    found = []
    for net in (plain, watched):
        fixed = detached(net)
        bias = fixed.pop("2.bias")
        found.append(function(lambda b, n=net, f=fixed: loss_of(n)({**f, "2.bias": b}, x))(bias))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("regularizer", [Watchdog(every=1), ActivationStats(), Dropout(0.1)])
def test_no_look_within_a_transform(regularizer):
    """Where numbers can't be read; also of a layer that is never called."""
    _, watched = watched_and_plain()
    watched.spare = nn.Linear(2, 2)
    watched.forward = lambda x: watched[2](watched[1](watched[0](x)))
    attached = attach(watched, {"spare": regularizer, "0": ActivationStats()})
    found = vmap(grad(loss_of(watched)), (None, 0))(detached(watched), torch.randn(5, 1, 3))
    assert found["0.weight"].shape == (5, 4, 3)
    assert attached.report()[-1].calls == 1
