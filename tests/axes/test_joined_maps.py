"""Blocks that join maps along the channels, as DenseNet's, where no graph shows the axes."""

import pytest
import torch
from torch import nn

from dropblock_hooks import DropBlock2d, SiteError, attach

X = torch.randn(2, 8, 12, 12)
SPEC = {"block": DropBlock2d(0.1, 3)}


class Joins(nn.Module):
    """Its output has more channels than any layer in it."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return torch.cat([x, self.conv(self.norm(x).relu())], 1)


class JoinsAndPermutes(Joins):
    def forward(self, x):
        return super().forward(x).permute(0, 2, 3, 1)


class Net(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.stem, self.block = nn.Conv2d(8, 8, 1), block

    def forward(self, x):
        return self.block(self.stem(x))


@pytest.mark.parametrize("grad", [True, False], ids=["graph", "no graph"])
def test_joined_maps_have_their_channels_first(grad):
    model = Net(Joins())
    attached = attach(model, SPEC)
    with torch.set_grad_enabled(grad):
        model(X)
    assert attached.sites[0].layout == "NCHW"
    assert attached.sites[0].map_size == (12, 12)


def test_joined_and_permuted_maps_are_read_from_the_graph_or_refused():
    model = Net(JoinsAndPermutes())
    attached = attach(model, SPEC)
    with torch.no_grad(), pytest.raises(SiteError, match="can't tell the channels"):
        model(X)
    model(X)
    assert attached.sites[0].layout == "NHWC"


@pytest.mark.parametrize("other", [nn.LayerNorm(8), nn.MultiheadAttention(8, 2)], ids=type)
def test_a_model_that_may_move_axes_is_refused(other):
    model = Net(Joins())
    model.other = other
    attach(model, SPEC)
    with torch.no_grad(), pytest.raises(SiteError, match="can't tell the channels"):
        model(X)


def test_densenet_of_torchvision():
    models = pytest.importorskip("torchvision", reason="the model is theirs").models
    model = models.DenseNet(4, (2, 2), 8, num_classes=2)
    attached = attach(model, {"features.denseblock*": DropBlock2d(0.1, 3)})
    with torch.no_grad():
        model(torch.randn(2, 3, 64, 64))
    assert {site.layout for site in attached} == {"NCHW"}
