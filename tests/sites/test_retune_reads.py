"""Layers whose rate the module around them reads: called in evaluation, or another time."""

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, relu

from dropblock_hooks import GaussianNoise, LinearSchedule, Retune, attach, plan, sample


class Attention(nn.Module):
    """As timm writes it: its dropout is read where attention is fused, else called."""

    def __init__(self):
        super().__init__()
        self.fc, self.drop, self.fused = nn.Linear(8, 8), nn.Dropout(0.1), True

    def forward(self, x):
        if self.fused:
            return dropout(self.fc(x), self.drop.p if self.training else 0.0)
        return self.drop(self.fc(x))


def test_an_evaluation_that_calls_the_layer_leaves_the_rate_alone():
    model = Attention()
    attached = attach(model, {"drop": Retune(p=0.3)})
    model(torch.ones(2, 8))
    model.eval()
    model.fused = False  # to look at attention
    model(torch.ones(2, 8))
    model.train()
    model.fused = True
    assert model.drop.p == 0.3
    share = (model(torch.ones(4000, 8)) == 0).float().mean()
    assert share == pytest.approx(0.3, abs=4 * (0.21 / 32000) ** 0.5)
    assert attached.verify() == []


def test_a_layer_that_is_called_first_and_read_later_is_told():
    model = Attention()
    model.fused = False
    attached = attach(model, {"drop": Retune(p=0.3)})
    model(torch.ones(2, 8))
    assert model.drop.p == 0.0
    assert attached.verify() == []
    attached.step(1)
    model.fused = True
    with pytest.warns(UserWarning, match="drop/Retune: never called in this window"):
        model(torch.ones(2, 8))
    (finding,) = attached.verify()
    assert "may have read its rate" in finding.message


def test_a_plan_tells_of_both_ways():
    model = Attention()
    model.fused = False
    planned = plan(model, {"drop": Retune(p=0.3)}, torch.ones(2, 8))
    assert [c.kind for c in planned.cautions] == ["read"]
    assert "called, and the module around it has its rate" in planned.warnings[0]


class Block(nn.Module):
    """It makes zeros of its own besides."""

    def __init__(self):
        super().__init__()
        self.fc, self.p = nn.Linear(8, 8), 0.5

    def forward(self, x):
        return dropout(relu(self.fc(x)), self.p, self.training)


def test_zeros_of_a_block_are_not_taken_for_dropped():
    model = nn.Sequential(Block())
    attached = attach(model, {"0": Retune(p=0.2)})
    model(torch.randn(64, 8))
    assert attached.sites[0].realized_rate is None
    assert attached.sites[0].active_calls == 1


class Stubborn(nn.Module):
    """It takes no rate above one half."""

    def __init__(self):
        super().__init__()
        self.rate = 0.1

    p = property(lambda self: self.rate)

    @p.setter
    def p(self, value):
        if value > 0.5:
            raise ValueError("too much")
        self.rate = value

    def forward(self, x):
        return dropout(x, self.rate, self.training)


def test_a_step_that_a_layer_refuses_moves_nothing():
    model = nn.Sequential(Stubborn(), Stubborn(), nn.Dropout(0.2))
    ramp = LinearSchedule(0.0, 0.6, epochs=3)
    attached = attach(model, {"2": Retune(p=ramp), "1": Retune(p=0.2), "0": Retune(p=ramp)})
    attached.step(1)
    before = attached.rates, [layer.p for layer in model], attached.epoch
    with pytest.raises(ValueError, match="too much"):
        attached.step(2)
    assert (attached.rates, [layer.p for layer in model], attached.epoch) == before
    attached.remove()
    assert [layer.p for layer in model] == [0.1, 0.1, 0.2]


def test_samples_are_no_training():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 2))
    attached = attach(model, {"1": Retune(p=0.5), "0": GaussianNoise(0.2)})
    model.train()
    model[1].eval()
    with pytest.warns(UserWarning, match="frozen"):
        model(torch.ones(2, 4))
    kinds = [finding.kind for finding in attached.verify()]
    with attached.always():
        assert sample(model, torch.ones(2, 4), n=3).std.max() > 0
    assert [finding.kind for finding in attached.verify()] == kinds == ["never_active"]
