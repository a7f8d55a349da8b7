"""What is told at the end of a training: rates that were always 0, models that never trained."""

import copy
import math
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ByDepth,
    DropBlock2d,
    DropGrad2d,
    Dropout,
    DropPath,
    GaussianNoise,
    GradNoise,
    HookWarning,
    LinearSchedule,
    Retune,
    ScaleGrad,
    StepSchedule,
    StochasticDepth,
    WindowSchedule,
    attach,
    attachments,
    sample,
)
from tests.cases import rest_slow

X = torch.ones(2, 3, 8, 8)
BATCHES = 10


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1), nn.Dropout(0.1))


def train(model, batches=BATCHES):
    for _ in range(batches):
        model(X).square().sum().backward()


def kinds(found):
    return [each.kind for each in found]


def told(caught):
    warned = [each.message for each in caught if isinstance(each.message, HookWarning)]
    return [finding.kind for message in warned for finding in message.findings]


ZERO = {
    "constant": Dropout(0.0),
    "blocks": DropBlock2d(0.0, 3),
    "samples": StochasticDepth(0.0),
    "noise": GaussianNoise(0.0),
    "noise of gradients": GradNoise(0.0),
    "gradients": DropGrad2d(0.0),
    "steps": Dropout(StepSchedule({0: 0.0, 1: 0.0})),
    "window between the steps": Dropout(WindowSchedule(0.1, 0.2, 0.8)),
    "window that is over": Dropout(WindowSchedule(0.1, 1.25, 1.75)),
    "own function": Dropout(lambda t: 0.0),
    "depth": Dropout(ByDepth(0.0, 0.0)),
}
HEALTHY = {
    "constant": Dropout(0.1),
    "ramp": Dropout(LinearSchedule(0.0, 0.1, epochs=3)),
    "late ramp": Dropout(LinearSchedule(0.0, 0.1, epochs=3, delay=50)),
    "late step": DropBlock2d(StepSchedule({0: 0.0, 30: 0.1}), 3),
    "late window": Dropout(WindowSchedule(0.1, 40, 50)),
    "early": Dropout(WindowSchedule(0.1, 0, 1)),
    "no gradient": ScaleGrad(0.0),
    "noise": GaussianNoise(0.1),
    "own function": Dropout(lambda t: 0.1 if t == 1 else 0.0),
}


def epochs(attached, model, n=3):
    for epoch in range(n):
        attached.step(epoch)
        train(model, BATCHES)


@pytest.mark.parametrize("case", ZERO)
def test_a_rate_that_was_always_0(case):
    model = model_of()
    attached = attach(model, {"0": ZERO[case]})
    attached.step(0)
    train(model)
    assert attached.verify() == []
    epochs(attached, model)
    if case != "own function":  # of which nobody knows the future
        assert kinds(attached.verify()) == ["zero_rate"]
    with pytest.warns(HookWarning, match="the rate was 0 in each of") as caught:
        attached.remove()
    assert told(caught) == ["zero_rate"]


@pytest.mark.parametrize("case", HEALTHY)
def test_healthy_rates_are_silent(case):
    model = model_of()
    attached = attach(model, {"0": HEALTHY[case]})
    epochs(attached, model)
    assert attached.verify() == []
    attached.remove()


def test_the_first_layer_of_a_rate_that_rises_with_depth_may_have_0():
    model = model_of()
    attached = attach(model, {"[012]": Dropout(ByDepth(0.0, 0.2))})
    epochs(attached, model)
    assert attached.verify() == []
    attached.remove()


@pytest.mark.parametrize("mode", rest_slow(["eager", "compiled"]))
def test_without_a_step_it_is_told_at_the_end(mode):
    torch._dynamo.reset()
    model = model_of()
    attached = attach(model, {"0": Dropout(0.0)})
    forward = torch.compile(model, backend="aot_eager") if mode == "compiled" else model
    train(forward)
    with pytest.warns(HookWarning, match="the rate was 0"):
        attached.remove()


def test_a_few_calls_are_no_training():
    model = model_of()
    with attach(model, {"0": Dropout(0.0)}):
        train(model, 3)
    with attach(model, {"0": Dropout(0.1)}):
        model.eval()(X)


def test_a_dropout_of_the_model_that_is_switched_off():
    model = model_of()
    with attach(model, {"3": Retune(0.0)}):
        train(model)


@pytest.mark.parametrize("regularizer", [Dropout, GaussianNoise])
def test_a_rate_that_was_above_0_before_a_state_was_saved(regularizer):
    spec = {"0": regularizer(WindowSchedule(0.1, 0, 2))}
    first, model = model_of(), model_of()
    attached = attach(first, spec)
    epochs(attached, first)
    state = attached.state_dict()
    attached.remove()
    resumed = attach(model, spec)
    resumed.load_state_dict(state)
    train(model)
    assert resumed.verify() == []
    resumed.remove()


def test_a_model_that_was_never_in_training_mode():
    model = model_of().eval()
    attached = attach(model, {"0": Dropout(0.1)})
    train(model)
    with pytest.warns(HookWarning, match="10 forwards in evaluation mode") as caught:
        attached.remove()
    assert told(caught) == ["not_trained"]


def paused(model):
    with attach(model, {"0": Dropout(0.1)}) as attached, attached.paused():
        train(model)


def always(model):
    with attach(model, {"0": Dropout(0.1, active="always")}):
        train(model)


