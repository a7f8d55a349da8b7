"""Functions as schedules are pickled with their regularizers, or refused with a clear error."""

import copy
import pickle

import pytest
import torch
from torch import nn

from dropblock_hooks import ByDepth, Capture, Dropout, LinearSchedule, Retune, attach, attachments


def rising(t):
    return 0.1 * t


def local_schedule():
    def schedule(t):
        return 0.1

    return schedule


def model_with(spec):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    attach(model, spec)
    return model


NAMELESS = {
    "lambda": ({"0": Dropout(lambda t: 0.1)}, "p of Dropout is <lambda>"),
    "inside a function": ({"0": Dropout(local_schedule())}, "p of Dropout is local_schedule"),
    "inside a schedule": ({"0": Dropout(ByDepth(0, lambda t: 0.1))}, "stop of ByDepth is <lambda>"),
    "of a Retune": ({"1": Retune(lambda t: 0.1)}, "p of Retune is <lambda>"),
    "of an observer": ({"0": Capture(reduce=lambda x: x)}, "reduce of Capture is <lambda>"),
}


@pytest.mark.parametrize(("spec", "place"), NAMELESS.values(), ids=NAMELESS)
def test_pickling_says_what_to_use_instead(spec, place):
    model = model_with(spec)
    with pytest.raises(pickle.PicklingError, match=f"{place}.* use a schedule, such as"):
        pickle.dumps(model)
    with pytest.raises(pickle.PicklingError, match=place):
        torch.save(model, "/dev/null")


@pytest.mark.parametrize(("spec", "place"), NAMELESS.values(), ids=NAMELESS)
def test_a_copy_has_the_function(spec, place):
    model = model_with(spec)
    (attached,) = attachments(copy.deepcopy(model))
    (original,) = attachments(model)
    assert attached.rates == original.rates
    assert attached.sites[0].regularizer == original.sites[0].regularizer


def test_cloudpickle_takes_a_lambda():
    cloudpickle = pytest.importorskip("cloudpickle")
    model = model_with({"0": Dropout(lambda t: 0.1 * t)})
    (attached,) = attachments(pickle.loads(cloudpickle.dumps(model)))
    attached.step(2)
    assert attached.sites[0].rate == pytest.approx(0.2)


@pytest.mark.parametrize(
    "rate", [rising, LinearSchedule(0.0, 0.2, epochs=3)], ids=["function", "schedule"]
)
def test_what_has_a_name_is_pickled(rate):
    model = model_with({"0": Dropout(rate)})
    (attached,) = attachments(pickle.loads(pickle.dumps(model)))
    attached.step(1)
    assert attached.sites[0].rate == pytest.approx(0.1)
