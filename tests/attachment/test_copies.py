"""Averaged copies, deep copies that train on, conversions that replace modules."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from dropblock_hooks import (
    ClampGrad,
    ClipGradNorm,
    DropBlock2d,
    Dropout2d,
    LinearSchedule,
    attach,
    attachments,
    detach_all,
)
from tests.stacks import make_net, put_on, regularizers


class NormNet(nn.Module):
    """Two convolutions with batch norms: what conversions replace."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        x = self.bn1(self.conv1(x)).relu()
        x = self.bn2(self.conv2(x)).relu()
        return self.fc(x.mean((2, 3)))


SPEC = {
    "bn1": DropBlock2d(LinearSchedule(0.0, 0.4, epochs=5), 3),
    "bn2": [Dropout2d(0.3), ClipGradNorm(0.1)],
    "param:fc.weight": ClampGrad(-1e-3, 1e-3),
}


def images(n=4):
    return torch.randn(n, 3, 12, 12)


def a_step(model, optimizer=None):
    model.zero_grad()
    model(images()).square().sum().backward()
    if optimizer is not None:
        optimizer.step()


@pytest.mark.parametrize("regularizer", regularizers().values(), ids=regularizers())
def test_a_copy_trains_alike_and_counts_alone(regularizer):
    net = make_net(regularizer)
    attached = put_on(net, regularizer)
    net(net.example()).sum().backward()
    other = copy.deepcopy(net)
    (found,) = attachments(other)
    gradients = []
    for model in (net, other):
        torch.manual_seed(0)
        model.zero_grad()
        model(net.example()).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert [s.total_realized_rate for s in attached] == [s.total_realized_rate for s in found]
    other(net.example()).sum().backward()
    assert [attached.sites[0].calls, found.sites[0].calls] == [2, 3]
    assert found.verify() == attached.verify() == []
    found.enabled = False
    assert attached.enabled


@pytest.mark.parametrize("averaging", [None, get_ema_multi_avg_fn(0.5)], ids=["swa", "ema"])
def test_averaged_model(averaging):
    """Its names are those of the bare model; in evaluation it is the bare average."""
    model = NormNet()
    attached = attach(model, SPEC)
    average = AveragedModel(model, multi_avg_fn=averaging)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = SWALR(optimizer, swa_lr=0.05)
    for epoch in range(3):
        attached.step(epoch)
        a_step(model, optimizer)
        average.update_parameters(model)
        scheduler.step()
    (found,) = attachments(average)
    assert [s.key for s in found] == [s.key for s in attached]
    assert found.epoch == 0
    assert attached.sites[0].calls == 3
    assert found["bn1"] == found.sites[0]
    average.eval()
    x = images()
    on = average(x)
    assert detach_all(average) == 1
    assert torch.equal(average(x), on)
    assert len(attachments(model)) == 1
    late = attach(average, {"bn1": Dropout2d(0.5)})
    assert late.sites[0].key == "bn1/Dropout2d"


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "averaged"])
def test_a_whole_model_in_a_file(wrapped):
    model = NormNet()
    attach(model, SPEC).step(3)
    a_step(model)
    saved = AveragedModel(model) if wrapped else model
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    (found,) = attachments(loaded)
    assert found.epoch == 3
    assert [s.calls for s in found] == [1] * 4
    a_step(loaded.train())
    assert found.verify() == []
    inner = loaded.module if wrapped else loaded
    assert inner.fc.weight.grad.abs().max() <= 1e-3
    x = images()
    torch.manual_seed(1)
    one = loaded(x)
    torch.manual_seed(1)
    assert torch.equal(copy.deepcopy(loaded)(x), one)


def test_a_part_of_a_model_that_is_copied_alone():
    """Below the layers that were named: the sites that came along are found and removable."""
    model = nn.Sequential(NormNet(), NormNet())
    attach(model, {"0.bn1": Dropout2d(0.5), "1.bn1": Dropout2d(0.5)})
    part = copy.deepcopy(model[0])
    (found,) = attachments(part)
    assert [s.key for s in found] == ["0.bn1/Dropout2d"]
    assert detach_all(part) == 1
    assert len(attachments(model)[0]) == 2
