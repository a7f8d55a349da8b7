"""A Watchdog names the same layer in eager and in compiled code, in whatever order the spec is."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from torch import nn

from dropblock_hooks import ScaleGrad, Watchdog, attach, attachments
from tests.cases import rest_slow

LAYERS = ["0", "1", "1.0", "1.1", "2"]
ORDERS = {
    "model": LAYERS,
    "reversed": LAYERS[::-1],
    "inner first": ["1.1", "2", "1.0", "0", "1"],
    "last first": ["2", "1", "1.0", "0", "1.1"],
}


class Spoils(nn.Module):
    def forward(self, x):
        return x * math.nan


def made(in_gradient):
    torch.manual_seed(0)
    inner = nn.Identity() if in_gradient else Spoils()
    block = nn.Sequential(nn.Linear(4, 4), inner)
    return nn.Sequential(nn.Linear(4, 4), block, nn.Linear(4, 2))


def spec(order):
    return [(name, Watchdog("nonfinite", every=None)) for name in order]


def named(model, compiled, in_gradient, attached):
    """The layer that the Watchdog names after one step."""
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager") if compiled else model
    y = call(torch.ones(2, 4))
    (y * (math.nan if in_gradient else 1.0)).sum().backward()
    (finding,) = attached.alerts
    return finding.layer


@pytest.mark.parametrize("in_gradient", rest_slow([False, True]), ids=["forward", "backward"])
@pytest.mark.parametrize("order", rest_slow(ORDERS.values()), ids=ORDERS)
def test_eager_and_compiled_code_name_the_same_layer(order, in_gradient):
    names = []
    for compiled in (False, True):
        model = made(in_gradient)
        attached = attach(model, spec(order))
        names.append(named(model, compiled, in_gradient, attached))
        attached.remove()
    assert names == (["2", "2"] if in_gradient else ["1.1", "1.1"])


def pickled(model):
    return pickle.loads(pickle.dumps(model))


COPIES = [*itertools.product([copy.deepcopy, pickled], [False, True])]
COPIES_SOON = [(copy.deepcopy, False), (pickled, True)]


@pytest.mark.parametrize(("copied", "in_gradient"), rest_slow(COPIES, COPIES_SOON))
def test_copies_do_as_well(copied, in_gradient):
    model = made(in_gradient)
    original = attach(model, spec(["2", "1.1", "0"]))
    twin = copied(model)
    original.remove()
    (attached,) = attachments(twin)
    layer = named(twin, True, in_gradient, attached)
    assert layer == ("2" if in_gradient else "1.1")
    attached.remove()


def test_a_layer_has_the_same_number_below_a_wrapper_and_under_another_name():
    model = made(in_gradient=True)
    model.append(model[0])
    wrapped = nn.Sequential(torch.compile(model[0]), *model[1:3])
    selectors = "2", "param:1.0.weight"
    of_sites = []
    for built in (model, wrapped):
        attached = attach(built, [(selector, ScaleGrad(0.5)) for selector in selectors])
        of_sites.append([site.layer_number for site in attached._sites])
        attached.remove()
    assert of_sites == [[5, 3], [5, 3]]
