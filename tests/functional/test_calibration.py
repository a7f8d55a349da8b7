"""The share that is really dropped: γ against its definition, and masks against γ.

A plane is one channel of one sample; planes are independent. Each rate is compared with p by
``z = (mean share of the planes - p) / standard error``, asserted to be within 4 at a fixed seed.
"""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dropblock_hooks.functional import block_gamma, drop_block1d, drop_block2d, drop_block3d
from tests.cases import rest_slow

DROP_BLOCK = {1: drop_block1d, 2: drop_block2d, 3: drop_block3d}
RATES = (0.01, 0.1, 0.25, 0.5, 0.9)
MAPS = {
    1: [(56,), (28,), (14,), (7,), (5,), (4,), (1,)],
    2: [(56, 56), (28, 28), (14, 14), (7, 7), (5, 20), (4, 4), (1, 1)],
    3: [(7, 7, 7), (4, 4, 4), (2, 5, 10), (1, 1, 1)],
}
BLOCKS = {
    1: [1, 2, 3, 5, 7, 50],
    2: [1, 2, 3, 5, 7, (3, 5), 50],
    3: [1, 2, 3, 5, 7, (1, 3, 5), 50],
}
CASES = [(size, block) for axes in MAPS for size in MAPS[axes] for block in BLOCKS[axes]]
MARGIN = 1.1  # more planes than the standard error asks for, since it is itself estimated


def name(value):
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def clipped(size, block):
    blocks = block if isinstance(block, tuple) else (block,) * len(size)
    return tuple(min(b, s) for b, s in zip(blocks, size, strict=True))


def coverage(size, block):
    """How many blocks cover each position: every block that fits is laid down once."""
    counts = np.zeros(size, dtype=np.int64)
    for corner in np.ndindex(*(s - b + 1 for s, b in zip(size, block, strict=True))):
        counts[tuple(slice(i, i + b) for i, b in zip(corner, block, strict=True))] += 1
    return counts


def expected_share(gamma, counts):
    """``1 - mean((1 - γ)^c)``, without cancellation where γ is tiny."""
    if gamma == 1.0:
        return 1.0
    return float(-np.expm1(counts * np.log1p(-gamma)).mean())


def gamma_by_bisection(p, counts):
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_share(middle, counts) < p else (low, middle)
    return (low + high) / 2


def plane_variance(p, size, block):
    """The variance of the dropped share of one plane, exactly.

    Positions i and j are both kept with chance (1 - γ)^(c_i + c_j - c_ij), where c_ij blocks cover
    both; per axis these are overlaps of intervals, and axes multiply.
    """
    gamma = gamma_by_bisection(p, coverage(size, block))
    triples, pairs = np.ones((1, 3), dtype=np.int64), np.ones(1, dtype=np.int64)
    for s, b in zip(size, block, strict=True):
        covers = np.array([[i <= k < i + b for i in range(s - b + 1)] for k in range(s)], dtype=int)
        both = covers @ covers.T
        alone = np.diag(both)
        axis = np.stack([*np.broadcast_arrays(alone[:, None], alone[None], both)], -1)
        found, times = np.unique(axis.reshape(-1, 3), axis=0, return_counts=True)
        triples = (triples[:, None] * found[None]).reshape(-1, 3)
        pairs = np.outer(pairs, times).ravel()
    blocks = triples[:, 0] + triples[:, 1] - triples[:, 2]
    both_kept = (pairs * np.exp(blocks * np.log1p(-gamma))).sum() / pairs.sum()
    return float(both_kept - (1 - p) ** 2)


@functools.cache
def planes_for(error, p, size, block):
    """How many planes bring the standard error to `error` times p, and at least 1,000."""
    return max(1000, math.ceil(MARGIN * plane_variance(p, size, block) / (error * p) ** 2))


