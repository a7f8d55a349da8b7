"""The length of a training, said once: what schedules without epochs of their own follow."""

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dropblock_hooks import (
    ByDepth,
    CosineSchedule,
    Dropout2d,
    HookWarning,
    LinearSchedule,
    SpecError,
    StepSchedule,
    attach,
    plan,
)

RAMPS = (LinearSchedule, CosineSchedule)


def within(schedule, epochs):
    """The schedule of a site of an Attachment that is told the epochs."""
    attached = attach(nn.Identity(), {".": Dropout2d(p=schedule)}, epochs=epochs)
    return attached["./Dropout2d"].regularizer.p


@pytest.mark.parametrize("kind", RAMPS)
@given(epochs=st.integers(1, 200), delay=st.integers(0, 199))
def test_a_ramp_without_epochs_ends_with_the_training(kind, epochs, delay):
    schedule = kind(0.0, 0.4, delay=delay)
    if delay >= epochs:
        with pytest.raises(ValueError, match=f"delay={delay} leaves nothing of {epochs} epochs"):
            within(schedule, epochs)
        return
    said = within(schedule, epochs)
    assert said == kind(0.0, 0.4, epochs=epochs - delay, delay=delay)
    assert said(epochs - 1) == 0.4
    assert said.length == epochs


@given(epochs=st.integers(1, 50), own=st.integers(1, 50))
def test_epochs_of_its_own_stay(epochs, own):
    for schedule in (LinearSchedule(0.0, 0.4, own), StepSchedule({0: 0.0, own: 0.1}), 0.3):
        with warnings.catch_warnings():  # of schedules that end after the training
            warnings.simplefilter("ignore", HookWarning)
            assert within(schedule, epochs) is schedule


def test_the_ends_of_by_depth_follow_too(net):
    spec = {"layer[12].*": Dropout2d(p=ByDepth(0.0, LinearSchedule(0.0, 0.2)))}
    attached = attach(net, spec, epochs=3)
    for epoch, last in enumerate((0.0, 0.1, 0.2)):
        attached.step(epoch)
        net(torch.ones(2, 3, 16, 16))
        rates = [site.rate for site in attached.sites]
        assert rates == pytest.approx([last * i / 3 for i in range(4)])


def test_without_a_length_nothing_is_attached(net, hook_count):
    spec = {"layer1.*": Dropout2d(p=LinearSchedule(0.0, 0.2)), "layer2.*": Dropout2d(p=0.1)}
    for put in (attach, plan):
        with pytest.raises(SpecError, match=r"'layer1\.\*': Dropout2d.*the schedule has no length"):
            put(net, spec)
    assert hook_count(net) == 0
    said = plan(net, spec, torch.ones(2, 3, 16, 16), epochs=4)
    assert not said.problems
    assert said.rows[0].rate == (0.0, 0.2)


@pytest.mark.parametrize("epochs", [0, -1, 2.5, True, "90", math.nan])
def test_what_is_no_length(net, epochs):
    with pytest.raises(ValueError, match=r"epochs must be an integer >= 1, got"):
        attach(net, {"layer1.*": Dropout2d(p=0.1)}, epochs=epochs)


@pytest.mark.parametrize(
    ("rate", "length"),
    [
        (LinearSchedule(0.0, 0.2, epochs=120), 120),
        (StepSchedule({0: 0.0, 95: 0.1}), 96),
        (ByDepth(0.0, CosineSchedule(0.0, 0.2, epochs=91)), 91),
    ],
)
def test_a_schedule_that_is_longer_than_the_training_is_told(net, rate, length):
    with pytest.warns(
        HookWarning, match=rf"takes {length} epochs, and the training has 90"
    ) as told:
        attach(net, {"layer1.*": Dropout2d(p=rate)}, epochs=90).remove()
    assert len(told) == 1
    attach(net, {"layer1.*": Dropout2d(p=rate)}, epochs=length)


def test_a_delay_that_leaves_nothing_names_the_entry(net):
    with pytest.raises(SpecError, match=r"'layer1\.\*'.*delay=5 leaves nothing of 3 epochs"):
        attach(net, {"layer1.*": Dropout2d(p=LinearSchedule(0.0, 0.1, delay=5))}, epochs=3)


def test_set_follows_the_training_too(net):
    attached = attach(net, {"layer1.*": Dropout2d(p=0.1)}, epochs=5)
    attached.set("layer1.*", p=LinearSchedule(0.0, 0.4))
    attached.step(4)
    assert {site.rate for site in attached.sites} == {0.4}
    attached.remove()
    unsaid = attach(net, {"layer1.*": Dropout2d(p=0.1)})
    with pytest.raises(ValueError, match="the schedule has no length"):
        unsaid.set("layer1.*", p=LinearSchedule(0.0, 0.4))
    assert {site.rate for site in unsaid.sites} == {0.1}


def stepped(rate, epochs, times):
    """Train a model, with a step before each batch."""
    model = nn.Identity()
    attached = attach(model, {".": Dropout2d(p=rate)}, epochs=epochs)
    for t in times:
        attached.step(t)
        model(torch.ones(1, 2, 2, 2))
    return attached


def test_a_step_for_each_batch_is_told_once():
    text = r"step\(4\) is later than the 3 epochs that attach was given.*not the number of a batch"
    with pytest.warns(HookWarning, match=text) as caught:
        stepped(LinearSchedule(0.0, 0.1), 3, range(12))
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("rate", "epochs", "times"),
    [
        (LinearSchedule(0.0, 0.1), 3, [i / 5 for i in range(16)]),
        (LinearSchedule(0.0, 0.1), 3, [0, 1, 2, None]),
        (LinearSchedule(0.0, 0.1, epochs=3), None, range(9)),
        (0.1, 3, range(9)),
    ],
    ids=["fractions", "epochs and the end", "no length", "no schedule"],
)
def test_other_steps_are_silent(rate, epochs, times):
    stepped(rate, epochs, times)
