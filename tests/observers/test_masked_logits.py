"""Layers that return -Inf on purpose: no fault alone, and the cause where NaN follows."""

import math

import pytest
import torch
from torch import nn

from dropblock_hooks import watch
from tests.cases import rest_slow
from tests.observers.faulty import Code

MASK = torch.tensor([False, False, True, False])


class Policy(nn.Module):
    """A head that masks one action by -Inf."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(x).masked_fill(MASK, -math.inf)


def train(model, compiled=False, steps=12, loss=nn.functional.cross_entropy):
    """The findings of a training."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    found = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, action=found.append, every=1) as attached:
        call = torch.compile(model, backend="aot_eager") if compiled else model
        for _ in range(steps):
            attached.step()
            optimizer.zero_grad()
            x = torch.randn(16, 8, dtype=next(model.parameters()).dtype)
            loss(call(x), torch.zeros(16, dtype=torch.long)).backward()
            optimizer.step()
    return found


@pytest.mark.parametrize("compiled", rest_slow([False, True]), ids=["eager", "compiled"])
def test_masked_logits_are_no_fault(compiled):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Policy())
    assert train(model, compiled) == []


@pytest.mark.parametrize("compiled", rest_slow([False, True]), ids=["eager", "compiled"])
def test_nan_of_another_layer_is_not_blamed_on_the_mask(compiled):
    model = nn.Sequential(
        Policy(), nn.Softmax(-1), nn.Linear(4, 8), Code(lambda x: (x - x.max()).sqrt()), Policy()
    )
    assert train(model, compiled)[0].layer == "3"


@pytest.mark.parametrize("compiled", rest_slow([False, True]), ids=["eager", "compiled"])
def test_minus_inf_is_the_cause_where_nan_follows(compiled):
    log_of_zero = Code(lambda x: x.relu().log())
    model = nn.Sequential(nn.Linear(8, 8), log_of_zero, nn.Linear(8, 4))
    assert train(model, compiled)[0].layer == "1"


def test_minus_inf_is_named_where_the_backward_is_not_finite():
    model = nn.Sequential(nn.Linear(8, 8), Policy())
    finding = train(model, loss=lambda y, target: y.square().sum())[0]
    assert finding.layer == "1"
    assert "-Inf in masked logits" in finding.cure


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("compiled", rest_slow([False, True]), ids=["eager", "compiled"])
def test_a_large_number_is_finite_although_its_square_overflows(compiled, dtype):
    largest = torch.finfo(dtype).max
    with_largest = Code(lambda x: x.masked_fill(x > 0, largest))
    model = nn.Sequential(nn.Linear(8, 8), with_largest, nn.Tanh()).to(dtype)
    assert train(model, compiled) == []


def test_plus_inf_is_a_fault_alone():
    model = nn.Sequential(
        nn.Linear(8, 8), Code(lambda x: x.masked_fill(x > 0, math.inf)), nn.Tanh()
    )
    assert train(model)[0].layer == "1"
