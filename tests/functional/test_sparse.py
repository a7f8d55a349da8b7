"""Dropouts of large tensors on the CPU: the distribution, values and gradients of the dense form.

Large tensors take the sparse form; here all tensors take it unless a test says otherwise.
"""

import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy import stats

from dropblock_hooks.functional import drop_block2d, drop_path, dropout, dropout2d
from dropblock_hooks.functional import sparse as kernel


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    monkeypatch.setattr(kernel, "LEAST", dict.fromkeys(kernel.LEAST, 0))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def laid(shape, order, dtype=torch.float32):
    """Random numbers of this shape whose axes lie in memory in this order."""
    x = torch.randn([shape[axis] for axis in order], dtype=dtype)
    return x.permute([order.index(axis) for axis in range(len(shape))])


def whole_blocks(mask, block):
    """Whether a NumPy mask is a union of blocks that lie inside the map."""
    rows, columns = (min(b, s) for b, s in zip(block, mask.shape, strict=True))
    covered = np.zeros_like(mask)
    for i in range(mask.shape[0] - rows + 1):
        for j in range(mask.shape[1] - columns + 1):
            if mask[i : i + rows, j : j + columns].all():
                covered[i : i + rows, j : j + columns] = True
    return (covered == mask).all()


# Distribution -----------------------------------------------------------------------------------


@hypothesis.given(
    shape=st.tuples(st.integers(1, 3), st.sampled_from([1, 3, 70]), *[st.integers(1, 12)] * 2),
    block=st.tuples(st.integers(1, 14), st.integers(1, 14)),
    order=st.permutations(range(4)),
    p=st.sampled_from([0.01, 0.1, 0.3, 0.6, 0.9]),
    share=st.booleans(),
)
@hypothesis.settings(max_examples=200, deadline=None)
def test_masks_are_unions_of_blocks_that_fit_and_are_counted(shape, block, order, p, share):
    """The scale of kept elements shows the count."""
    x = laid(shape, order).fill_(1.0)
    y = drop_block2d(x, p, block, share_channels=share, generator=seeded())
    mask = (y == 0).numpy()
    assert all(whole_blocks(plane, block) for plane in mask.reshape(-1, *shape[2:]))
    assert not share or (mask == mask[:, :1]).all()
    if not mask.all():
        assert y.max().item() == np.float32(mask.size / (mask.size - mask.sum()))
    assert y.stride() == torch.empty_like(x).stride()


@hypothesis.given(
    shape=st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 9)] * 2),
    block=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    order=st.permutations(range(4)),
    border=st.sampled_from(["inside", "across"]),
    share=st.booleans(),
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_masks_are_the_same_in_each_memory_format(shape, block, order, border, share):
    """An axis of size 1 may lie anywhere in memory, because its stride means nothing."""
    masks = []
    for x in (torch.ones(shape), laid(shape, order).fill_(1.0)):
        y = drop_block2d(x, 0.2, block, border=border, share_channels=share, generator=seeded())
        masks.append(y == 0)
    assert torch.equal(*masks)


