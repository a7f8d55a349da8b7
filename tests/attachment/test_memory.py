"""The memory of a class of one's own is saved, copied and resumed."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    Foreign,
    OnGradients,
    Positive,
    Regularizer,
    Watchdog,
    attach,
    attachments,
    register,
)
from tests.cases import rest_slow


class Clip:
    def __init__(self):
        self.mean = None

    def __call__(self, grad, now):
        norm = grad.norm() / now.grad_scale
        mean = norm if self.mean is None else self.mean
        limit = mean * now.ratio
        self.mean = 0.9 * mean + 0.1 * torch.minimum(norm, limit)
        factor = (limit / norm).clamp(max=1)
        return grad * factor, (factor < 1) * grad.numel()

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


@register
class ToHistory(OnGradients, Regularizer):
    ratio: Positive = 1.05
    reads_grad_scale = True

    def bind(self):
        return Clip()


class Forgets(Regularizer):
    def bind(self):
        calls = []

        def count(x, now):
            calls.append(len(x))
            return x * len(calls), None

        return count


class Counts(Regularizer):
    def bind(self):
        calls = 0

        def count(x, now):
            nonlocal calls
            calls += 1
            return x * calls, None

        return count


class CountsInHelper(Regularizer):
    """A function that it defines in each call assigns to the name of `bind`."""

    def bind(self):
        calls = 0

        def count(x, now):
            def add():
                nonlocal calls
                calls += 1
                return calls

            return x * add(), None

        return count


class ForgetsInHelper(Regularizer):
    def bind(self):
        calls = []

        def count():
            calls.append(1)
            return len(calls)

        return lambda x, now: (x * count(), None)


class Recurses(Regularizer):
    def bind(self):
        def power(x, exponent):
            return x * power(x, exponent - 1) if exponent > 1 else x

        return lambda x, now: (power(x, 3), None)


class Callable(Regularizer):
    def bind(self):
        return Remembering()


class Remembering:
    def __call__(self, x, now):
        return x, None


class Scales(Regularizer):
    def bind(self):
        factor = 2.0
        return lambda x, now: (x * factor, None)


class ScalesInside(Regularizer):
    """A local name that an inner function reads is new in each call."""

    def bind(self):
        factor = 2.0

        def scale(x, now):
            share = factor / 2
            return (lambda y: y * share)(x), None

        return scale


class Plain(Regularizer):
    def bind(self):
        return twice


class Doubles(Regularizer):
    def bind(self):
        return self.double

    def double(self, x, now):
        return x * 2, None


def twice(x, now):
    return x * 2, None


STEPS = 12


def batch(i):
    return torch.linspace(-1, 1, 32).reshape(8, 4) * (5 if i == 7 else 1) * (1 + i / 10)


def training(when, compiled=False):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    if compiled:
        model.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attached = attach(model, {"param:**": ToHistory(when=when)}, optimizer=optimizer)
    return model, optimizer, attached


def run(model, optimizer, steps):
    for i in steps:
        optimizer.zero_grad()
        model(batch(i)).square().sum().backward()
        optimizer.step()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def stored(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("compiled", rest_slow([False, True]), ids=["eager", "compiled"])
@pytest.mark.parametrize("when", ["backward", "accumulated"])
def test_a_resumed_training_is_the_uninterrupted_one(when, compiled):
    torch._dynamo.reset()
    whole, optimizer, attached = training(when, compiled)
    run(whole, optimizer, range(STEPS))
    assert 0 < attached.sites[0].total_realized_rate < 1
    first, optimizer, attached = training(when, compiled)
    run(first, optimizer, range(6))
    state, saved = stored(attached.state_dict()), stored(first.state_dict())
    run(first, optimizer, range(6, 8))  # the state has the memory of its own time
    second, optimizer, attached = training(when, compiled)
    second.load_state_dict(saved)
    attached.load_state_dict(state)
    run(second, optimizer, range(6, STEPS))
    assert torch.equal(weights(second), weights(whole))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_a_memory_of_its_own(copied):
    model, optimizer, attached = training("backward")
    run(model, optimizer, range(3))
    other = copied(model)
    before = attached.state_dict()["sites"]["0.bias/ToHistory"]["memory"]["mean"]
    run(other, torch.optim.SGD(other.parameters(), 0.1), range(3, 6))
    assert attached.state_dict()["sites"]["0.bias/ToHistory"]["memory"]["mean"] == before
    (found,) = attachments(other)
    assert found.state_dict()["sites"]["0.bias/ToHistory"]["memory"]["mean"] != before


@pytest.mark.parametrize(
    "regularizer",
    [Forgets(), Counts(), CountsInHelper(), ForgetsInHelper(), Callable()],
    ids=repr,
)
def test_a_memory_that_can_not_be_saved_is_refused(regularizer):
    attached = attach(nn.Sequential(nn.ReLU()), {"0": regularizer})
    with pytest.raises(TypeError, match=r"0/.*: the result of its bind\(\) can't be saved"):
        attached.state_dict()


@pytest.mark.parametrize(
    "regularizer",
    [
        Plain(),
        Doubles(),
        Scales(),
        ScalesInside(),
        Recurses(),
        Foreign(nn.Dropout, p=0.1),
        Watchdog(),
    ],
    ids=repr,
)
def test_classes_without_a_memory_are_silent(regularizer):
    model = nn.Sequential(nn.ReLU())
    attached = attach(model, {"0": regularizer})
    model(torch.ones(3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = attached.state_dict()
    attached.load_state_dict(state)
