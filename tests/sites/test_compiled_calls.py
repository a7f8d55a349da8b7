"""A layer that compiled code does not call: the finding names torch.compile, in eager mode not."""

import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import Dropout, attach
from tests.cases import rest_slow


class Skipping(nn.Module):
    """Two blocks, the second of which is called in evaluation mode only, or always."""

    def __init__(self, skips=True):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.skips = skips

    def forward(self, x):
        x = self.first(x)
        return x if self.training and self.skips else self.second(x)


def findings(skips, compiled, validate):
    """The findings after a training forward, and perhaps a validation."""
    torch._dynamo.reset()
    model = Skipping(skips)
    attached = attach(model, {"*": Dropout(0.5)})
    call = torch.compile(model, backend="eager") if compiled else model
    attached.step(0)
    with pytest.warns() if skips else torch.enable_grad():
        call(torch.ones(2, 4))
        call(torch.ones(2, 4))
    if validate:
        model.eval()
        call(torch.ones(2, 4))
    return attached.verify()


@pytest.mark.parametrize("validate", [False, True], ids=["training", "validation"])
def test_torch_compile_is_named(validate):
    (finding,) = findings(skips=True, compiled=True, validate=validate)
    assert finding.sites == ("second/Dropout",)
    assert "torch.compile runs code that does not call it" in finding.text
    assert "torch.compiler.reset()" in finding.cure


@pytest.mark.parametrize("validate", [False, True], ids=["training", "validation"])
def test_eager_mode_names_the_branch_and_not_the_mode_of_the_model(validate):
    (finding,) = findings(skips=True, compiled=False, validate=validate)
    assert "torch.compile" not in str(finding)
    assert "model.train()" not in str(finding)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layer_that_is_called_is_not_reported(compiled):
    assert findings(skips=False, compiled=compiled, validate=True) == []


class Stopping(nn.Module):
    """The second layer is called in some forwards only; the last one twice in each."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.calls_second = True

    def forward(self, x):
        x = self.first(x)
        if self.calls_second:
            x = self.second(x)
        return self.last(self.last(x))


def train_with_stops(compiled, calls_second):
    """One epoch; the attachment, the findings, and what is told when the epoch ends."""
    torch._dynamo.reset()
    model = Stopping()
    attached = attach(model, {"*": Dropout(0.5)})
    call = torch.compile(model, backend="eager") if compiled else model
    attached.step(0)
    for calls in calls_second:
        model.calls_second = calls
        call(torch.ones(2, 4))
    findings = attached.verify()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        attached.step(1)
    return findings, [str(warning.message) for warning in told]


STOPS = [True] + 29 * [False]


def test_a_layer_that_compiled_code_stops_to_call_is_reported():
    findings, told = train_with_stops(compiled=True, calls_second=STOPS)
    (finding,) = findings
    assert finding.sites == ("second/Dropout",)
    assert "called in 1 training forward and others in 30: torch.compile runs" in finding.text
    assert len(told) == 1
    assert "torch.compiler.reset()" in told[0]


@pytest.mark.parametrize(
    ("compiled", "calls_second"),
    rest_slow(
        [(False, STOPS), (True, 30 * [True]), (True, 15 * [True, False]), (True, STOPS[:10])], 2
    ),
    ids=["eager", "called", "chosen", "few forwards"],
)
def test_other_layers_are_silent(compiled, calls_second):
    findings, told = train_with_stops(compiled, calls_second)
    assert findings == []
    assert told == []


def test_a_layer_that_is_put_into_evaluation_mode_is_silent():
    torch._dynamo.reset()
    model = Stopping()
    attached = attach(model, {"*": Dropout(0.5)})
    call = torch.compile(model, backend="eager")
    attached.step(0)
    for step in range(30):
        if step == 1:
            model.second.eval()
        call(torch.ones(2, 4))
    assert attached.verify() == []
