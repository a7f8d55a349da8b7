"""Where blocks lie: inside the map, as in the paper, or across its border."""

import math

import pytest
import torch
from torch import nn

from dropblock_hooks import Disout, DropBlock1d, DropBlock2d, DropBlock3d, attach, functional
from dropblock_hooks.functional import sparse
from dropblock_hooks.functional.dropblock import drop_blocks, places_of
from dropblock_hooks.functional.kernels import launch
from tests.cases import rest_slow

MAPS = {
    "14x14, block 7": ((14, 14), (7, 7)),
    "7x7, block 3": ((7, 7), (3, 3)),
    "5x9, block 3x5": ((5, 9), (3, 5)),
    "11, block 4": ((11,), (4,)),
    "4x5x6, block 2x3x2": ((4, 5, 6), (2, 3, 2)),
    "4x4, block 7": ((4, 4), (7, 7)),
}
RATES = [0.05, 0.1, 0.3]
# maps in a call, and calls; the interpreter of kernels is slow
WAYS = {"dense": (200, 10), "sparse": (1000, 2), "kernels": (100, 3)}
CASES = [(name, p, way) for name in MAPS for p in RATES for way in WAYS]
QUICK = [case for case in CASES if case[1] == 0.1 and (case[2] != "kernels" or "7" in case[0])]


@pytest.fixture
def use(monkeypatch, use_kernels):
    """Draw blocks in a way on a CPU."""

    def use(way):
        least = 0 if way == "sparse" else 2**62
        monkeypatch.setattr(sparse, "LEAST", dict.fromkeys(sparse.LEAST, least))
        if way == "kernels":
            use_kernels()

    return use


def chances(size, block, p, border):
    """The chance of each position to be dropped, by counting the seeds that cover it."""
    block = tuple(map(min, size, block))
    if border == "across":
        return torch.full(size, p, dtype=torch.float64)
    gamma = functional.block_gamma(p, size, block)
    number = torch.ones(size, dtype=torch.float64)
    for axis, (s, b) in enumerate(zip(size, block, strict=True)):
        cover = [sum(1 for first in range(s - b + 1) if first <= i < first + b) for i in range(s)]
        shape = [-1 if i == axis else 1 for i in range(len(size))]
        number = number * torch.tensor(cover, dtype=torch.float64).view(shape)
    return 1 - (1 - gamma) ** number


def largest_z(dropped, number, wanted):
    """The largest distance of the shares of all positions from their chances, in errors."""
    errors = (wanted * (1 - wanted) / number).sqrt()
    return ((dropped / number - wanted).abs() / errors).max()


@pytest.mark.parametrize("border", ["inside", "across"])
@pytest.mark.parametrize(("name", "p", "way"), rest_slow(CASES, QUICK))
def test_the_chance_of_each_position(name, p, way, border, use):
    torch.manual_seed(2)
    use(way)
    size, block = MAPS[name]
    maps, calls = WAYS[way]
    dropped = torch.zeros(size, dtype=torch.float64)
    method = "across" if border == "across" else "exact"
    before = launch.launched
    for _ in range(calls):
        x = torch.ones(maps // 4, 4, *size)
        y, number = drop_blocks(x, p, block, method, "batch", False)
        zeros = y == 0
        assert number == zeros.sum()
        dropped += zeros.sum((0, 1))
    assert (launch.launched > before) == (way == "kernels")
    # of the 12,000 positions of all cases, the largest distance is about 4 errors
    assert largest_z(dropped, maps * calls, chances(size, block, p, border)) < 4.5


def test_blocks_across_the_border_are_cut_blocks(kernels):
    """With one block in a map, the kernels drop a block of which a part may be outside."""
    torch.manual_seed(0)
    size, block = (6, 7), (3, 4)
    y, _ = drop_blocks(torch.ones(1, 2000, *size), 0.01, block, "across", None, False)
    shapes = set()
    for zeros in (y == 0)[0]:
        rows, columns = zeros.any(1).nonzero().view(-1), zeros.any(0).nonzero().view(-1)
        if not len(rows):
            continue
        first_row, last_row = rows[[0, -1]].tolist()
        first_column, last_column = columns[[0, -1]].tolist()
        height, width = last_row - first_row + 1, last_column - first_column + 1
        if zeros.sum() != height * width or height > 3 or width > 4:
            continue  # several blocks
        assert height == 3 or first_row == 0 or last_row == 5
        assert width == 4 or first_column == 0 or last_column == 6
        shapes.add((height, width))
    assert len(shapes) == 12


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("way", WAYS)
def test_the_backward_drops_the_same(way, layout, use):
    use(way)
    x = torch.randn(2, 3, 8, 8) + 5
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    for normalize in ("batch", "sample", "expected", None):
        y = functional.drop_block2d(x, 0.3, 3, border="across", normalize=normalize)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad == 0, y == 0)
        assert torch.allclose(y, x * grad)


