"""Forwards and backwards whose counts are no numbers: nothing of theirs is left in the record."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dropblock_hooks import Dropout2d, LinearSchedule, attach
from tests.stacks import make_net, put_on, regularizers


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


RUNS = [on_meta, fake]
OFTEN = ["ClampGrad", "DropBlock2d", "Foreign", "StochasticDepth"]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", OFTEN)
def test_what_can_not_be_counted_leaves_no_trace(name, run):
    regularizer = regularizers()[name]
    net = make_net(regularizer)
    attached = put_on(net, regularizer)
    x = net.example()
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