@pytest.mark.parametrize("p", [1e-5, 0.0007, 0.01, 0.1, 0.39, 0.41, 0.9])
def test_gaps_are_geometric(p):
    """By a chi-square test of the gaps between dropped elements."""
    total = min(int(60_000 / p), 40_000_000 if p < 0.4 else 2_000_000)
    drawn = (dropout(torch.ones(total), p, generator=seeded(3)) == 0).nonzero().view(-1).numpy()
    z = (len(drawn) - total * p) / math.sqrt(total * p * (1 - p))
    assert abs(z) <= 4
    gaps = np.diff(drawn, prepend=-1)
    edges = np.unique(stats.geom.ppf(np.linspace(0, 1, 13)[1:-1], p))
    cells = np.concatenate(([0], edges, [np.inf]))
    expected = np.diff(stats.geom.cdf(cells, p)) * len(gaps)
    found = np.histogram(gaps, np.concatenate(([0.5], edges + 0.5, [np.inf])))[0]
    if len(edges) > 1:
        assert stats.chisquare(found, expected * found.sum() / expected.sum()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("size", "block", "p"),
    [
        ((14, 14), (7, 7), 0.1),
        ((9, 9), (3, 3), 0.4),
        ((8, 8), (2, 2), 0.8),
        ((6, 20), (5, 2), 0.25),
    ],
    ids=str,
)
def test_masks_are_those_of_the_dense_form(monkeypatch, size, block, p):
    """Two samples of masks: the elements dropped of a plane, of a row, and of two neighbors."""
    planes, masks = 20_000, []
    for least, seed in ((0, 1), (2**62, 2)):
        monkeypatch.setattr(kernel, "LEAST", dict.fromkeys(kernel.LEAST, least))
        y = drop_block2d(torch.ones(planes // 20, 20, *size), p, block, generator=seeded(seed))
        masks.append((y == 0).view(planes, *size))
    features = {
        "plane": lambda m: m.flatten(1).sum(1),
        "middle row": lambda m: m[:, size[0] // 2].sum(1),
        "corner": lambda m: m[:, 0, 0].long(),
        "neighbors": lambda m: (m[:, 1:, 1:] & m[:, :-1, :-1]).flatten(1).sum(1),
        "two planes": lambda m: (m[::2] & m[1::2]).flatten(1).sum(1),
    }
    for name, feature in features.items():
        a, b = (feature(mask).numpy() for mask in masks)
        values = np.unique(np.concatenate((a, b)))
        table = np.array([[(s == v).sum() for v in values] for s in (a, b)])
        table = table[:, table.sum(0) >= 20]
        assert stats.chi2_contingency(table).pvalue > 1e-4, name


# Values and gradients ---------------------------------------------------------------------------

LAYOUTS = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1), "CNHW": (1, 0, 2, 3), "WHCN": (3, 2, 1, 0)}
DROPS = {
    "elements, often": lambda x, **o: dropout(x, 0.5, **o),
    "elements, seldom": lambda x, **o: dropout(x, 0.02, **o),
    "channels, seldom": lambda x, **o: dropout2d(x, 0.1, **o),
    "channels, often": lambda x, **o: dropout2d(x, 0.6, **o),
    "samples": lambda x, **o: drop_path(x, 0.5, **o),
    "blocks, seldom": lambda x, **o: drop_block2d(x, 0.1, 7, normalize="expected", **o),
    "blocks, often": lambda x, **o: drop_block2d(x, 0.5, 2, **o),
    "blocks by sample": lambda x, **o: drop_block2d(x, 0.3, 3, normalize="sample", **o),
    "blocks across the border": lambda x, **o: drop_block2d(x, 0.2, 5, border="across", **o),
    "blocks, shared": lambda x, **o: drop_block2d(x, 0.3, 3, share_channels=True, **o),
}
each_drop = pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS.keys())


@pytest.mark.pairwise
@each_drop
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_any_memory_format(layout, of_gradient, dtype, drop):
    """NaN and Inf under the mask disappear, and the gradient is dropped and scaled alike."""
    shape = 12, 20, 9, 8
    ones = torch.ones(shape, dtype=dtype)
    factors = drop(ones, generator=seeded(1))
    dropped = factors == 0
    assert dropped.any()
    assert not dropped.all()
    x = laid(shape, LAYOUTS[layout], dtype).fill_(1.0)
    x.masked_fill_(dropped, math.nan).requires_grad_()
    y = drop(x, generator=seeded(1))
    assert torch.equal(y, factors)
    assert y.stride() == x.stride()
    gradient = laid(shape, LAYOUTS[of_gradient], dtype).fill_(1.0).masked_fill_(dropped, math.inf)
    (found,) = torch.autograd.grad(y, x, gradient.requires_grad_(), create_graph=True)
    assert torch.equal(found, factors)
    (second,) = torch.autograd.grad(found, gradient, ones)
    assert torch.equal(second, factors)
    y.add_(1)  # no view of anything


@each_drop
def test_at_most_a_byte_of_an_element_is_kept(drop):
    x, saved = torch.randn(12, 20, 9, 8, requires_grad=True), {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = drop(x)
    assert y.grad_fn is not None
    assert 0 < sum(saved.values()) < 1.01 * x.numel()  # with the scales of samples


# Transforms and modes ---------------------------------------------------------------------------


some = pytest.mark.parametrize("name", ["elements, often", "channels, often", "blocks, seldom"])


@some
def test_batches_of_gradients_are_refused(name):
    x = torch.randn(4, 20, 16, 16, requires_grad=True)
    y = DROPS[name](x)
    with pytest.raises(NotImplementedError, match="compute them one after another"):
        torch.autograd.grad(y, x, torch.randn(3, *y.shape), is_grads_batched=True)


@some
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_derivatives_are_refused(name):
    x = torch.randn(4, 20, 16, 16)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="forward"):
            DROPS[name](dual)
