"""DropBlock's values and gradients; its rates are in test_calibration.py.

Masks are recovered from the output: the inputs have no zeros, so a zero is a dropped element.
"""

import inspect
import math

import numpy as np
import pytest
import torch
from scipy import stats

from dropblock_hooks.functional import drop_block1d, drop_block2d, drop_block3d

pytestmark = [pytest.mark.usefixtures("form"), pytest.mark.pairwise]  # on every form of the mask

DROP_BLOCK = {1: drop_block1d, 2: drop_block2d, 3: drop_block3d}
SIZES = {1: (20,), 2: (9, 14), 3: (4, 6, 5)}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
NORMALIZE = ["batch", "sample", "expected", None]


def nonzero(*shape, dtype=torch.float32):
    """Normal numbers, pushed away from 0 so that scaling can't round them to it."""
    x = torch.randn(*shape)
    return (x + 0.01 * x.sign() + (x == 0)).to(dtype)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def scale_of(mask, p, normalize):
    """What kept elements are multiplied by, from the mask alone, in float64."""
    if normalize is None:
        return None
    with np.errstate(divide="ignore"):
        if normalize == "expected":
            return 1 / (1 - p)
        if normalize == "batch":
            return mask.size / (~mask).sum()
        kept = (~mask).reshape(len(mask), -1).sum(1)
        scale = mask[0].size / kept
    return scale.reshape(-1, *[1] * (mask.ndim - 1))


def to_bfloat16(x):
    """float32 rounded to the nearest bfloat16, ties to even, as a float32."""
    bits = x.view(np.uint32)
    odd = (bits >> 16) & 1
    return ((bits + 0x7FFF + odd) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def scaled(x, mask, scale):
    """NumPy's ``where(mask, 0, x * scale)``: the product in float32 or wider, rounded once."""
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32)).numpy()
    product = wide if scale is None else wide * np.asarray(scale).astype(wide.dtype)
    assert product.dtype == wide.dtype
    product = np.where(mask, 0, product).astype(wide.dtype)
    if x.dtype == torch.bfloat16:
        return torch.from_numpy(to_bfloat16(product)).to(torch.bfloat16)
    return torch.from_numpy(product.astype(np.float16) if x.dtype == torch.float16 else product)


# Values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("share_channels", [False, True])
@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_values_and_gradients_are_zero_or_scaled(spatial, dtype, normalize, share_channels):
    x = nonzero(6, 5, *SIZES[spatial], dtype=dtype).requires_grad_()
    y = DROP_BLOCK[spatial](x, 0.3, 3, normalize=normalize, share_channels=share_channels)
    g = nonzero(*x.shape, dtype=dtype)
    y.backward(g)
    mask = (y == 0).detach().numpy()
    assert y.dtype == x.grad.dtype == dtype
    assert 0.1 < mask.mean() < 0.5
    assert not share_channels or (mask == mask[:, :1]).all()
    assert torch.equal(y, scaled(x, mask, scale_of(mask, 0.3, normalize)))
    assert torch.equal(x.grad, scaled(g, mask, scale_of(mask, 0.3, normalize)))


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_half_counts_more_than_65504_elements(dtype, normalize):
    """A sum of a float16 mask overflows there: the scale would be 0, and so all values."""
    x = torch.ones(1, 1, 400, 400, dtype=dtype)
    y = drop_block2d(x, 0.1, 7, normalize=normalize)
    mask = (y == 0).numpy()
    assert (~mask).sum() > 65_504
    assert torch.equal(y, scaled(x, mask, scale_of(mask, 0.1, normalize)))


def test_the_scale_is_not_rounded_before_the_product():
    """In bfloat16 that would change a tenth of the values."""
    x = nonzero(8, 4, 14, 14, dtype=torch.bfloat16)
    y = drop_block2d(x, 0.1, 3, normalize="expected")
    rounded_first = x * torch.tensor(1 / 0.9, dtype=torch.bfloat16)
    kept = y != 0
    assert torch.equal(y[kept], (x.float() * (1 / 0.9)).bfloat16()[kept])
    assert (y[kept] != rounded_first[kept]).float().mean() > 0.05


# Everything dropped, and nothing to drop --------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-6, 1e-30, 0.0])
@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dropped_by_chance_gives_zeros(dtype, normalize, eps):
    """One plane of 2×2 under a block of 7 is dropped whole, or kept whole."""
    outcomes = set()
    for _ in range(40):
        x = nonzero(1, 1, 2, 2, dtype=dtype).requires_grad_()
        y = drop_block2d(x, 0.9, 7, eps=eps, normalize=normalize)
        y.backward(torch.ones_like(y))
        dropped = (y == 0).all().item()
        outcomes.add(dropped)
        assert y.isfinite().all()
        if dropped:
            assert torch.equal(x.grad, torch.zeros_like(x))
        else:
            kept = np.zeros(x.shape, dtype=bool)
            assert torch.equal(y, scaled(x, kept, scale_of(kept, 0.9, normalize)))
    assert outcomes == {True, False}


