"""``torch.func``: functional calls and gradients of functions work; vmap and jvp are refused."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

from dropblock_hooks import (
    ClampGrad,
    SiteError,
    attach,
)
from tests.stacks import make_net, put_on, regularizers

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


@pytest.mark.parametrize("name", ["DropBlock2d", "ClampGrad"])
@pytest.mark.parametrize(
    "transform",
    [
        lambda net, x: vmap(net, randomness="different")(x[:, None]),
        lambda net, x: jvp(net, (x,), (x,)),
    ],
    ids=["vmap", "jvp"],
)
def test_vmap_and_jvp_are_refused_in_training(transform, name):
    regularizer = regularizers()[name]
    net = make_net(regularizer)
    attached = put_on(net, regularizer)
    x = net.example()
    with pytest.raises(SiteError, match=rf"{name}.*vmap.*jvp.*eval\(\)"):
        transform(net, x)
    with attached.paused():
        transform(net, x)
    transform(net.eval(), x)


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
