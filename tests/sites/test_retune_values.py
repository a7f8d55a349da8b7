"""The value that a retuned layer holds: in evaluation its own, also if others change it."""

import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import HookWarning, LinearSchedule, Retune, attach
from tests.cases import rest_slow

X = torch.ones(400, 100)


class ReadsAlways(nn.Module):
    """Drops in evaluation too, as a model that passes its rate to fused attention."""

    def __init__(self, own=0.0):
        super().__init__()
        self.drop = own

    def forward(self, x):
        return nn.functional.dropout(x, self.drop, True)


class ReadsInTraining(ReadsAlways):
    def forward(self, x):
        return nn.functional.dropout(x, self.drop, self.training)


class OtherMethod(ReadsInTraining):
    def features(self, x):
        return self(x) if not self.training else ReadsInTraining.forward(self, x)


def zeros(run, x=X):
    return round(float((run(x) == 0).float().mean()), 2)


def compiled_or_not(model, mode):
    torch._dynamo.reset()
    return model if mode == "eager" else torch.compile(model, backend="eager", fullgraph=True)


MODES = pytest.mark.parametrize("mode", ["eager", "compiled"])


@MODES
@pytest.mark.parametrize("own", rest_slow([0.0, 0.1]))
def test_in_evaluation_the_value_of_the_model_is_in_place(own, mode):
    model = nn.Sequential(ReadsAlways(own))
    attached = attach(model, {"attr:0.drop": Retune(LinearSchedule(0.4, 0.5, epochs=2))})
    run = compiled_or_not(model, mode)
    for epoch, rate in enumerate([0.4, 0.5]):
        attached.step(epoch)
        assert zeros(run) == pytest.approx(rate, abs=0.02)
        model.eval()
        assert zeros(run) == pytest.approx(own, abs=0.01)
        assert model[0].drop == rate
        model.train()
    assert attached.verify() == []
    attached.remove()
    assert model[0].drop == own


def test_training_by_another_method_after_an_evaluation():
    model = OtherMethod()
    attach(model, {"attr:drop": Retune(0.4)})
    model.eval()(X)
    assert zeros(model.train().features) == pytest.approx(0.4, abs=0.02)


LAYERS = {
    "a hook drops": (nn.Dropout, "1", "p"),
    "the layer": (ReadsInTraining, "attr:1.drop", "drop"),
}


@MODES
@pytest.mark.parametrize("kind", LAYERS)
def test_a_rate_that_other_code_sets_does_not_add_up(kind, mode):
    make, selector, attribute = LAYERS[kind]
    model = nn.Sequential(nn.Identity(), make(0.1))
    attached = attach(model, {selector: Retune(0.2)})
    run = compiled_or_not(model, mode)
    assert zeros(run) == pytest.approx(0.2, abs=0.02)
    setattr(model[1], attribute, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if mode == "compiled" else "error")
        if mode == "eager":
            with pytest.warns(
                HookWarning, match=f"other code has set {attribute} of the layer to 0.5"
            ):
                run(X[:1])
        assert zeros(run) == pytest.approx(0.2, abs=0.02)  # it is told once
    assert attached.sites[0].rate == 0.2
    attached.remove()
    assert getattr(model[1], attribute) == 0.1


@pytest.mark.parametrize("kind", LAYERS)
def test_our_own_changes_are_silent(kind):
    make, selector, _ = LAYERS[kind]
    model = nn.Sequential(nn.Identity(), make(0.1))
    attached = attach(model, {selector: Retune(LinearSchedule(0.2, 0.4, epochs=2))})
    for epoch in range(2):
        attached.step(epoch)
        model.train()(X)
        model.eval()(X)
        model.train()
        with attached.paused():
            assert zeros(model) == pytest.approx(0.1, abs=0.02)
        attached.set(selector, p=0.3)
        assert zeros(model) == pytest.approx(0.3, abs=0.02)
    attached.remove()