@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_a_sample_dropped_whole_does_not_disturb_the_others(eps):
    x = nonzero(64, 1, 2, 2).requires_grad_()
    y = drop_block2d(x, 0.5, 2, eps=eps, normalize="sample")
    y.sum().backward()
    dropped = (y == 0).flatten(1).all(1)
    assert dropped.any()
    assert not dropped.all()
    assert torch.equal(y[~dropped], x[~dropped])
    assert torch.equal(x.grad[dropped], torch.zeros_like(x[dropped]))
    assert torch.equal(x.grad[~dropped], torch.ones_like(x[~dropped]))


@pytest.mark.parametrize("block_size", [7, (7, 1), (2, 7)])
@pytest.mark.parametrize("size", [(4, 4), (2, 2), (1, 1), (1, 9)], ids=str)
def test_blocks_larger_than_the_map_are_clipped(size, block_size):
    edges = (block_size, block_size) if isinstance(block_size, int) else block_size
    clipped = tuple(min(b, s) for b, s in zip(edges, size, strict=True))
    x = nonzero(16, 8, *size)
    y = drop_block2d(x, 0.4, block_size, generator=seeded())
    assert torch.equal(y, drop_block2d(x, 0.4, clipped, generator=seeded()))
    if clipped == size:  # all or nothing
        assert set((y != 0).flatten(2).sum(2).flatten().tolist()) == {0, math.prod(size)}


# Random numbers ---------------------------------------------------------------------------------


def dropped_planes(samples, channels, p=0.3, **options):
    """Which planes are dropped (samples, channels), under blocks that cover the whole map."""
    return drop_block2d(torch.ones(samples, channels, 2, 2), p, 2, **options)[:, :, 0, 0] == 0


def assert_uncorrelated(a, b):
    """The correlation of n independent pairs has the standard error 1/√n."""
    r = np.corrcoef(a.flatten().float().numpy(), b.flatten().float().numpy())[0, 1]
    assert abs(r) <= 4 / math.sqrt(a.numel())


def test_each_sample_and_channel_has_its_own_mask():
    dropped = dropped_planes(400, 32)
    assert_uncorrelated(dropped[:, 1:], dropped[:, :-1])
    assert_uncorrelated(dropped[1:], dropped[:-1])
    per_sample = dropped.sum(1).numpy()
    observed = np.histogram(per_sample, [0, 8, 11, 33])[0]
    expected = 400 * np.diff(stats.binom.cdf([-1, 7, 10, 32], 32, 0.3))
    assert stats.chisquare(observed, expected).pvalue > 1e-4


# Blocks per axis --------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [(1, 4), (4, 1), (3, 2)], ids=str)
def test_edges_are_in_the_order_of_the_axes(block_size):
    """Every run of dropped positions is at least as long as the edge of its axis."""
    mask = (drop_block2d(torch.ones(50, 8, 12, 12), 0.1, block_size) == 0).flatten(0, 1).numpy()
    for axis, edge in enumerate(block_size, start=1):
        rows = np.moveaxis(mask, axis, -1).reshape(-1, 12)
        turns = np.diff(np.pad(rows, ((0, 0), (1, 1))).astype(int), axis=1)
        lengths = np.nonzero(turns == -1)[1] - np.nonzero(turns == 1)[1]
        assert lengths.min() == edge


# In the place of torchvision's -------------------------------------------------------------------


def peer(spatial):
    """torchvision's function; the tests against it need it."""
    ops = pytest.importorskip("torchvision.ops", reason="the peer itself")
    return {2: ops.drop_block2d, 3: ops.drop_block3d}[spatial]


both_ranks = pytest.mark.parametrize("spatial", [2, 3])


@both_ranks
def test_positional_signature_is_torchvisions(spatial):
    ours, theirs = (
        list(inspect.signature(function).parameters.values())
        for function in (DROP_BLOCK[spatial], peer(spatial))
    )
    positional = [p for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(positional) :])
    assert inspect.signature(drop_block1d) == inspect.signature(DROP_BLOCK[spatial])


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5])
@both_ranks
def test_paper_masks_are_distributed_as_torchvisions(spatial, p):
    """Dropped positions in the interior of planes: two samples, compared in mean and in shape.

    torchvision's γ is the paper's; with odd blocks its seeds lie as ours do.
    """
    size = {2: (14, 14), 3: (7, 7, 7)}[spatial]
    block = {2: 5, 3: 3}[spatial]
    x = torch.ones(600, 8, *size)
    interior = (..., *[slice(block // 2, -(block // 2))] * spatial)
    ours, theirs = (
        (function(x, p, block, **options) == 0)[interior].flatten(2).sum(2).flatten().numpy()
        for function, options in (
            (DROP_BLOCK[spatial], {"calibration": "paper"}),
            (peer(spatial), {}),
        )
    )
    error = math.sqrt(ours.var(ddof=1) / len(ours) + theirs.var(ddof=1) / len(theirs))
    assert abs(ours.mean() - theirs.mean()) <= 4 * error
    assert stats.ks_2samp(ours, theirs).pvalue > 1e-3
