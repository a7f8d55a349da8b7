"""What Retune can't be put on: one clear error each, and nothing has changed."""

import pytest
import torch
from torch import nn

from dropblock_hooks import Dropout, Retune, SpecError, attach

timm = pytest.importorskip("timm", reason="the layers are timm's")


class Branch(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.norm = nn.Identity()
        self.drop_path = timm.layers.DropPath(p) if p else nn.Identity()

    def forward(self, x):
        return x + self.drop_path(self.norm(x))


class Masks(nn.Module):
    def __init__(self, prob):
        super().__init__()
        self.prob = prob

    def forward(self, x):
        return x * (torch.rand_like(x) >= self.prob) if self.training else x


def dropout(p):
    """An ``nn.Dropout`` with anything for a rate."""
    layer = nn.Dropout()
    layer.p = p
    return layer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.dropout = nn.Linear(3, 3), nn.Dropout(0.5)
        self.branches = nn.Sequential(Branch(0.0), Branch(0.2))
        self.lstm, self.other = nn.LSTM(3, 3, 2, dropout=0.1), nn.Identity()

    def forward(self, x):
        return self.branches(self.dropout(self.fc(x)))


R = Retune(p=0.25)
BAD = {
    "no rate": (
        {"fc": R},
        r"'fc': Retune\(p=0.25\) can't work on fc: a Linear has no p or drop_prob or prob or "
        r"drop_rate or drop_p that is a number in \[0, 1\] and can be set. builtin\(model\) lists",
    ),
    "the model": ({".": R}, "a Net has no p "),
    "a parameter": ({"param:fc.weight": R}, "takes only regularizers of gradients"),
    "an Identity": (
        {"branches.0.drop_path": R},
        r"on branches.0.drop_path: an Identity has no p .*of a drop path, put DropPath\(p=...\)$",
    ),
    "in one list": ({"dropout": [R, R]}, "'dropout' and 'dropout': Retune and Retune can't both "),
    "in two entries": (
        {"dropout": R, "type:Dropout": R},
        "'dropout' and 'type:Dropout': Retune and Retune can't both be on dropout: a layer has one",
    ),
    "with Dropout": ({"dropout": [R, Dropout(p=0.1)]}, "Retune and Dropout can't both be on drop"),
    "by attr, too": ({"dropout": R, "attr:dropout.p": R}, "can't both be on dropout.p"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_specs(case, hook_count):
    spec, message = BAD[case]
    model = Net()
    with pytest.raises(SpecError, match=f"(?s)^1 problem in the spec:\n.*{message}"):
        attach(model, spec)
    assert hook_count(model) == 0
    assert model.dropout.p == 0.5
    assert model.branches[1].drop_path.drop_prob == 0.2
    assert model.lstm.dropout == 0.1


NO_RATES = {
    "tensor": (lambda: dropout(torch.tensor(0.5)), "a Dropout has no p "),
    "large": (lambda: dropout(2.0), "a Dropout has no p "),
    "scripted": (lambda: torch.jit.script(nn.Dropout(0.5)), "it is a ScriptModule"),
}


@pytest.mark.parametrize("case", NO_RATES)
@pytest.mark.filterwarnings("ignore:.*torch.jit:")
def test_layers_without_a_rate_that_can_be_set(case):
    make, message = NO_RATES[case]
    model = nn.Sequential(nn.Linear(3, 3), make())
    with pytest.raises(SpecError, match=f"^1 problem in the spec:\n.*{message}") as raised:
        attach(model, {"1": R})
    assert "closest: 1" not in str(raised.value)


def test_a_layer_of_its_own_can_t_be_always_on(hook_count):
    model = nn.Sequential(nn.Linear(3, 3), Masks(0.5), nn.Dropout(0.5))
    with pytest.raises(SpecError, match=r"1 problem.*\n.* on 1: the Masks itself drops, "):
        attach(model, {"1": Retune(p=0.1, active="always")})
    assert (model[1].prob, hook_count(model)) == (0.5, 0)
    attach(model, {"2": Retune(p=1.0, active="always")})
    assert model.eval()(torch.ones(2, 3)).tolist() == [[0.0] * 3] * 2


def test_the_place_of_a_rate_is_its_layer():
    with pytest.raises(ValueError, match="it takes no at, index or layout"):
        Retune(p=0.1, at="input")


OWN, BY_NAME = {"dropout": R}, {"attr:dropout.p": R}
LIVE = {
    "Retune": (OWN, OWN),
    "by attr": (BY_NAME, OWN),
    "Dropout": (OWN, {"dropout": Dropout(p=0.1)}),
    "on Dropout": ({"dropout": Dropout(p=0.1)}, OWN),
}


@pytest.mark.parametrize("case", LIVE)
@pytest.mark.filterwarnings("ignore::dropblock_hooks.HookWarning")
def test_what_is_on_already(case, hook_count):
    first, second = LIVE[case]
    model = Net()
    attached = attach(model, first)
    hooks = hook_count(model)
    rates = model.dropout.p, model.lstm.dropout
    message = "^1 problem in the spec:\n.*an earlier attach has put .* on .*remove"
    with pytest.raises(SpecError, match=message):
        attach(model, second)
    assert hook_count(model) == hooks
    assert (model.dropout.p, model.lstm.dropout) == rates
    attached.remove()
    assert (model.dropout.p, model.lstm.dropout) == (0.5, 0.1)
