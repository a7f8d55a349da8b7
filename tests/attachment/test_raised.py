"""A forward that raised an error is no forward in evaluation mode, and has not left out a layer.

The generator crosses the place of the error with the question that comes after it.
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ClipGradNorm,
    DropBlock2d,
    Dropout,
    HookWarning,
    Probability,
    Regularizer,
    attach,
)
from tests.told import ids, told

X = torch.ones(2, 4)
RAISED = (".", "not_run")
WRONG = ("evaluation mode", "never called", "no gradient", "was not trained")


class Failing(nn.Module):
    """A layer whose forward raises an error, if it has one."""

    error: type[BaseException] | None = None

    def forward(self, x):
        if self.error is not None:
            raise self.error("mine")
        return x


@dataclass(frozen=True)
class FailingDropout(Regularizer):
    """A regularizer whose `apply` raises an error, if there is one."""

    p: Probability = 0.1
    error: ClassVar[type[BaseException] | None] = None

    def apply(self, x, now):
        if self.error is not None:
            raise self.error("mine")
        return x, None


def model_of(**places):
    """A model with a failing layer before, between and behind two layers with sites."""
    model = nn.Sequential(Failing(), nn.Linear(4, 4), Failing(), nn.Linear(4, 4), Failing())
    for place, error in places.items():
        model[{"before": 0, "between": 2, "behind": 4}[place]].error = error
    return model


class FailingOutput(FailingDropout):
    """The same at the model itself, whose forward then has come to its end."""


SPEC = {
    "type:Linear": [Dropout(0.1), ClipGradNorm(1.0)],
    "param:*.weight": ClipGradNorm(1.0),
    "3": FailingDropout(),
    ".": FailingOutput(),
}


SITES = {"site": FailingDropout, "output": FailingOutput}


def failing_forward(place, error, monkeypatch):
    """The model, its attachment, and a function that makes it fail."""
    if place in SITES:
        monkeypatch.setattr(SITES[place], "error", error)
        return attach_all(model_of())
    return attach_all(model_of(**{place: error}))


def attach_all(model):
    attached = attach(model, SPEC)
    attached.step(0)
    return model, attached


def asked_by_verify(attached):
    found = attached.verify()
    assert ids(found) == [RAISED]
    return found


def asked_by_step(attached):
    with pytest.warns(HookWarning) as caught:
        attached.step(1)
    (warning,) = caught
    assert told(caught) == ids(asked_by_verify(attached))  # verify asks about the closed epoch
    return warning.message.findings


def asked_by_remove(attached):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attached.remove()
    return [finding for warning in caught for finding in warning.message.findings]


ASKED = [asked_by_verify, asked_by_step, asked_by_remove]


@pytest.mark.parametrize("ask", ASKED)
@pytest.mark.parametrize("place", ["before", "between", "site", "behind", "output"])
@pytest.mark.parametrize("error", [ValueError, RuntimeError, OSError])
def test_nothing_wrong_is_said_after_an_error(place, error, ask, monkeypatch):
    model, attached = failing_forward(place, error, monkeypatch)
    with pytest.raises(error, match="mine"):
        model(X)
    text = " ".join(map(str, ask(attached)))
    assert [part for part in WRONG if part in text] == []


def test_a_hook_of_the_model_that_raises_an_error_each_time_but_the_first():
    """torch then hands the output of the forward to the hooks that it still calls."""
    model = model_of()
    calls = []

    def of_user(module, inputs, output):
        calls.append(output)
        if len(calls) > 1:
            raise ValueError("mine")

    model.register_forward_hook(of_user)
    attached = attach(model, {"1": Dropout(0.1)})
    model(X)
    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            model(X)
    counter = attached._run.counter
    assert (counter.trained, counter.failed) == (1, 2)


def test_a_class_that_does_not_fit_its_layer():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    attached = attach(model, {"1": DropBlock2d(0.1)})
    with pytest.raises(ValueError, match="needs a 4-D tensor"):
        model(X)
    assert ids(attached.verify()) == [RAISED]
    attached.remove()
    assert not model._forward_hooks_always_called


def test_an_evaluation_before_the_error_is_not_blamed():
    model, attached = attach_all(model_of(behind=None))
    model.eval()(X)
    model.train()[4].error = ValueError
    with pytest.raises(ValueError, match="mine"):
        model(X)
    assert ids(attached.verify()) == [RAISED]


def test_an_error_in_evaluation_mode_is_one():
    model, attached = attach_all(model_of(behind=ValueError))
    with pytest.raises(ValueError, match="mine"):
        model.eval()(X)
    assert ("1/Dropout", "never_active") in ids(attached.verify())
    assert RAISED not in ids(attached.verify())


def test_a_later_forward_that_ends_is_judged():
    model, attached = attach_all(model_of(behind=ValueError))
    with pytest.raises(ValueError, match="mine"):
        model(X)
    model[4].error = None
    model(X).sum().backward()
    assert attached.verify() == []
    attached.step(1)


def test_a_call_of_a_layer_alone():
    """The model itself was not called, so only the counts of the site show the error."""
    model = nn.Sequential(nn.Linear(4, 4))
    attached = attach(model, {"0": DropBlock2d(0.1)})
    with pytest.raises(ValueError, match="needs a 4-D tensor"):
        model[0](X)
    (finding,) = attached.verify()
    assert "was called 1 time and never active: each of its calls" in finding.text


def training(attached, model, error, ends):
    """An epoch whose second batch is interrupted, with `remove` in a place that always runs."""
    if ends == "with":
        with attached:
            interrupted(model, error)
        return
    try:
        interrupted(model, error)
    except BaseException:
        if ends == "except":
            attached.remove()
        raise
    finally:
        attached.remove()


def interrupted(model, error):
    model[2].error = error
    model(X)


@pytest.mark.parametrize("ends", ["with", "finally", "except"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_error_that_ends_the_training_is_no_fault_of_its_last_epoch(error, ends):
    model, attached = attach_all(model_of())
    with pytest.raises(error):
        training(attached, model, error, ends)  # a warning would be an error here


def test_a_backward_that_raises_an_error():
    model, attached = attach_all(model_of())
    model[3].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), attached:
        model(X).sum().backward()


def test_an_error_of_the_data():
    _, attached = attach_all(model_of())
    with pytest.raises(OSError, match="disk"), attached:
        raise OSError("disk")


class ReturnsNothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        self.layer(x)


def test_a_model_without_output_that_is_trained_while_an_error_is_handled():
    model = ReturnsNothing()
    attached = attach(model, {"layer": Dropout(0.1)})
    try:
        raise MemoryError
    except MemoryError:
        model(X)
    assert attached.verify() == []
    assert attached._run.counter.trained == 1
