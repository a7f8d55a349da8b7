"""The driver that all callbacks share, as a callback calls it."""

import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import ClipGradNorm, Dropout, HookWarning, LinearSchedule, SpecError
from dropblock_hooks.integrations.driver import TrainerDriver
from tests.conftest import hook_count
from tests.told import told

SPEC = {"1": Dropout(p=LinearSchedule(0.0, 0.4))}
X = torch.ones(4, 3)


def network():
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))


def rate_after(driver, *args, **kwargs):
    driver.tick(*args, **kwargs)
    return driver.attached.sites[0].rate


def test_batches_are_counted_in_each_epoch():
    driver, model = TrainerDriver(SPEC), network()
    driver.begin(model, 3)
    rates = []
    for epoch in range(3):
        for _ in range(4):
            rates.append(rate_after(driver, epoch, batches=4))
            model(X)
        driver.end_epoch()
    assert rates == pytest.approx([0.05 * i for i in range(8)] + [0.4] * 4)


@pytest.mark.parametrize("batches", [None, 0, float("inf")], ids=str)
def test_without_a_number_of_batches_time_has_no_fractions(batches):
    driver = TrainerDriver(SPEC)
    driver.begin(network(), 3)
    assert rate_after(driver, 1, batch=3, batches=batches) == 0.2
    assert rate_after(driver, 1, batch=1, batches=2) == pytest.approx(0.3)
    assert rate_after(driver, 1, batch=7, batches=2) == pytest.approx(0.3)  # more than there are


def test_steps_of_the_optimizer():
    driver = TrainerDriver(SPEC, "step")
    driver.begin(network(), 5)
    assert [rate_after(driver, 0, step) for step in (0, 2, 4)] == pytest.approx([0.0, 0.2, 0.4])


def test_schedules_that_are_shorter_than_the_training_are_meant():
    driver, model = TrainerDriver(SPEC), network()
    driver.begin(model, 2)
    for epoch in range(5):
        rate = rate_after(driver, epoch)  # no warning
        model(X)
    assert rate == pytest.approx(0.4)


def test_a_loaded_state_is_taken_over():
    driver, model = TrainerDriver(SPEC), network()
    assert driver.state() is None
    assert driver.scalars() == driver.end_epoch() == {}
    driver.tick(0)
    driver.end()
    driver.begin(model, 3)
    driver.tick(1)
    model(X)
    state = driver.state()
    assert driver.end_epoch()["reg/1/Dropout/p"] == driver.scalars()["reg/1/Dropout/p"] == 0.2
    resumed = TrainerDriver(SPEC)
    resumed.load(state)
    attached = resumed.begin(network(), 3, resumed=True)
    assert (attached.epoch, attached.sites[0].calls, resumed.state()) == (1, 1, state)


def test_begin_again_removes_the_hooks_of_an_aborted_training():
    driver, model = TrainerDriver(SPEC), network()
    first = driver.begin(model, 3)
    driver.tick(0)
    hooks = hook_count(model)
    assert driver.begin(model, 3) != first
    assert hook_count(model) == hooks
    driver.load({"version": 0})
    with pytest.raises(ValueError, match="state"):
        driver.begin(model, 3)
    assert hook_count(model) == 0


def test_findings_are_told_once_and_only_after_a_tick():
    driver, model = (
        TrainerDriver({"param:0.weight": ClipGradNorm(1.0, when="accumulated")}),
        network(),
    )
    driver.begin(model, 3)
    driver.end_epoch()  # nothing was trained yet
    driver.tick(0)
    with pytest.warns(HookWarning) as caught:
        model(X).sum().backward()
    assert told(caught) == [("0.weight/ClipGradNorm", "no_optimizer")]
    driver.end_epoch()
    driver.tick(1)
    model(X).sum().backward()
    driver.end_epoch()


@pytest.mark.parametrize("length", [None, -1, 0, float("inf")], ids=str)
def test_a_length_that_is_not_known(length):
    with pytest.raises(SpecError, match="the schedule has no length"):
        TrainerDriver(SPEC).begin(network(), length)


def test_a_model_in_evaluation_mode_is_told_once():
    """At the end of the epoch by ``verify``; the step to the next epoch says nothing more."""
    driver, model = TrainerDriver(SPEC), network().eval()
    driver.begin(model, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(3):
            for _ in range(2):
                driver.tick(epoch, batches=2)
                model(X).sum().backward()
            driver.end_epoch()
        driver.end()
    assert told(caught) == [("1/Dropout", "never_active")]
