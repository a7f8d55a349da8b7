"""Blocks on the CPU by their seeds: the same distribution, values and gradients as the dense form,
in any memory format, with little kept for the backward.
"""

import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy import stats
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dropblock_hooks.functional import drop_block2d, dropout, dropout1d, dropout2d
from dropblock_hooks.functional.dropblock import block_mask
from dropblock_hooks.functional.dropout import drop_channels, drop_samples
from dropblock_hooks.functional.gamma import block_gamma
from dropblock_hooks.functional.kernels import bits, cpu
from dropblock_hooks.functional.kernels.cpu import Blocks, draw_positions, takes


@pytest.fixture
def any_size(monkeypatch):
    """Seeds, however small the tensor is."""
    monkeypatch.setattr(cpu, "LEAST", dict.fromkeys(cpu.LEAST, 0))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def laid(shape, order, dtype=torch.float32):
    """Random numbers of this shape whose axes lie in memory in this order."""
    x = torch.randn([shape[axis] for axis in order], dtype=dtype)
    return x.permute([order.index(axis) for axis in range(len(shape))])


def mask_by_boxes(shape, edges, first):
    """True in the box that begins at each of these elements, counted row by row."""
    mask = np.zeros(shape, dtype=bool)
    for flat in first:
        corner = np.unravel_index(flat, shape)
        mask[tuple(slice(c, c + e) for c, e in zip(corner, edges, strict=True))] = True
    return mask


@st.composite
def boxes(draw):
    """A shape, the edges of its blocks, and an order of its axes in memory."""
    spatial = draw(st.integers(0, 3))
    shape = [draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 5, 70]))]
    shape += [draw(st.integers(1, 9)) for _ in range(spatial)]
    edges = [1, draw(st.sampled_from([1, shape[1]]))]
    edges += [draw(st.integers(1, size)) for size in shape[2:]]
    return shape, edges, draw(st.permutations(range(len(shape))))


@hypothesis.given(boxes(), st.sampled_from([0.0, 0.003, 0.05, 0.3, 0.6, 1.0]), st.booleans())
@hypothesis.settings(max_examples=300, deadline=None)
def test_what_is_cleared_and_counted_is_the_union_of_boxes(box, chance, few):
    shape, edges, order = box
    x = laid(shape, order)
    placed = Blocks(x, edges)
    places = np.arange(math.prod(placed.grid))
    seeds = places[np.random.default_rng(0).random(len(places)) < chance]
    first = np.ravel_multi_index(np.unravel_index(seeds, placed.grid), shape)
    expected = mask_by_boxes(shape, edges, first)
    drawn = torch.from_numpy(first)
    if not few:
        kept = placed._bytes(1)
        placed._fill(placed._view(kept), drawn)
        drawn = bits.pack(kept)
    assert placed.count(drawn) == expected.sum()
    by_sample = expected.reshape(shape[0], -1).sum(1)
    assert placed.count(drawn, per_sample=True).tolist() == by_sample.tolist()
    assert (placed.mask(drawn).numpy() == expected).all()
    for y in (x.clone(), laid(shape, order[::-1])):  # a gradient may lie in another order
        before = y.clone()
        placed.clear(y, drawn)
        assert torch.equal(y, before.masked_fill(torch.from_numpy(expected), 0.0))


@hypothesis.given(boxes(), st.sampled_from([0.0, 0.01, 0.2, 0.7, 1.0]))
@hypothesis.settings(max_examples=150, deadline=None)
def test_what_is_drawn_are_whole_blocks_that_fit(box, chance):
    shape, edges, order = box
    placed = Blocks(laid(shape, order), edges)
    drawn = placed.draw(chance, seeded())
    mask = placed.mask(drawn).numpy()
    if drawn.dtype is not torch.uint8:
        corners = np.array(np.unravel_index(drawn.numpy(), shape)).T
        assert (corners + np.array(edges) <= np.array(shape)).all()
        assert len(np.unique(drawn.numpy())) == len(drawn)
        assert (mask == mask_by_boxes(shape, edges, drawn.tolist())).all()
    if chance in (0.0, 1.0):
        assert mask.all() if chance else not mask.any()


CHANCES = [1e-5, 0.0007, 0.01, 0.1, 0.39, 0.41, 0.9]


