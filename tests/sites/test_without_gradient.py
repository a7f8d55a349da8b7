"""Regularizers of gradients where no gradient comes: the finding names the right cause."""

import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import ClipGradNorm, GradientStats, attach


class Net(nn.Module):
    """Two layers; the output of the first is cut off on request."""

    def __init__(self, cut=""):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.cut = cut

    def forward(self, x):
        if self.cut == "no_grad":
            with torch.no_grad():
                return self.second(self.first(x))
        x = self.first(x)
        return self.second(x.detach() if self.cut == "detach" else x)


def finding_of(model, regularizer, compiled):
    torch._dynamo.reset()
    attached = attach(model, {"first": regularizer}, grad_scaler=False)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    for _ in range(2):
        y = call(torch.ones(2, 4))
        if y.requires_grad:
            y.square().sum().backward()
    return attached.verify()


REGULARIZERS = [ClipGradNorm(1.0), GradientStats(every=1)]
MODES = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@MODES
@pytest.mark.parametrize("regularizer", REGULARIZERS, ids=repr)
def test_behind_frozen_layers(regularizer, compiled):
    model = Net()
    model.first.requires_grad_(False)
    (finding,) = finding_of(model, regularizer, compiled)
    assert "nothing in front of the layer is trained" in finding.text
    assert "unfreeze a layer in front of it" in finding.cure


@pytest.mark.parametrize("regularizer", [ClipGradNorm(1.0, at="input")], ids=repr)
def test_at_the_input_of_the_first_layer(regularizer):
    (finding,) = finding_of(Net(), regularizer, compiled=False)
    assert "nothing in front of the layer is trained" in finding.text


@pytest.mark.parametrize("regularizer", REGULARIZERS, ids=repr)
def test_inside_no_grad(regularizer):
    (finding,) = finding_of(Net("no_grad"), regularizer, compiled=False)
    assert "no_grad() around it" in finding.cure


@MODES
@pytest.mark.parametrize("regularizer", REGULARIZERS, ids=repr)
def test_before_a_detach(regularizer, compiled):
    (finding,) = finding_of(Net("detach"), regularizer, compiled)
    assert "no gradient reached it" in finding.text
    assert "Look for a detach()" in finding.cure


@MODES
@pytest.mark.parametrize("regularizer", REGULARIZERS, ids=repr)
def test_where_gradients_come_nothing_is_found(regularizer, compiled):
    assert finding_of(Net(), regularizer, compiled) == []


@pytest.mark.parametrize("backward", [True, False])
def test_a_loop_without_gradients_at_the_end_of_an_epoch(backward):
    """`zero_grad` after each update leaves no gradients that show a backward."""
    model = Net("detach")
    attached = attach(model, {"first": GradientStats()}, grad_scaler=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        for _ in range(2):
            loss = model(torch.ones(2, 4)).square().sum()
            if backward:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            attached.step(epoch + 1)
        texts = [str(warning.message) for warning in caught]
        is_told = any("no gradient reached it" in text for text in texts)
        assert is_told == (backward and epoch == 0), "each fault is told once"
