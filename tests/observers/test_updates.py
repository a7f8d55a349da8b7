"""Faults of the training loop that ``watch`` finds, and healthy loops about which it is silent."""

import pytest
import torch
from torch import nn

from dropblock_hooks import FreezeNorm, attach, watch
from tests.observers.faulty import batch_for, cnn, cross_entropy, deep, mlp

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


def zero(optimizer):
    optimizer.zero_grad()


def alerts_of(model, optimizer, steps=40, accumulate=1, zero=zero, batch=batch_for, before=None):
    """The findings of a training with `watch` at its defaults, in two epochs."""
    found = []
    with watch(model, action=found.append) as attached:
        for _ in range(2):
            model.train()
            for step in range(steps):
                if before is not None:
                    before(step)
                x, target = batch(model)
                loss = cross_entropy(model(x), target)
                loss.backward()
                if (step + 1) % accumulate == 0:
                    optimizer.step()
                    zero(optimizer)
            attached.step()
    return found


def kinds_of(found):
    return [(finding.kind.value, finding.layer) for finding in found]


@pytest.mark.parametrize("make", [SGD, ADAMW, torch.optim.Adam])
def test_a_learning_rate_of_0_is_named(make):
    model = mlp()
    optimizer = make(model.parameters(), lr=0.0)
    found = alerts_of(model, optimizer)
    assert kinds_of(found) == [("no_update", "fc1")]
    assert "in 4 of the 4 layers" in found[0].text
    assert "learning rate" in found[0].cure


def test_a_group_with_a_learning_rate_of_0_is_named():
    model = mlp()
    others = [p for layer in (model.fc1, model.fc3, model.head) for p in layer.parameters()]
    groups = [{"params": others}, {"params": model.fc2.parameters(), "lr": 0.0}]
    assert kinds_of(alerts_of(model, SGD(groups, lr=0.05))) == [("no_update", "fc2")]


@pytest.mark.parametrize("missing", ["fc5", "head"])
def test_a_layer_that_the_optimizer_does_not_have_is_named(missing):
    model = deep(nn.ReLU, 1.4)
    own = set(model.get_submodule(missing).parameters())
    optimizer = SGD([p for p in model.parameters() if p not in own], lr=0.01)
    found = alerts_of(model, optimizer)
    assert kinds_of(found) == [("no_update", missing)]
    assert "optimizer" in found[0].cure


def warm_up(optimizer):
    """A learning rate of 0 in the first step."""

    def before(step):
        optimizer.param_groups[0]["lr"] = min(step, 10) / 200

    return before


@pytest.mark.parametrize("accumulate", [1, 4, 30])
@pytest.mark.parametrize("make", [mlp, cnn])
def test_accumulated_gradients_are_no_fault(make, accumulate):
    model = make()
    assert not alerts_of(model, SGD(model.parameters(), lr=0.05), accumulate=accumulate)


def test_a_warm_up_from_0_is_no_fault():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.0)
    assert not alerts_of(model, optimizer, before=warm_up(optimizer))


def test_frozen_layers_are_no_fault():
    model = mlp()
    model.fc2.requires_grad_(False)
    assert not alerts_of(model, SGD(model.parameters(), lr=0.05))


@pytest.mark.parametrize("last", ["fc3 head", "head", "fc2 fc3 head"])
def test_an_optimizer_over_the_last_layers_is_no_fault(last):
    model = mlp()
    trained = [p for name in last.split() for p in model.get_submodule(name).parameters()]
    assert not alerts_of(model, SGD(trained, lr=0.05))


def test_an_optimizer_over_the_norms_is_no_fault():
    model = cnn()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    optimizer = SGD([p for norm in norms for p in norm.parameters()], lr=0.05)
    assert not alerts_of(model, optimizer)


def test_backwards_without_an_optimizer_are_no_fault():
    model = mlp()
    found = []
    with watch(model, action=found.append):
        for _ in range(40):
            x, target = batch_for(model)
            model.zero_grad()
            cross_entropy(model(x), target).backward()
    assert not found


def part_in_evaluation(model):
    """The mode of a block after an evaluation that has changed that of the block only."""
    model.block2.eval()


def test_a_block_in_evaluation_mode_is_named():
    model = cnn()
    optimizer = SGD(model.parameters(), lr=0.05)
    found = alerts_of(model, optimizer, before=lambda step: part_in_evaluation(model))
    (finding,) = found
    assert finding.kind == "eval_norm"
    assert finding.sites == ("block2.branch.bn1/Watchdog", "block2.branch.bn2/Watchdog")


def test_a_frozen_block_in_evaluation_mode_is_no_fault():
    model = cnn()
    model.block2.requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    assert not alerts_of(model, optimizer, before=lambda step: part_in_evaluation(model))


@pytest.mark.parametrize("parameters", [False, True])
def test_norms_of_freeze_norm_are_no_fault(parameters):
    model = cnn()
    attach(model, {"type:_BatchNorm": FreezeNorm(parameters=parameters)})
    assert not alerts_of(model, SGD(model.parameters(), lr=0.05))


def test_an_evaluation_in_between_is_no_fault():
    model = cnn()

    def evaluate(step):
        model.eval()
        model(batch_for(model)[0])
        model.train()

    assert not alerts_of(model, SGD(model.parameters(), lr=0.05), before=evaluate)
