"""The forms for compiled code, whose rate is a tensor, against those of eager mode and NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropblock_hooks.functional import block_gamma, drop_block2d
from dropblock_hooks.functional.dropblock import drop_blocks
from dropblock_hooks.functional.dropout import (
    drop_channels,
    drop_residual,
    drop_samples,
    drop_shape,
)
from dropblock_hooks.functional.gamma import solve_gamma
from dropblock_hooks.functional.kernels.traced import block_mask_in_graph
from dropblock_hooks.functional.masks import (
    bernoulli,
    dithered_threshold,
    keep_scale,
)
from tests.cases import rest_slow


def tensor(p):
    return torch.tensor(p, dtype=torch.float64)


@settings(max_examples=150, deadline=None)
@given(
    p=st.floats(1e-6, 1 - 1e-6),
    axes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 25)), min_size=1, max_size=2),
    calibration=st.sampled_from(["exact", "paper"]),
)
def test_gamma_is_that_of_eager_mode(p, axes, calibration):
    size, block = zip(*axes, strict=True)
    expected = block_gamma(p, size, block, calibration)
    got = solve_gamma(tensor(p), size, block, calibration).item()
    assert got == pytest.approx(expected, rel=1e-4 if p > 0.99 else 1e-6)


@pytest.mark.parametrize("size", [(4, 8, 8), (1, 1, 1), (16, 14, 14)])
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.9, 0.999])
def test_gamma_of_volumes(size, p):
    got = solve_gamma(tensor(p), size, (3, 7, 7), "exact").item()
    assert got == pytest.approx(block_gamma(p, size, (3, 7, 7)), rel=1e-5)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_gamma_is_exact_at_the_ends(p):
    assert solve_gamma(tensor(p), (14, 14), (7, 7), "exact").item() == p


def whole_blocks(mask, block):
    """Whether a NumPy mask is a union of blocks that lie inside the map."""
    rows, columns = (min(b, s) for b, s in zip(block, mask.shape, strict=True))
    covered = np.zeros_like(mask)
    for i in range(mask.shape[0] - rows + 1):
        for j in range(mask.shape[1] - columns + 1):
            if mask[i : i + rows, j : j + columns].all():
                covered[i : i + rows, j : j + columns] = True
    return (covered == mask).all()


@pytest.mark.parametrize("block", [(1, 1), (2, 2), (3, 5), (7, 7), (9, 20)])
@pytest.mark.parametrize("size", [(7, 9), (2, 3), (14, 6)])
def test_masks_are_unions_of_blocks_that_fit(size, block):
    x = torch.ones(20, 4, *size)
    gamma = solve_gamma(tensor(0.3), size, block, "exact")
    mask = block_mask_in_graph(x, gamma, block, share_channels=False).numpy()
    assert mask.shape == x.shape
    assert 0 < mask.mean() < 1
    assert all(whole_blocks(channel, block) for sample in mask for channel in sample)
    shared = block_mask_in_graph(x, gamma, block, share_channels=True)
    assert shared.shape == (20, 1, *size)


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.99])
@pytest.mark.parametrize(("size", "block"), [((14, 14), 7), ((7, 7), 7), ((5, 20), 3), ((2, 3), 5)])
def test_realized_rate(p, size, block):
    """|z| <= 4 over independent channels, with the standard error that they show."""
    n = int(min(max(4000, 40 / p), 40_000))
    x = torch.ones(n // 50, 50, *size)
    y, dropped = drop_blocks(x, tensor(p), (block, block), normalize=None)
    shares = (y == 0).double().mean((2, 3)).flatten()
    assert dropped == (y == 0).sum()
    error = shares.std().item() / len(shares) ** 0.5
    assert abs(shares.mean().item() - p) <= 4 * error


@pytest.mark.parametrize("p", [2.0**-30, 2.6e-6, 0.3, 1 - 2.0**-20])
def test_thresholds_mean_p(p):
    """Over all coins: a float32 draw alone could not have 2**-30, and is 2 % off at 2.6e-6."""
    coins = (torch.arange(2**16) + 0.5) / 2**16
    thresholds = dithered_threshold(tensor(p), coins)
    assert thresholds.double().mean().item() == pytest.approx(p, rel=1e-3 if p < 1e-9 else 1e-6)
    grains = thresholds.double() * 2**24
    assert torch.equal(grains, grains.round())


@pytest.mark.parametrize("p", [1e-5, 0.3, 0.999])
def test_draws_have_the_chance_asked_for(p):
    """|z| <= 4, independent samples of 64 draws."""
    total = 100_000 * 64
    drawn = bernoulli((100_000, 1, 64), tensor(p), torch.device("cpu")).sum().item()
    assert abs(drawn - total * p) <= 4 * (total * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_the_ends_are_exact(p):
    drawn = bernoulli((500, 3, 40), tensor(p), torch.device("cpu"))
    assert drawn.all() if p else not drawn.any()
    assert keep_scale(tensor(p)).item() == (0.0 if p else 1.0)
    x = torch.randn(6, 3, 5, 5)
    for y, dropped in (
        drop_shape(x, tensor(p), x.shape),
        drop_channels(x, tensor(p)),
        drop_samples(x, tensor(p)),
        drop_blocks(x, tensor(p), (3, 3)),
        drop_residual(x, torch.zeros_like(x), tensor(p)),
    ):
        assert torch.equal(y, torch.zeros_like(x) if p else x)
        assert dropped == (x.numel() if p else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalize", ["batch", "sample", "expected", None])
def test_values_and_dtype(dtype, normalize):
    x = torch.randn(8, 4, 9, 9, dtype=dtype)
    y, dropped = drop_blocks(x, tensor(0.3), (3, 3), normalize=normalize)
    kept = y != 0
    counts = kept.flatten(1).sum(1) if normalize == "sample" else kept.sum()
    total = x[0].numel() if normalize == "sample" else x.numel()
    scale = {"expected": tensor(1 / 0.7), None: tensor(1.0)}.get(normalize, total / counts.double())
    expected = (x.double() * scale.float().double().view(-1, 1, 1, 1)).to(dtype)
    torch.testing.assert_close(y[kept], expected[kept])
    assert y.dtype == dtype
    assert dropped == (~kept).sum()


@pytest.mark.parametrize("normalize", rest_slow(["expected", "batch", "sample", None], 0))
def test_a_number_is_compiled_without_a_break(normalize):
    """The functions themselves in compiled code: the same form as that of the sites."""
    compiled = torch.compile(
        lambda x: drop_block2d(x, 0.2, 3, normalize=normalize), backend="aot_eager", fullgraph=True
    )
    torch.manual_seed(0)
    x = torch.ones(200, 40, 9, 9, requires_grad=True)
    y = compiled(x)
    shares = (y == 0).flatten(2).float().mean(2).flatten()
    assert abs(shares.mean() - 0.2) <= 4 * shares.std() / math.sqrt(len(shares))
    y.sum().backward()
    assert torch.equal(x.grad, y)  # of ones
