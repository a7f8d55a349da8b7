"""Probabilities near 0 and 1: wanted at the output of a model, a fault inside it."""

import pytest
import torch
from torch import nn

from dropblock_hooks import watch
from tests.cases import rest_slow


class Classifier(nn.Module):
    """A classifier that is sure of its answers, with a sigmoid inside it on request."""

    def __init__(self, inside):
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.act = nn.Sigmoid() if inside else nn.ReLU()
        self.last = nn.Linear(16, 1)
        self.output = nn.Sigmoid()
        with torch.no_grad():
            self.first.weight.mul_(1000 if inside else 1)
            self.last.weight.mul_(1 if inside else 1000)

    def forward(self, x):
        return self.output(self.last(self.act(self.first(x))))


def found(inside, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Classifier(inside)
    findings = []
    with watch(model, "saturated", action=findings.append, every=20) as attached:
        call = torch.compile(model, backend="aot_eager") if compiled else model
        attached.step(0)
        for _ in range(40):
            call(torch.randn(32, 4)).mean().backward()
        attached.step(1)
    return [(finding.kind.value, finding.layer) for finding in findings]


@pytest.mark.parametrize("compiled", rest_slow([False, True]), ids=["eager", "compiled"])
def test_a_classifier_may_be_sure(compiled):
    assert found(inside=False, compiled=compiled) == []


@pytest.mark.parametrize("compiled", rest_slow([False, True]), ids=["eager", "compiled"])
def test_a_saturated_layer_inside_is_reported(compiled):
    assert found(inside=True, compiled=compiled) == [("saturated", "act")]