@pytest.mark.parametrize("chance", CHANCES)
def test_gaps_are_geometric(chance):
    """By a chi-square test of the gaps between positions against the geometric distribution."""
    total = min(int(60_000 / chance), 40_000_000 if chance < 0.4 else 2_000_000)
    drawn = draw_positions(total, chance, seeded(3)).numpy()
    assert drawn.dtype == np.int64
    assert (np.diff(drawn) > 0).all()
    assert drawn[0] >= 0
    assert drawn[-1] < total
    z = (len(drawn) - total * chance) / math.sqrt(total * chance * (1 - chance))
    assert abs(z) <= 4
    gaps = np.diff(drawn, prepend=-1)
    edges = np.unique(stats.geom.ppf(np.linspace(0, 1, 13)[1:-1], chance))
    cells = np.concatenate(([0], edges, [np.inf]))
    expected = np.diff(stats.geom.cdf(cells, chance)) * len(gaps)
    found = np.histogram(gaps, np.concatenate(([0.5], edges + 0.5, [np.inf])))[0]
    if len(edges) > 1:
        assert stats.chisquare(found, expected * found.sum() / expected.sum()).pvalue > 1e-4


@pytest.mark.parametrize(("total", "chance"), [(1, 0.3), (5, 0.05), (40, 0.02), (64, 0.2)])
def test_short_rows_have_the_same_chance_everywhere(total, chance):
    """Where the first draw of gaps is often too short, and at both ends."""
    rounds, generator = 5_000, seeded(5)
    counts = torch.zeros(total)
    for _ in range(rounds):
        counts[draw_positions(total, chance, generator)] += 1
    z = (counts / rounds - chance) / math.sqrt(chance * (1 - chance) / rounds)
    assert z.abs().max() <= 4.5


def test_too_few_gaps_are_drawn_on(monkeypatch):
    monkeypatch.setattr(cpu, "_reserve", lambda mean: 1)
    drawn = draw_positions(100_000, 0.01, seeded()).numpy()
    assert abs(len(drawn) - 1000) <= 4 * math.sqrt(1000)
    assert (np.diff(drawn) > 0).all()


@pytest.mark.parametrize("chance", [1e-300, 5e-324, 1e-17])
def test_the_smallest_chances_draw_nothing(chance):
    assert len(draw_positions(10_000, chance, seeded())) == 0


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
@pytest.mark.parametrize("form", ["seeds", "bits"])
def test_masks_are_those_of_the_dense_form(monkeypatch, size, block, p, form):
    """Two samples of masks: the elements dropped of a plane, of a row, and of two neighbours."""
    planes = 20_000
    monkeypatch.setattr(Blocks, "_few", lambda self, number: form == "seeds")
    x, gamma = torch.zeros(planes // 20, 20, *size), block_gamma(p, size, block)
    placed = Blocks(x, (1, 1, *block))
    ours = placed.mask(placed.draw(gamma, seeded(1))).view(planes, *size)
    dense = block_mask(x, gamma, block, generator=seeded(2)).view(planes, *size)
    features = {
        "plane": lambda m: m.flatten(1).sum(1),
        "middle row": lambda m: m[:, size[0] // 2].sum(1),
        "corner": lambda m: m[:, 0, 0].long(),
        "neighbours": lambda m: (m[:, 1:, 1:] & m[:, :-1, :-1]).flatten(1).sum(1),
        "two planes": lambda m: (m[::2] & m[1::2]).flatten(1).sum(1),
    }
    for name, feature in features.items():
        a, b = feature(ours).numpy(), feature(dense).numpy()
        values = np.unique(np.concatenate((a, b)))
        table = np.array([[(s == v).sum() for v in values] for s in (a, b)])
        table = table[:, table.sum(0) >= 20]
        assert stats.chi2_contingency(table).pvalue > 1e-4, name


LAYOUTS = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1), "CNHW": (1, 0, 2, 3), "WHCN": (3, 2, 1, 0)}


@pytest.mark.pairwise
@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("normalize", ["batch", "sample", "expected", None])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_seeds_and_bits_give_the_same(monkeypatch, layout, normalize, share):
    results = []
    for few in (True, False):
        monkeypatch.setattr(Blocks, "_few", lambda self, number, few=few: few)
        torch.manual_seed(0)
        x = laid((3, 5, 9, 8), LAYOUTS[layout]).requires_grad_()
        options = {"normalize": normalize, "share_channels": share, "generator": seeded(7)}
        y = drop_block2d(x, 0.3, 3, **options)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        results.append((y, grad, second))
        assert y.stride() == x.stride()
        assert (y == 0).any()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("few", [True, False])
