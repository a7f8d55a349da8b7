"""Functions inside code that torch.compile and torch.export trace, with rates as constants."""

import math

import pytest
import torch

from dropblock_hooks import functional as f
from tests.cases import rest_slow

DROPS = {
    "drop_block2d": lambda x: f.drop_block2d(x, 0.2, 3),
    "drop_block2d, sample": lambda x: f.drop_block2d(x, 0.2, 3, normalize="sample"),
    "drop_block2d, shared": lambda x: f.drop_block2d(x, 0.2, 3, share_channels=True),
    "dropout": lambda x: f.dropout(x, 0.2),
    "dropout2d": lambda x: f.dropout2d(x, 0.2),
    "drop_path": lambda x: f.drop_path(x, 0.2),
    "stochastic_depth": lambda x: f.stochastic_depth(x, 0.2, shortcut=torch.zeros_like(x)),
}


def assert_rate(y, p=0.2):
    """|z| <= 4 over samples, which are independent."""
    shares = (y == 0).flatten(1).double().mean(1)
    assert abs(shares.mean() - p) <= 4 * shares.std() / math.sqrt(len(shares))
    assert 0 < shares.mean() < 1


@pytest.mark.parametrize("name", rest_slow(DROPS, 0))
def test_compiled_without_a_break(name):
    torch._dynamo.reset()
    compiled = torch.compile(DROPS[name], backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    for shape in ((300, 10, 9, 9), (400, 10, 9, 9), (400, 10, 7, 8)):  # batches and map sizes
        x = torch.ones(shape, requires_grad=True)
        y = compiled(x)
        assert_rate(y)
        y.backward(torch.ones_like(y))
        assert torch.equal(x.grad, y)


class Call(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("name", DROPS)
def test_exported_for_any_batch_size(name):
    batch = torch.export.Dim("batch", min=1, max=512)
    example = (torch.ones(4, 10, 9, 9),)
    program = torch.export.export(Call(DROPS[name]), example, dynamic_shapes=({0: batch},))
    torch.manual_seed(0)
    y = program.module()(torch.ones(400, 10, 9, 9))
    assert y.shape == (400, 10, 9, 9)
    assert_rate(y)
