"""Kernels draw the same masks again in a block of `Attachment.same_masks`."""

import pytest
import torch
from torch import nn

from dropblock_hooks import DropBlock2d, Dropout, Dropout2d, DropPath, attach
from tests.conftest import KERNEL_DEVICE


@pytest.mark.parametrize(
    "regularizer",
    [
        Dropout(0.5),
        Dropout2d(0.5),
        DropPath(0.5),
        DropBlock2d(0.3, 3),
        DropBlock2d(0.3, 3, normalize="sample", share_channels=True),
    ],
    ids=repr,
)
def test_a_block_draws_one_mask(kernels, regularizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": regularizer})
    x = torch.rand(8, 6, 9, 9, device=KERNEL_DEVICE) + 0.5
    other = x.flip(0).requires_grad_()
    before = kernels.launched
    with attached.same_masks():
        y = model(x)
        again = model(x)
        of_other = model(other)
        (grad,) = torch.autograd.grad(of_other.sum(), other)
    assert kernels.launched > before
    dropped = y == 0
    assert dropped.any()
    assert torch.equal(again, y)
    assert torch.equal(of_other == 0, dropped)
    assert torch.equal(grad == 0, dropped)
    assert not torch.equal(model(x) == 0, dropped)