def test_a_gradient_in_another_memory_format(monkeypatch, few):
    monkeypatch.setattr(Blocks, "_few", lambda self, number: few)
    x = torch.randn(2, 6, 9, 9, requires_grad=True)
    y = drop_block2d(x, 0.3, 3, normalize=None, generator=seeded())
    y.backward(torch.ones_like(y).to(memory_format=torch.channels_last))
    assert torch.equal(x.grad, (y != 0).float())


def saved_share(drop, x):
    """Bytes that the graph of a function holds, of those of the tensor."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = drop(x.requires_grad_())
    assert y.grad_fn is not None
    assert storages
    return sum(storages.values()) / x.untyped_storage().nbytes()


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("shape", [(8, 64, 28, 28), (8, 256, 14, 14)], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_seldom_blocks_are_kept_as_seeds(shape, memory_format):
    x = torch.randn(shape).to(memory_format=memory_format)
    assert saved_share(lambda x: drop_block2d(x, 0.1, 7), x) <= 0.01


@pytest.mark.pairwise
@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("p", [0.02, 0.1, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("block", [1, 2, 3, 7])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_at_most_a_bit_of_an_element_is_kept(memory_format, block, p, share):
    x = torch.randn(3, 50, 20, 21).to(memory_format=memory_format)
    assert saved_share(lambda x: drop_block2d(x, p, block, share_channels=share), x) <= 0.032


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("p", [0.02, 0.3, 0.5, 0.9])
def test_at_most_a_bit_of_an_element_is_kept_of_units(p):
    x = torch.randn(16, 32, 5, 7)
    for drop in (dropout, dropout2d):
        assert saved_share(lambda x, drop=drop: drop(x, p), x) <= 0.032
    assert saved_share(lambda x: dropout1d(x, p), torch.randn(64, 64, 4)) <= 0.032


@pytest.mark.parametrize("number", [1, 63, 64, 65, 1000, 4096 * 64 + 5])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_bits_keep_what_they_say(number, dtype):
    x = torch.randn(number, generator=seeded()).to(dtype)
    x[::3], x[1::7] = math.nan, math.inf
    mask = torch.rand(number, generator=seeded(1)) < 0.5
    padded = torch.zeros(8 * bits.packed_size(number), dtype=torch.uint8)
    padded[:number] = mask
    packed = bits.pack(padded)
    assert bits.count(packed) == mask.sum()
    assert torch.equal(bits.unpack(packed)[:number], mask)
    y = x.clone()
    bits.keep_(y, packed)
    assert torch.equal(y[mask].nan_to_num(9.0), x[mask].nan_to_num(9.0))
    assert (y[~mask] == 0).all()


@hypothesis.given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_bits_are_counted(numbers):
    expected = [bin(number % 2**64).count("1") for number in numbers]
    assert bits.popcount_(torch.tensor(numbers)).tolist() == expected


UNITS = {"channels": drop_channels, "samples": drop_samples}


@pytest.mark.pairwise
@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.6])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("unit", UNITS)
def test_units_in_any_layout(unit, layout, p, dtype):
    """Rows of zeros, rows that are not read, and blends: NaN in what is dropped is gone."""
    ones = laid((60, 20, 8, 9), LAYOUTS[layout], dtype).fill_(1.0).requires_grad_()
    y, count = UNITS[unit](ones, p, generator=seeded(1))
    dropped = y == 0
    assert count == dropped.sum()
    plain = UNITS[unit](ones.detach().contiguous(), p, generator=seeded(1))[0]
    assert torch.equal(dropped, plain == 0)  # whatever the layout
    assert abs(count / y.numel() - p) < 4 * math.sqrt(p * (1 - p) / 60)
    kept = torch.tensor(1 / (1 - p), dtype=torch.float32).to(dtype)
    assert torch.equal(y, torch.where(dropped, 0.0, kept))
    y.add_(1)  # no view of anything
    y.backward(torch.full_like(y, 2.0))
    assert torch.equal(ones.grad, torch.where(dropped, 0.0, 2 * kept))
    x = laid(y.shape, LAYOUTS[layout], dtype).masked_fill_(dropped, math.nan).requires_grad_()
    again = UNITS[unit](x, p, generator=seeded(1))[0]
    assert torch.equal(again == 0, dropped)
    again.backward(torch.zeros_like(y).masked_fill_(dropped, math.inf))
    assert (x.grad == 0).all()


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_dropped_of_a_summand_is_minus_zero(layout):
    x = laid((60, 20, 8, 9), LAYOUTS[layout])
    y = drop_samples(x, 0.3, summand=True, generator=seeded(1))[0]
    assert (y == 0).any()
    assert y[y == 0].signbit().all()


@pytest.mark.usefixtures("any_size")
def test_where_seeds_can_be_read():
    x = torch.randn(2, 3, 4, 4)
    assert takes(x)
    assert takes(torch.nn.Parameter(x))
    assert not takes(x.to("meta"))
    with FakeTensorMode() as mode:
        assert not takes(x)
        assert not takes(mode.from_tensor(x))
    assert not takes(x.as_subclass(type("Own", (torch.Tensor,), {})))
    seen = []
    torch.vmap(lambda t: seen.append(takes(t)) or t)(x)
    torch.func.grad(lambda t: seen.append(takes(t)) or t.sum())(x)
    assert seen == [False, True]


@pytest.mark.usefixtures("any_size")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_derivatives_take_the_same_mask():
    x, tangent = torch.randn(2, 4, 9, 9), torch.randn(2, 4, 9, 9)
    for drop in (
        lambda x: drop_block2d(x, 0.3, 3, generator=seeded()),
        lambda x: dropout2d(x, 0.5, generator=seeded()),
    ):
        y, derivative = torch.func.jvp(drop, (x,), (tangent,))
        assert torch.equal(y, drop(x))
        assert torch.equal(derivative == 0, y == 0)
        ratio = (y / x)[y != 0][0]
        assert torch.allclose(derivative, torch.where(y == 0, 0.0, tangent * ratio))


EVERY_FORM = {
    "elements, bits": lambda x: dropout(x, 0.5, generator=seeded()),
    "elements, seeds": lambda x: dropout(x, 0.02, generator=seeded()),
    "channels, seldom": lambda x: dropout2d(x, 0.1, generator=seeded()),
    "channels, often": lambda x: dropout2d(x, 0.5, generator=seeded()),
    "blocks, seeds": lambda x: drop_block2d(x, 0.1, 7, generator=seeded()),
    "blocks, bits": lambda x: drop_block2d(x, 0.5, 2, generator=seeded()),
}


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("name", EVERY_FORM)
def test_batches_of_gradients(name):
    x = torch.randn(4, 20, 16, 16, requires_grad=True)
    y = EVERY_FORM[name](x)
    grads = torch.randn(3, *y.shape)
    (batched,) = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    for grad, found in zip(grads, batched, strict=True):
        assert torch.equal(found, torch.autograd.grad(y, x, grad, retain_graph=True)[0])


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("name", EVERY_FORM)
def test_defaults_of_torch_change_nothing(name):
    x = torch.randn(4, 20, 16, 16)
    expected = EVERY_FORM[name](x)
    try:
        torch.set_default_dtype(torch.float64)
        assert torch.equal(EVERY_FORM[name](x), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        found = EVERY_FORM[name](x)
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("drop", [dropout, dropout2d, lambda x, p: drop_block2d(x, p, 3)])
def test_selective_checkpoints_that_keep_the_draw(drop, p):
    def policy(context, operation, *args, **kwargs):
        drawn = operation is torch.ops.aten.rand.default
        return CheckpointPolicy.MUST_SAVE if drawn else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    results = []
    for run in (
        lambda x: drop(x, p),
        lambda x: checkpoint(drop, x, p, use_reentrant=False, context_fn=contexts),
    ):
        torch.manual_seed(0)
        x = torch.ones(4, 20, 16, 16, requires_grad=True)
        run(x).square().sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("name", EVERY_FORM)
def test_functional_transforms(name):
    x = torch.randn(4, 20, 16, 16)
    assert not takes_inside(torch.func.functionalize, x)
    assert (torch.func.functionalize(EVERY_FORM[name])(x) == 0).any()


def takes_inside(transform, x):
    seen = []
    transform(lambda t: seen.append(takes(t)) or t)(x)
    return seen[0]
