"""Layers that the model chooses from: those that are not chosen are no fault."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dropblock_hooks import watch


class Experts(nn.Module):
    """Calls the first experts of a list only."""

    def __init__(self, experts, used):
        super().__init__()
        self.experts, self.used = experts, used
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for expert in list(self.experts.children())[: self.used]:
            x = x + expert(x)
        return self.head(x)


def kinds(model, steps=30):
    torch.manual_seed(0)
    found = []
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with watch(model, action=found.append, every=10):
        for _ in range(steps):
            x = torch.randn(32, 8)
            loss = cross_entropy(model(x), x[:, :4].argmax(1))
            optimizer.zero_grad()  # behind the forward, in which the Watchdog looks
            loss.backward()
            optimizer.step()
    return [each.kind for each in found]


def layers(n):
    return [nn.Linear(8, 8) for _ in range(n)]


@pytest.mark.parametrize(
    "experts",
    [
        nn.ModuleList(layers(4)),
        nn.ModuleDict(zip("abcd", layers(4), strict=True)),
        nn.ModuleList(nn.Sequential(*layers(2), nn.Tanh()) for _ in range(4)),
    ],
    ids=["list", "dict", "experts of several layers"],
)
def test_experts_that_are_not_chosen_are_silent(experts):
    assert kinds(Experts(experts, 2)) == []


class Forgotten(Experts):
    def __init__(self):
        super().__init__(nn.ModuleList(layers(2)), 2)
        self.unused = nn.Linear(8, 8)


def test_a_layer_that_the_model_never_calls_is_told():
    assert kinds(Forgotten()) == ["no_gradient"]


class WithTarget(nn.Module):
    """A network and a copy of it that gives targets, as in Q-learning."""

    def __init__(self, frozen):
        super().__init__()
        self.online = nn.Linear(4, 4)
        self.target = nn.Linear(4, 4).requires_grad_(not frozen)

    def forward(self, x):
        with torch.no_grad():
            wanted = self.target(x)
        return (self.online(x) - wanted).square().mean()


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_target_network_is_silent_once_it_is_frozen_as_the_advice_says(frozen):
    findings = []
    model = WithTarget(frozen)
    with watch(model, action=findings.append, every=20):
        for _ in range(40):
            model.zero_grad()
            model(torch.randn(8, 4)).backward()
    if frozen:
        assert findings == []
        return
    (finding,) = findings
    assert finding.layer == "target"
    assert "target network or a teacher, call requires_grad_(False)" in finding.cure
