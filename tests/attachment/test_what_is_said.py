"""What is said of layers that were replaced, scripted, copied or compiled: true, or nothing."""

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ClampGrad,
    ClipGradNorm,
    Dropout2d,
    HookWarning,
    attach,
)
from tests.told import ids, told


class Block(nn.Module):
    """Reads the weight of its norm outside of its forward, as torchvision's and timm's do."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.reset()

    def reset(self):
        nn.init.zeros_(self.norm.weight)

    def forward(self, x):
        return x + self.norm(self.conv(x))


def test_a_converted_norm_was_replaced():
    model = nn.Sequential(Block(), nn.ReLU())
    attached = attach(model, {"type:BatchNorm2d": Dropout2d(0.1)})
    nn.SyncBatchNorm.convert_sync_batchnorm(model).eval()
    model.train()
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.eval()  # which trains on a GPU only
    with pytest.warns(HookWarning) as caught:
        model(torch.randn(2, 4, 5, 5)).sum().backward()
    assert told(caught) == ids(attached.verify()) == [("0.norm/Dropout2d", "replaced")]


@pytest.mark.parametrize("trains", [False, True])
def test_parameters_of_a_head_that_was_reset(trains):
    """What works is no fault; what does not is told."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    attached = attach(model, {"param:1.*": ClampGrad(-1e-4, 1e-4), "param:0.*": ClipGradNorm(1.0)})
    if trains:
        model(torch.randn(2, 4)).sum().backward()
    model[1] = nn.Linear(4, 5)
    model(torch.randn(2, 4)).sum().backward()
    works = bool(model[1].weight.grad.abs().max() <= 1e-4)
    faults = attached.verify()
    assert works == (faults == [])
    assert works != trains
    assert {site for site, _ in ids(faults)} <= {"1.weight/ClampGrad", "1.bias/ClampGrad"}
