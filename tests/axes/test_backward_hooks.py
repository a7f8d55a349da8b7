"""Full backward hooks put a node into the graph; the channels behind it are found."""

import pytest
import torch
from torch import nn

from dropblock_hooks import DropBlock2d, attach


class Net(nn.Module):
    """Maps, then channels on the last axis, so that only the graph tells where a ReLU has them."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.relu = nn.ReLU()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        x = self.relu(self.conv(x))
        return self.norm(x.permute(0, 2, 3, 1))


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
def test_the_layout_behind_a_full_backward_hook_is_read(hooked):
    model = Net()
    if hooked:
        model.conv.register_full_backward_hook(lambda *given: None)
    attached = attach(model, {"relu": DropBlock2d(0.2, 3)})
    model(torch.randn(2, 3, 9, 9, requires_grad=True)).sum().backward()
    assert attached.sites[0].layout == "NCHW"
