"""Exports in training whose sizes are symbols: they run with others, and drop as much there."""

import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import Foreign, Retune, attach
from tests.cases import rest_slow
from tests.stacks import ACTIVATIONS, CONVOLUTIONS

P = 0.4
CASES = [
    (name, regularizer, rank)
    for name, regularizer in ACTIVATIONS.items()
    for rank in [regularizer.spatial or 2]
]


class Shifted(nn.Module):
    """A layer that keeps its shape and gives no zeros."""

    def __init__(self, rank):
        super().__init__()
        self.conv = CONVOLUTIONS[rank](2, 2, 1)

    def forward(self, x):
        return self.conv(x).square() + 1


def exported(net, x, *, spatial, strict):
    free = {0: torch.export.Dim("batch", min=2, max=4096)}
    if spatial:
        for axis in range(2, x.ndim):
            free[axis] = torch.export.Dim(f"edge{axis}", min=3, max=4096)  # torch 2.13 guards 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: of a module exported in training mode
        return torch.export.export(net, (x,), dynamic_shapes=(free,), strict=strict).module()


def share(y, bare, x, name):
    """The share of elements that were dropped or changed; None for what changes them all."""
    if name.startswith("Gaussian"):
        return None
    if name.startswith("StochasticDepth"):
        return (y == x).float().mean().item()
    return (y != bare if name.startswith("Disout") else y == 0).float().mean().item()


@pytest.fixture(autouse=True)
def _forget_graphs():
    yield
    torch._dynamo.reset()


@pytest.mark.every(9)
@pytest.mark.parametrize("strict", rest_slow([False, True]))
@pytest.mark.parametrize("spatial", [True, False])
@pytest.mark.parametrize(
    ("name", "regularizer", "rank"),
    rest_slow(CASES, [case for case in CASES if case[0] in ("Dropout", "StochasticDepth")]),
    ids=lambda value: str(value) if isinstance(value, str | int) else "",
)
def test_it_runs_with_other_sizes_and_drops_as_much(name, regularizer, rank, spatial, strict):
    net = nn.Sequential(Shifted(rank))
    spatial = spatial and regularizer.spatial is None  # blocks are of one map size
    if isinstance(regularizer, Retune):
        net.append(nn.Dropout(0.0))  # a layer that drops
    with attach(net, {str(len(net) - 1): regularizer}):
        program = exported(net, torch.randn(4, 2, *[8] * rank), spatial=spatial, strict=strict)
    for batch, edge in ((2, 8), (700, 8), (300, 11)) if spatial else ((2, 8), (700, 8)):
        x = torch.randn(batch, 2, *[edge] * rank)
        bare, y = net(x), program(x)
        assert y.shape == x.shape
        assert not torch.equal(y, bare) or batch == 2
        found = share(y, bare, x, name)
        if found is None or batch == 2:
            continue
        expected = (
            P
            if isinstance(regularizer, Foreign)
            else regularizer.expected_share(regularizer.values(0.0), (edge,) * rank)
        )
        # z = 4; the variance is at most that of whole samples
        assert abs(found - expected) <= 4 * (P * (1 - P) / batch) ** 0.5
