"""What is said of layers that were replaced, scripted, copied or compiled: true, or nothing."""

import pytest
import torch
from torch import nn

from dropblock_hooks import (
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