def draw(size, block, p, planes, channels=8, **options):
    """The masks of at least that many independent planes, true where dropped, in chunks."""
    per_chunk = max(1, 2**22 // (channels * math.prod(size)))
    while planes > 0:
        samples = min(per_chunk, math.ceil(planes / channels))
        x = torch.ones(samples, channels, *size)
        yield DROP_BLOCK[len(size)](x, p, block, normalize=None, **options).flatten(0, 1) == 0
        planes -= samples * channels


def shares_of(masks):
    return torch.cat([mask.flatten(1).sum(1) / mask[0].numel() for mask in masks]).double().numpy()


def z_score(shares, p, all_or_nothing):
    """The z-score of the mean share, and the standard error: known, or estimated from planes."""
    spread = math.sqrt(p * (1 - p)) if all_or_nothing else shares.std(ddof=1)
    error = spread / math.sqrt(len(shares))
    return (shares.mean() - p) / error, error


def opening(mask, block):
    """The union of all whole blocks that lie inside the mask and inside the map, by sums.

    Axis 0 counts planes. A block lies inside where every position of it is true; it is then laid
    down. Rectangles are done one axis at a time.
    """
    for axis, b in enumerate(block, start=1):
        sums = np.cumsum(np.insert(mask.astype(np.int64), 0, 0, axis), axis)
        ahead, behind = np.arange(b, sums.shape[axis]), np.arange(sums.shape[axis] - b)
        mask = sums.take(ahead, axis) - sums.take(behind, axis) == b
    for axis, b in enumerate(block, start=1):
        room = [(0, 0)] * mask.ndim
        room[axis] = (b, b - 1)
        sums = np.cumsum(np.pad(mask.astype(np.int64), room), axis)
        ahead, behind = np.arange(b, sums.shape[axis]), np.arange(sums.shape[axis] - b)
        mask = sums.take(ahead, axis) - sums.take(behind, axis) > 0
    return mask


RATE_CASES = [(size, block, p) for size, block in CASES for p in RATES]


@pytest.mark.every(plain=9)
@pytest.mark.parametrize(("size", "block", "p"), RATE_CASES, ids=name)
def test_realised_rate_is_p(size, block, p):
    block_in_force = clipped(size, block)
    planes = planes_for(0.019, p, size, block_in_force)
    shares = shares_of(draw(size, block, p, planes))
    z, error = z_score(shares, p, all_or_nothing=block_in_force == size)
    assert error <= 0.02 * p
    assert abs(z) <= 4, f"realised {shares.mean():.5f} ± {error:.5f} at p={p}"


@pytest.mark.every(plain=3)
@pytest.mark.parametrize(("size", "block"), CASES, ids=name)
@pytest.mark.parametrize("calibration", ["exact", "paper"])
def test_mask_is_a_union_of_whole_blocks_in_the_map(size, block, calibration):
    block_in_force = clipped(size, block)
    for p in RATES:
        mask = next(draw(size, block, p, 96, calibration=calibration)).numpy()
        assert (opening(mask, block_in_force) == mask).all()
        assert mask.any() or p < 0.1  # where 96 planes may be spared by chance


@pytest.mark.parametrize(
    ("size", "block", "p"),
    [((14, 14), (7, 7), 0.1), ((7, 7), (2, 2), 0.25), ((5, 20), (3, 5), 0.5), ((9,), (4,), 0.3)],
    ids=name,
)
def test_every_position_every_plane_and_every_overlap_follow_gamma(size, block, p):
    """Rates by position, untouched planes and the variance of planes: seeds are independent."""
    planes = 40_000
    counts = coverage(size, block)
    gamma = gamma_by_bisection(p, counts)
    masks = torch.cat(list(draw(size, block, p, planes))).double()
    rate = 1 - (1 - gamma) ** counts
    z = (masks.mean(0).numpy() - rate) / np.sqrt(rate * (1 - rate) / len(masks))
    assert np.abs(z).max() <= 5  # of up to 196 positions
    seeds = math.prod(s - b + 1 for s, b in zip(size, block, strict=True))
    untouched = (1 - gamma) ** seeds
    found = (masks.flatten(1).sum(1) == 0).double().mean().item()
    assert abs(found - untouched) <= 4 * math.sqrt(untouched * (1 - untouched) / len(masks))
    shares = masks.flatten(1).mean(1).numpy()
    squares = np.square(shares - p)
    error = squares.std() / math.sqrt(len(shares))
    assert abs(squares.mean() - plane_variance(p, size, block)) <= 4 * error


@pytest.mark.parametrize("error", rest_slow([0.1, 0.02]), ids=["se10%", "se2%"])
def test_realised_rate_is_p_where_p_is_small(error):
    """p = 1e-4: γ is 2.6e-6, which bfloat16 draws, half draws or a count in them would miss."""
    size, block, p = (56, 56), (7, 7), 1e-4
    shares = shares_of(draw(size, block, p, planes_for(error, p, size, block)))
    z, found = z_score(shares, p, all_or_nothing=False)
    assert found <= error * p * 1.1
    assert abs(z) <= 4


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    axes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 15)), min_size=1, max_size=3),
    p=st.floats(0, 1),
)
def test_gamma_solves_the_formula_anywhere(axes, p):
    """Also where p is next to 0 or to 1, on any map, with any block."""
    size, block = (tuple(edges) for edges in zip(*axes, strict=True))
    gamma = block_gamma(p, size, block)
    assert 0 <= gamma <= 1
    assume(p == 0 or p >= 1e-300)  # below, float64 itself has no digits left
    counts = coverage(size, clipped(size, block))
    assert expected_share(gamma, counts) == pytest.approx(p, rel=1e-6, abs=0)


@pytest.mark.every(plain=5)
@pytest.mark.parametrize("p", [0.01, 0.1, 0.25])
@pytest.mark.parametrize(("size", "block"), CASES, ids=name)
def test_paper_gamma_is_the_paper_formula(size, block, p):
    """``p / block² · size² / (size - block + 1)²`` (Ghiasi et al., 2018), axis by axis."""
    gamma = p
    for s, b in zip(size, clipped(size, block), strict=True):
        gamma *= s / b / (s - b + 1)
    assert block_gamma(p, size, block, "paper") == pytest.approx(min(gamma, 1.0), rel=1e-12)


PAPER_MAPS = [((56, 56), 7), ((28, 28), 7), ((14, 14), 7), ((7, 7), 7), ((7, 7), 3)]


@pytest.mark.parametrize("p", [0.1, 0.25])
@pytest.mark.parametrize(("size", "block"), PAPER_MAPS, ids=name)
def test_paper_masks_have_the_share_of_the_paper_gamma(size, block, p):
    counts = coverage(size, clipped(size, block))
    share = expected_share(block_gamma(p, size, block, "paper"), counts)
    shares = shares_of(draw(size, block, p, 8000, calibration="paper"))
    z, _ = z_score(shares, share, all_or_nothing=size == (block, block))
    assert abs(z) <= 4


def test_gamma_of_single_elements_and_of_the_whole_map_is_p():
    assert block_gamma(0.37, (9, 4), 1) == pytest.approx(0.37, rel=1e-12)
    assert block_gamma(0.37, torch.Size([9, 4]), [50, 50]) == pytest.approx(0.37, rel=1e-12)
    assert block_gamma(0.2, 14, 3) == block_gamma(0.2, (14,), (3,))


@pytest.mark.parametrize("size", [0, -3, True, (14, 0), (14, -3), (14, 2.5)])
def test_gamma_refuses_what_is_no_map(size):
    with pytest.raises(ValueError, match="size must be"):
        block_gamma(0.1, size, 3)
