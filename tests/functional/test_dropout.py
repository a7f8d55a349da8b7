"""Dropout of elements, channels and samples, and Gaussian noise.

Masks are recovered from the output: the inputs have no zeros, so a zero is a dropped element.
"""

import math

import pytest
import torch
from scipy import stats

from dropblock_hooks.functional import (
    drop_path,
    dropout,
    dropout1d,
    dropout2d,
    dropout3d,
    gaussian_dropout,
    gaussian_noise,
    stochastic_depth,
)

pytestmark = [pytest.mark.usefixtures("form"), pytest.mark.pairwise]  # on every form of the mask

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]

# function, shape of an input, and how many leading axes of it are decided on
DROPS = {
    "dropout": (dropout, (6, 5, 40), 3),
    "dropout1d": (dropout1d, (20, 16, 5), 2),
    "dropout2d": (dropout2d, (20, 16, 3, 4), 2),
    "dropout3d": (dropout3d, (20, 16, 2, 3, 2), 2),
    "drop_path": (drop_path, (200, 3, 4, 4), 1),
    "stochastic_depth": (stochastic_depth, (200, 3, 4, 4), 1),
}
each_drop = pytest.mark.parametrize("name", DROPS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def nonzero(*shape, dtype=torch.float32):
    """Normal numbers, pushed away from 0 so that scaling can't round them to it."""
    x = torch.randn(*shape)
    return (x + 0.01 * x.sign() + (x == 0)).to(dtype)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def in_float32(x, factor):
    """The product in NumPy, in float32 or wider, rounded once to the dtype of `x`."""
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32)).numpy()
    product = wide * factor
    assert product.dtype == wide.dtype
    return torch.from_numpy(product).to(x.dtype)


