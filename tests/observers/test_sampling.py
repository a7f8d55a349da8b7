"""Calls that are not measured start no operator of torch."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import ActivationStats, GradientStats, attach


class Operators(TorchDispatchMode):
    """Counts the operators of a block of code."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += 1
        return function(*args, **(kwargs or {}))


class Net(nn.Module):
    """Its layers return views, a leaf, and what works in place."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.flat = nn.Flatten()
        self.head = nn.Linear(64, 2)
        self.leaf = nn.Parameter(torch.ones(3, 2))
        self.same = nn.Identity()

    def forward(self, x):
        y = self.head(self.flat(self.act(self.norm(self.conv(x)))))
        return y + self.same(self.leaf).sum(0)


def images():
    return torch.randn(4, 3, 6, 6)


def operators_of(model):
    """The number of operators in a forward and a backward."""
    model.zero_grad()
    with Operators() as operators:
        model(images()).square().sum().backward()
    return operators.number


STATISTICS = {
    "activations": {"**": ActivationStats(every=3)},
    "gradients": {"**": GradientStats(every=3)},
    "gradients of parameters": {"param:**": GradientStats(every=3)},
    "both": {"**": [ActivationStats(every=3), GradientStats(every=3)]},
}


@pytest.mark.parametrize("which", STATISTICS)
def test_statistics_start_operators_in_each_nth_call_only(which):
    bare = operators_of(Net())
    model = Net()
    attached = attach(model, STATISTICS[which])
    more = [operators_of(model) > bare for _ in range(7)]
    assert more == [True, False, False] * 2 + [True]
    attached.step()
    assert operators_of(model) > bare, "the first call of an epoch is measured"
    assert operators_of(model) == bare
    assert not attached.verify()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_follows_its_forward(reentrant):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    attached = attach(model, {"0": [ActivationStats(every=2), GradientStats(every=2)]})
    for factor in (1.0, 10.0, 100.0):
        x = torch.ones(2, 4, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=reentrant)
        model[0].bias.data.fill_(factor)
        (y.sum() * factor).backward()
    values, gradients = (row.observed for row in attached.report())
    assert (values.calls, gradients.calls) == (2, 2)
    assert gradients.largest == 100.0


def test_code_that_is_compiled_without_being_traced_measures_as_often():
    class Scaler:
        def get_scale(self):
            return 2.0

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    spec = {"*": [ActivationStats(every=2), GradientStats(every=2)]}
    attached = attach(model, spec, grad_scaler=Scaler())
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        run(torch.ones(2, 4)).sum().backward()
    assert not all(site.traced for site in attached)
    assert [row.observed.calls for row in attached.report()] == [2] * 4
