"""DropBlock's values and gradients; its rates are in test_calibration.py.

Masks are recovered from the output: the inputs have no zeros, so a zero is a dropped element.
"""

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


def scaled(x, mask, scale):
    """NumPy's ``where(mask, 0, x * scale)``: the product in float32 or wider, rounded once."""
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32)).numpy()
    product = wide if scale is None else wide * np.asarray(scale).astype(wide.dtype)
    assert product.dtype == wide.dtype
    product = np.where(mask, 0, product).astype(wide.dtype)
    return torch.from_numpy(product).to(x.dtype)


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


# In the place of torchvision's -------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("spatial", [2, 3])
def test_paper_masks_are_distributed_as_torchvisions(spatial, p):
    """Dropped positions in the interior of planes: two samples, compared in mean and in shape.

    torchvision's γ is the paper's; with odd blocks its seeds lie as ours do.
    """
    ops = pytest.importorskip("torchvision.ops", reason="the peer itself")
    peer = {2: ops.drop_block2d, 3: ops.drop_block3d}[spatial]
    size = {2: (14, 14), 3: (7, 7, 7)}[spatial]
    block = {2: 5, 3: 3}[spatial]
    x = torch.ones(600, 8, *size)
    interior = (..., *[slice(block // 2, -(block // 2))] * spatial)
    ours, theirs = (
        (function(x, p, block, **options) == 0)[interior].flatten(2).sum(2).flatten().numpy()
        for function, options in (
            (DROP_BLOCK[spatial], {"calibration": "paper"}),
            (peer, {}),
        )
    )
    error = math.sqrt(ours.var(ddof=1) / len(ours) + theirs.var(ddof=1) / len(theirs))
    assert abs(ours.mean() - theirs.mean()) <= 4 * error
    assert stats.ks_2samp(ours, theirs).pvalue > 1e-3
