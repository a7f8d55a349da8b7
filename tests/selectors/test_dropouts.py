"""The units that the dropouts of torch drop, against masks that they draw."""

import pytest
import torch
from torch import nn
from torch.nn.modules import dropout

from dropblock_hooks import Foreign

NAMES = [name for name in dropout.__all__ if not name.startswith("_")]


@pytest.mark.parametrize("name", NAMES)
def test_units_of_the_dropouts_of_torch(name):
    torch.manual_seed(0)
    axes = 5 if name == "Dropout3d" else 3 if name == "Dropout1d" else 4
    x = torch.randn(20, 30, *[5] * (axes - 2))
    y = getattr(nn, name)(0.5)(x)
    dropped = (y == y.flatten().mode().values).flatten(2)  # all dropped values are equal
    assert 0.4 < dropped.float().mean() < 0.6
    whole = torch.equal(dropped.any(2), dropped.all(2))
    assert Foreign(getattr(nn, name), p=0.5).unit == ("channels" if whole else "elements")