@pytest.mark.parametrize("way", WAYS)
def test_disout_distorts_each_position_with_the_same_chance(way, use):
    torch.manual_seed(1)
    use(way)
    x = torch.randn(250, 4, 5, 5)
    y = functional.disout(x, 0.2, 3, border="across")
    changed = (y != x).sum((0, 1)).double()
    assert largest_z(changed, 1000, torch.full((5, 5), 0.2, dtype=torch.float64)) < 4


LAYERS = {
    "1d": (DropBlock1d(0.2, 4, border="across"), (100, 4, 9), (9,)),
    "2d": (DropBlock2d(0.2, 3, border="across"), (100, 4, 6, 6), (6, 6)),
    "3d": (DropBlock3d(0.2, 2, border="across"), (50, 4, 3, 4, 3), (3, 4, 3)),
    "shared": (DropBlock2d(0.2, 3, border="across", share_channels=True), (400, 1, 6, 6), (6, 6)),
    "Disout": (Disout(0.2, 3, border="across"), (100, 4, 6, 6), (6, 6)),
    "tokens": (
        DropBlock2d(0.2, 3, border="across", layout="NLC", grid=(6, 6), prefix_tokens=1),
        (100, 37, 4),
        (6, 6),
    ),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", LAYERS)
def test_at_layers(name, compiled):
    torch.manual_seed(0)
    item, shape, size = LAYERS[name]
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": item})
    run = torch.compile(model, backend="aot_eager") if compiled else model
    x = torch.randn(shape) + 9
    dropped = torch.zeros(size, dtype=torch.float64)
    for _ in range(5):
        changed = run(x) == 0 if name != "Disout" else run(x) != x
        if name == "tokens":
            assert not changed[:, 0].any()
            changed = changed[:, 1:].movedim(1, -1).reshape(100, 4, *size)
        dropped += changed.sum((0, 1))
    number = 5 * x.numel() // (37 * 1 if name == "tokens" else math.prod(size))
    assert largest_z(dropped, number, torch.full(size, 0.2, dtype=torch.float64)) < 4
    site = attached.sites[0]
    assert site.expected_rate == pytest.approx(0.2)
    assert site.realized_rate == pytest.approx(0.2, abs=0.03)


def test_the_seed_rate_has_a_closed_form():
    for p in (1e-9, 0.1, 0.999):
        gamma = functional.block_gamma(p, (9, 9), 3, border="across")
        assert gamma == pytest.approx(-math.expm1(math.log1p(-p) / 9), rel=1e-12)
    assert functional.block_gamma(0.0, 9, 3, border="across") == 0.0
    assert functional.block_gamma(1.0, 9, 3, border="across") == 1.0
    assert places_of((9, 5), (3, 5), "across") == [11, 9]


def test_the_papers_seed_rate_is_for_blocks_inside():
    text = "calibration='paper' is for blocks inside the map"
    with pytest.raises(ValueError, match=text):
        functional.drop_block2d(
            torch.ones(1, 1, 5, 5), 0.1, 3, calibration="paper", border="across"
        )
    with pytest.raises(ValueError, match=text):
        DropBlock2d(0.1, 3, "paper", border="across")
    with pytest.raises(ValueError, match="border must be one of 'inside', 'across', got 'over'"):
        Disout(0.1, 3, border="over")
