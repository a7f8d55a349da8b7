"""Disout against NumPy, its statistics, gradients and errors; its blocks are DropBlock's.

What is distorted is recovered from the output: a distortion is seldom 0 in float32 and above.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dropblock_hooks.functional import disout, drop_block2d
from dropblock_hooks.functional.dropblock import distort_blocks

pytestmark = [pytest.mark.usefixtures("form"), pytest.mark.pairwise]  # on every form of the mask

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
shared_or_not = pytest.mark.parametrize("share_channels", [False, True])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def formula(x, p, block_size, alpha, share_channels=False, seed=0):
    """``x + m * alpha * std(x) * z`` in NumPy; m and z are drawn as the function draws them."""
    generator = seeded(seed)
    ones = torch.ones_like(x, memory_format=torch.preserve_format)
    options = {"normalize": None, "share_channels": share_channels, "generator": generator}
    mask = (drop_block2d(ones, p, block_size, **options) == 0).numpy()
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    z = torch.empty(x.shape, dtype=wide.dtype).normal_(generator=generator).numpy()
    values = wide.numpy()
    spread = np.sqrt(np.mean((values.astype(np.float64) - values.mean(dtype=np.float64)) ** 2))
    return mask, np.where(mask, values + alpha * spread * z, values)


# Values -----------------------------------------------------------------------------------------


@shared_or_not
@each_dtype
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("block_size", [1, 3, (2, 5), 50], ids=str)
def test_values_are_those_of_the_formula(block_size, channels_last, dtype, share_channels):
    x = (3 * torch.randn(16, 5, 9, 14) + 2).to(dtype)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    edges = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    y, distorted = distort_blocks(x, 0.3, edges, 0.5, share_channels, seeded())
    mask, expected = formula(x, 0.3, block_size, 0.5, share_channels)
    assert 0.1 < mask.mean() < 0.5
    assert distorted == mask.sum()
    assert (y.dtype, y.stride()) == (dtype, x.stride())
    assert torch.equal(y[~mask], x[~mask])
    # std is added up in another order: some ulps of the noise, and one rounding to the dtype
    torch.testing.assert_close(y, torch.from_numpy(expected).to(dtype))


# Statistics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.01, 1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_distortion_is_normal_in_deviations_of_the_input(dtype, alpha):
    """Mean and variance at 4 standard errors, and the shape by Kolmogorov-Smirnov."""
    x = 5 * torch.rand(40, 8, 14, 14, dtype=dtype) - 1
    difference = (disout(x, 0.3, 5, alpha) - x).double()
    sample, std = difference[difference != 0].numpy(), alpha * np.std(x.double().numpy())
    n = len(sample)
    assert abs(sample.mean()) <= 4 * std / math.sqrt(n)
    assert abs(sample.var() - std**2) <= 4 * std**2 * math.sqrt(2 / n)
    assert stats.kstest(sample, stats.norm(0, std).cdf).pvalue > 1e-3


# Autograd ---------------------------------------------------------------------------------------


@each_dtype
def test_the_gradient_is_the_one_that_came(dtype):
    x = torch.randn(4, 3, 8, 8).to(dtype).requires_grad_()
    g = torch.randn(4, 3, 8, 8).to(dtype)
    disout(x, 0.4, 3).backward(g)
    assert torch.equal(x.grad, g)


# Ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [torch.full((4, 3, 8, 8), 2.0), torch.ones(1, 1, 1, 1)], ids=str)
def test_what_does_not_vary_is_not_distorted(x):
    assert torch.equal(disout(x, 1.0, 3), x)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@each_dtype
def test_what_is_not_finite_stays_and_makes_nan_of_what_is_distorted(dtype, bad):
    clean = torch.randn(4, 3, 8, 8).to(dtype)
    mask = disout(clean.double(), 0.4, 3, generator=seeded()) != clean.double()
    first = tuple((~mask).nonzero()[0])
    x = clean.clone()
    x[first] = bad
    y = disout(x, 0.4, 3, generator=seeded())
    assert y[mask].isnan().all()
    torch.testing.assert_close(y[~mask], x[~mask], rtol=0, atol=0, equal_nan=True)
