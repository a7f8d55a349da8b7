"""Forwards and backwards whose counts are no numbers: the record holds what came before and after.

Gradients of functions, tensors without data: each may run through an attached
model, and nothing of theirs may be left in what is reported, saved or copied.
"""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad

from dropblock_hooks import Dropout2d, LinearSchedule, attach
from tests.cases import rest_slow
from tests.stacks import make_net, put_on, regularizers

# torch's own use of what it has deprecated, in its forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")


def gradient_of_a_function(net, x):
    grad(lambda x: net(x).square().sum())(x)


def on_meta(net, x):
    net.to("meta")
    net(x.to("meta")).sum().backward()
    net.to_empty(device="cpu")
    for parameter in net.parameters():
        parameter.grad = None
        nn.init.normal_(parameter)


def fake(net, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        net(mode.from_tensor(x)).sum().backward()
    for parameter in net.parameters():
        parameter.grad = None


# torch's vmap, which these take without randomness="different", refuses to draw numbers


def look(attached, net):
    """Everything that reads what was counted."""
    str(attached)
    attached.verify()
    attached.scalars()
    pickle.dumps(net)
    for copied in (copy.deepcopy(net), net):
        copied.zero_grad()
    state = attached.state_dict()
    attached.load_state_dict(state)
    assert attached.state_dict() == state
    sizes = [site.map_size for site in attached]
    assert all(isinstance(edge, int | tuple) for size in sizes for edge in size or ())


RUNS = [gradient_of_a_function, on_meta, fake]
OFTEN = ["ClampGrad", "DropBlock2d", "Foreign", "StochasticDepth"]
NAMES = rest_slow(regularizers(), OFTEN)


@pytest.mark.every(7, plain=2)
@pytest.mark.parametrize("before", rest_slow([True, False]))
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", NAMES)
def test_what_can_not_be_counted_leaves_no_trace(name, run, before):
    regularizer = regularizers()[name]
    net = make_net(regularizer)
    attached = put_on(net, regularizer)
    x = net.example()
    if before:
        net(x).sum().backward()
    run(net, x)
    look(attached, net)
    attached.step(1)
    net(x).sum().backward()
    look(attached, net)
    realized = attached.sites[0].realized_rate
    assert realized is None or 0 <= realized <= 1
    assert attached.sites[0].active_calls >= 1


def test_attached_where_no_tensor_has_data():
    """To a model that is built on meta, and to one whose default device is meta."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 4, 3))
        attached = attach(net, {"0": Dropout2d(LinearSchedule(0.5, 1.0, epochs=2))})
        net(torch.empty(2, 3, 8, 8))
        attached.step(0.5)
        look(attached, net)
    net.to_empty(device="cpu")
    attached.step(1)
    net(torch.ones(2, 3, 8, 8))
    assert attached.sites[0].realized_rate == 1.0
    assert torch.equal(net(torch.ones(2, 3, 8, 8)), torch.zeros(2, 4, 6, 6))