def sampled(model):
    with attach(model, {"0": Dropout(0.1)}) as attached, attached.always():
        sample(model, X, n=12)


def trained_before(model):
    with attach(model, {"0": Dropout(0.1)}):
        train(model.train(), 1)
        train(model.eval())


def average_of_weights(model):
    attached = attach(model, {"0": DropPath(0.1)})
    average = copy.deepcopy(model).eval()
    train(average)
    attachments(average)[0].remove()
    train(model.train())
    attached.remove()


def resumed_for_evaluation(model):
    attached = attach(model, {"0": Dropout(0.1)})
    train(model.train())
    state = attached.state_dict()
    attached.remove()
    again = attach(model.eval(), {"0": Dropout(0.1)})
    again.load_state_dict(state)
    train(model)
    again.remove()


@pytest.mark.parametrize(
    "use", [paused, always, sampled, trained_before, average_of_weights, resumed_for_evaluation]
)
def test_models_that_are_meant_to_be_evaluated(use):
    use(model_of().eval())


CODE = """
import torch
from torch import nn
from dropblock_hooks import Dropout, attach

kept = []
for name, p, mode in (("never", 0.0, True), ("evaluated", 0.1, False), ("well", 0.1, True)):
    model = nn.Sequential()
    model.add_module(name, nn.Linear(4, 4))
    kept += [model.train(mode), attach(model, {name: Dropout(p)})]
    for _ in range(12):
        model(torch.ones(2, 4)).sum().backward()

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
attached = attach(model, {"[01]": Dropout(0.1)})
attached.step(0)
model(torch.ones(2, 4)).sum().backward()
attached.step(1)
model[:1](torch.ones(2, 4)).sum().backward()
"""


LAST_EPOCH = "1/Dropout: the layer was never called"


def warnings_at_the_end(code):
    command = [sys.executable, "-W", "always", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_it_is_told_when_the_process_ends():
    errors = warnings_at_the_end(CODE)
    assert errors.count("never/Dropout: the rate was 0 in each of 12 active calls") == 1
    assert errors.count("12 forwards in evaluation mode and none in training mode") == 1
    assert errors.count(LAST_EPOCH) == 1
    assert errors.count("HookWarning:") == 3


@pytest.mark.slow
def test_an_error_may_have_interrupted_the_last_epoch():
    errors = warnings_at_the_end(f"{CODE}\nraise KeyboardInterrupt")
    assert errors.count(LAST_EPOCH) == 0
    assert errors.count("HookWarning:") == 2


def test_each_is_told_once():
    model = model_of()
    attached = attach(model, {"0": Dropout(0.0)})
    attached.step(0)
    train(model)
    with pytest.warns(HookWarning, match="the rate was 0"):
        attached.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attached.remove()


def test_the_only_epoch_was_in_evaluation_mode():
    model = model_of().eval()
    attached = attach(model, {"0": Dropout(0.1)})
    attached.step(0)
    train(model)
    with pytest.warns(HookWarning, match="10 forwards in evaluation mode and none in training"):
        attached.remove()


def test_a_fault_of_the_last_epoch_is_told_when_the_attachment_is_removed():
    model = model_of()
    attached = attach(model, {"0": Dropout(0.1), "2": Dropout(0.1)})
    attached.step(0)
    train(model)
    attached.step(1)
    train(model[:2])
    with pytest.warns(HookWarning) as caught:
        attached.remove()
    (warning,) = caught
    (finding,) = warning.message.findings
    assert finding.sites == ("2/Dropout",)


def test_an_attachment_that_is_removed_after_its_last_epoch_has_made_no_further_step():
    """Nobody called ``step(4)``, so no warning says that 4 is after the end."""
    model = model_of()
    attached = attach(model, {"0": Dropout(LinearSchedule(0.1, 0.2))}, epochs=3)
    attached.step(3)
    train(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attached.remove()


def test_a_state_of_the_first_epoch_evaluates_no_epoch_before_it():
    """The square root of a time below 0 is an error."""
    schedule = {"0": Dropout(lambda t: 0.1 * math.sqrt(t))}
    state = attach(model_of(), schedule).state_dict()
    attached = attach(model_of(), schedule)
    attached.load_state_dict(state)
    assert attached.epoch == 0


def two_epochs(model, attached, optimizer, batches):
    """The first epoch trains; then `model.train()` is forgotten after the validation."""
    model.train()
    for epoch in range(2):
        attached.step(epoch)
        for _ in range(batches):
            optimizer.zero_grad()
            train(model, batches=1)
            optimizer.step()
        found = attached.verify()
        model.eval()
        with torch.no_grad():
            model(X)
    return found


@pytest.mark.parametrize("batches", [2, 20])
def test_an_epoch_of_training_in_evaluation_mode_is_told_before_the_next(batches):
    model = model_of()
    attached = attach(model, {"0": Dropout(0.1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    found = two_epochs(model, attached, optimizer, batches)

    assert kinds(found) == ["never_active"]
    assert "evaluation mode" in str(found[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attached.remove()
    assert told(caught) == ["not_trained"]


@pytest.mark.parametrize("use", ["evaluation", "other weights", "gradients of images"])
def test_an_epoch_without_updates_is_no_training(use):
    model = model_of()
    attached = attach(model, {"0": Dropout(0.1)})
    train(model)
    attached.step()

    model.eval()
    if use == "other weights":
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    result = model(X)
    if use == "gradients of images":
        result.sum().backward()

    assert attached.verify() == []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attached.remove()
    assert told(caught) == []