def same_bits(a, b):
    """Where two tensors are equal to the bit, so that 0.0 is not -0.0; NaN is NaN."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return (a.contiguous().view(bits) == b.contiguous().view(bits)) | (a.isnan() & b.isnan())


# Values ---------------------------------------------------------------------------------------


@each_drop
@each_dtype
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_values_and_gradients_are_zero_or_scaled(p, dtype, name):
    function, shape, decided = DROPS[name]
    x = nonzero(*shape, dtype=dtype).requires_grad_()
    y = function(x, p)
    g = nonzero(*shape, dtype=dtype)
    y.backward(g)
    mask = y == 0
    groups = mask.reshape(*shape[:decided], -1)
    assert (groups == groups[..., :1]).all()
    assert groups.any()
    assert not groups.all()
    zeros = torch.zeros_like(g)
    assert y.dtype == x.grad.dtype == dtype
    assert torch.equal(y, torch.where(mask, zeros, in_float32(x, 1 / (1 - p))))
    assert torch.equal(x.grad, torch.where(mask, zeros, in_float32(g, 1 / (1 - p))))


@each_drop
@pytest.mark.parametrize("p", [0.0005, 0.1, 0.5, 0.9])
def test_each_is_dropped_with_chance_p(p, name):
    """``|z| <= 4`` of the number of dropped elements, channels or samples."""
    function, shape, decided = DROPS[name]
    dropped = drawn = 0
    while drawn < 20_000 / p**0.5:
        x = torch.ones(400 if decided > 1 else 8000, *shape[1:])
        groups = (function(x, p) == 0).reshape(math.prod(x.shape[:decided]), -1)
        dropped += groups[:, 0].sum().item()
        drawn += len(groups)
    assert abs(dropped - drawn * p) <= 4 * math.sqrt(drawn * p * (1 - p))


def test_drop_path_can_leave_the_scale():
    x = nonzero(64, 3, 4, 4)
    y = drop_path(x, 0.5, scale_by_keep=False)
    dropped = (y == 0).flatten(1).all(1)
    assert dropped.any()
    assert not dropped.all()
    assert torch.equal(y[~dropped], x[~dropped])
    assert torch.equal(drop_path(x, 1.0, scale_by_keep=False), torch.zeros_like(x))


# Residual blocks ------------------------------------------------------------------------------


def residual(dtype, samples=200):
    """The input of a residual block and its output, with zeros, Inf and NaN in the input."""
    shortcut = nonzero(samples, 3, 4, 4, dtype=dtype)
    shortcut[:, 0, 0, 1] = math.inf
    shortcut[:, 0, 0, 2] = math.nan
    shortcut[:, 0, 0, 3] = 0.0
    return shortcut + nonzero(samples, 3, 4, 4, dtype=dtype), shortcut


@each_dtype
def test_dropped_samples_among_kept_ones_are_their_shortcuts_to_the_bit(dtype):
    block, shortcut = residual(dtype)
    dropped = stochastic_depth(torch.ones(200), 0.5, generator=seeded()) == 0
    y = stochastic_depth(block, 0.5, shortcut=shortcut, generator=seeded())
    assert same_bits(y[dropped], shortcut[dropped]).all()
    assert not same_bits(y[~dropped], shortcut[~dropped]).flatten(1).all(1).any()


@each_dtype
def test_a_kept_sample_is_the_shortcut_and_the_scaled_branch(dtype):
    shortcut = nonzero(200, 3, 4, 4, dtype=dtype)
    block = shortcut + nonzero(200, 3, 4, 4, dtype=dtype)
    y = stochastic_depth(block, 0.3, shortcut=shortcut)
    dropped = (y == shortcut).flatten(1).all(1)
    assert abs(dropped.sum() - 60) <= 4 * math.sqrt(200 * 0.3 * 0.7)
    wide = torch.promote_types(dtype, torch.float32)
    s, b = (x.to(wide).numpy() for x in (shortcut, block))
    expected = torch.from_numpy(s + (b - s) * s.dtype.type(1 / 0.7)).to(dtype)
    assert torch.equal(y[~dropped], expected[~dropped])


@pytest.mark.parametrize("mode", ["row", "batch"])
def test_modes_decide_for_each_sample_or_for_all(mode):
    shortcut = nonzero(16, 3)
    outcomes = set()
    for _ in range(40):
        y = stochastic_depth(shortcut + 1, 0.5, mode, shortcut=shortcut)
        outcomes.add((y == shortcut).all(1).sum().item())
    assert outcomes == {0, 16} if mode == "batch" else len(outcomes) > 3


# Gaussian noise -------------------------------------------------------------------------------


def assert_normal(sample, mean, std):
    """Mean and variance at 4 standard errors, and the shape by Kolmogorov-Smirnov."""
    n = sample.numel()
    sample = sample.double()
    assert abs(sample.mean() - mean) <= 4 * std / math.sqrt(n)
    assert abs(sample.var() - std**2) <= 4 * std**2 * math.sqrt(2 / n)
    assert stats.kstest(sample.numpy(), stats.norm(mean, std).cdf).pvalue > 1e-3


@pytest.mark.parametrize("std", [0.01, 1.0, 30.0])
def test_gaussian_noise_is_normal(std):
    x = torch.zeros(100_000)
    assert_normal(gaussian_noise(x, std), 0.0, std)


@pytest.mark.parametrize("p", [0.01, 0.2, 0.5, 0.9])
def test_gaussian_dropout_has_the_moments_of_dropout(p):
    std = math.sqrt(p / (1 - p))
    assert_normal(gaussian_dropout(torch.ones(100_000), p), 1.0, std)


@each_dtype
def test_noise_acts_in_float32_and_is_rounded_once(dtype):
    x = nonzero(1000, dtype=dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    noise = gaussian_noise(torch.zeros(1000, dtype=wide), 0.3, generator=seeded())
    expected = torch.from_numpy(x.detach().to(wide).numpy() + noise.numpy()).to(dtype)
    assert torch.equal(gaussian_noise(x, 0.3, generator=seeded()), expected)
    factor = gaussian_dropout(torch.ones(1000, dtype=wide), 0.3, generator=seeded()).numpy()
    y = gaussian_dropout(x, 0.3, generator=seeded())
    g = nonzero(1000, dtype=dtype)
    y.backward(g)
    assert torch.equal(y, in_float32(x, factor))
    assert torch.equal(x.grad, in_float32(g, factor))
