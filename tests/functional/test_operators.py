"""The operators of blocks: torch's own checks, rates and counts, on both ways to draw."""

import itertools
import math
from collections import OrderedDict

import pytest
import torch

from dropblock_hooks.compiling import TOO_OLD
from dropblock_hooks.functional import block_gamma, operators
from dropblock_hooks.functional.cells import (
    ACTIVE,
    AFFECTED,
    CALLED,
    CHANGED,
    ELEMENTS,
    EXPECTED,
    FIRST_RATE,
    RATES,
    SIZE,
    TOTAL,
    WIDTH,
    code_of,
    size_of,
)
from dropblock_hooks.functional.dropblock import expected_share, gamma_on
from tests.cases import rest_slow

pytestmark = pytest.mark.pairwise

FORMATS = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "permuted": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "expanded": lambda x: x[:, :1].expand_as(x),
}
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NORMALIZE = ["batch", "sample", "expected", None]
SHAPES = {1: (4, 6, 11), 2: (4, 6, 9, 9), 3: (2, 3, 5, 6, 7)}


WAYS = ["seeds", "uniform numbers", "kernels"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch, use_kernels):
    """How a CPU draws blocks: as a CPU, as any other device, or as a GPU."""
    if request.param != "seeds":
        monkeypatch.setattr(operators, "SEEDED", set())
    if request.param == "kernels":
        use_kernels()
    return request.param


def cells_of(p):
    """The cells of a site that is on, at this rate."""
    rows = torch.zeros(5, WIDTH, dtype=torch.float64)
    rows[RATES, FIRST_RATE] = p
    rows[CALLED, ACTIVE] = 1
    rows[ELEMENTS, TOTAL] = 1
    rows[ELEMENTS, EXPECTED] = p
    rows[CHANGED, AFFECTED] = 1
    return rows.expand(2, 8, 5, WIDTH).contiguous()


def arguments(x, p=0.3, edge=3, calibration="exact", normalize="batch", share=False):
    edges = [edge] * (x.ndim - 2)
    random = operators.randomness(x, edges, share, calibration)
    counts = torch.zeros(WIDTH, dtype=torch.float64)
    together = operators.keeps_channels_together(x)
    return x, cells_of(p), counts, random, True, edges, calibration, normalize, share, together


ALL = list(itertools.product(FORMATS, TYPES))
SOME = [("channels_last", torch.bfloat16)]


@pytest.mark.parametrize(("layout", "dtype"), rest_slow(ALL, SOME))
@pytest.mark.parametrize("way", rest_slow(WAYS), indirect=True)
def test_torchs_own_checks(layout, dtype, way):
    x = FORMATS[layout](torch.randn(SHAPES[2])).to(dtype)
    for normalize in NORMALIZE:
        method = "across" if normalize is None else "exact"
        given = arguments(x, 0.3, 3, method, normalize, share=normalize == "sample")
        torch.library.opcheck(operators.drop_blocks, given)
        torch.library.opcheck(operators.drop_blocks, (x.detach().requires_grad_(), *given[1:]))
    y, mask, factors, _ = operators.drop_blocks(*given)
    again = (y, mask, factors, given[5], given[6], given[-2], given[-1])
    torch.library.opcheck(operators.drop_blocks_again, again)
    torch.library.opcheck(
        operators.draw_mask,
        (x, torch.tensor(0.3, dtype=torch.float64), given[3], [3, 3], given[6], False),
    )


def test_torchs_own_checks_of_the_operator_for_cpus():
    """The check of the schema is left out, because the schema hides the change of the counts."""
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    x = torch.randn(SHAPES[2])
    for normalize in NORMALIZE:
        options = operators.BlockOptions((3, 3), "exact", normalize, False).text
        counts = torch.zeros(WIDTH, dtype=torch.float64)
        for seed in (None, operators.seed(x)):
            given = (x, cells_of(0.3), counts, seed, True, options)
            torch.library.opcheck(operators.drop_and_add, given, test_utils=checks[1])
        given = (x.clone().requires_grad_(), cells_of(0.3), counts, seed, True, options)
        torch.library.opcheck(operators.drop_and_add, given, test_utils=checks)
        y, draw = operators.drop_and_add(*given)
        torch.library.opcheck(operators.drop_again, (y.detach(), draw, options))


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("share_channels", [False, True])
@pytest.mark.parametrize("method", ["exact", "paper", "across"])
def test_the_operator_for_cpus_drops_as_the_other_one(method, share_channels, normalize):
    """From the same seed, results, gradients and counts are equal to the last bit."""
    x = torch.randn(SHAPES[2], requires_grad=True)
    grad = torch.randn(SHAPES[2])
    edges = (3, 2)
    seed = operators.seed(x) % 2**53
    counts = torch.zeros(WIDTH, dtype=torch.float64)
    y, _, factors, row = operators.drop_blocks(
        x, cells_of(0.3), None, seed, True, edges, method, normalize, share_channels, False
    )
    options = operators.BlockOptions(edges, method, normalize, share_channels).text
    same, draw = operators.drop_and_add(x, cells_of(0.3), counts, seed, True, options)
    assert torch.equal(same, y)
    assert torch.equal(counts, row)
    assert torch.equal(draw[1:], factors)
    wanted = torch.autograd.grad(y, x, grad)[0]
    first = torch.autograd.grad(same, x, grad.requires_grad_(), create_graph=True)[0]
    assert torch.equal(first, wanted)
    (second,) = torch.autograd.grad(first, grad, torch.ones_like(first))
    assert torch.equal(second == 0, y == 0)


def test_the_operator_for_cpus_takes_empty_tensors():
    for normalize in NORMALIZE:
        options = operators.BlockOptions((3, 3), "exact", normalize, False).text
        counts = torch.zeros(WIDTH, dtype=torch.float64)
        for shape in [(0, 3, 9, 9), (2, 0, 9, 9)]:
            x = torch.ones(shape)
            y, draw = operators.drop_and_add(x, cells_of(0.3), counts, None, True, options)
            assert y.shape == shape
            assert draw.shape == (2 + (shape[0] if normalize == "sample" else 1),)
        assert counts[ACTIVE] == 2


def drop(x, counts, p=0.3):
    options = operators.BlockOptions((3, 3), "exact", "batch", False).text
    y, _ = operators.drop_and_add(x, cells_of(p), counts, None, True, options)
    return y


def in_a_checkpoint(p, preserve_rng_state):
    """The gradient of the square of the kept elements for x = 1, and their squares."""
    x = torch.ones(4, 3, 9, 9, requires_grad=True)
    counts = torch.zeros(WIDTH, dtype=torch.float64)
    y = torch.utils.checkpoint.checkpoint(
        lambda x: drop(x, counts, p).square(),
        x,
        use_reentrant=False,
        preserve_rng_state=preserve_rng_state,
    )
    y.sum().backward()
    return x.grad, y


@pytest.mark.skipif(TOO_OLD, reason="torch before 2.9 compiles nothing, and lacks a private name")
def test_a_recomputation_with_another_seed_is_refused(monkeypatch):
    monkeypatch.setattr(operators, "_drawn_seeds", OrderedDict())  # tests begin with one seed
    grad, y = in_a_checkpoint(0.3, preserve_rng_state=True)
    torch.testing.assert_close(grad, 2 * y.detach())
    with pytest.raises(RuntimeError, match="other blocks than its forward.*preserve_rng_state"):
        in_a_checkpoint(0.3, preserve_rng_state=False)
    in_a_checkpoint(0.0, preserve_rng_state=False)  # nothing is dropped


def test_a_new_forward_in_a_backward_is_no_recomputation():
    y = torch.ones(2, requires_grad=True) * 2
    results = []
    counts = torch.zeros(WIDTH, dtype=torch.float64)
    y.register_hook(lambda grad: results.append(drop(torch.ones(4, 3, 9, 9), counts)))
    y.sum().backward()
    assert (results[0] == 0).any()


@pytest.mark.parametrize("of_gradient", FORMATS)
@pytest.mark.parametrize("of_activation", FORMATS)
@pytest.mark.parametrize("dtype", rest_slow(TYPES, [torch.float32]), ids=str)
def test_each_pair_of_formats(of_activation, of_gradient, dtype, way):
    """Results have the strides that the fake implementation promises, and the same blocks."""
    shape = SHAPES[2]
    x = FORMATS[of_activation](torch.rand(shape) + 0.5).to(dtype).requires_grad_()
    y, *_ = operators.drop_blocks(*arguments(x))
    assert y.stride() == torch.empty_like(x).stride()
    grad = FORMATS[of_gradient](torch.rand(shape) + 0.5).to(dtype)
    (back,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(back == 0, y == 0)
    kept = y != 0
    factors = back[kept] / grad[kept], (y / x.detach())[kept]
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(*factors, rtol=4 * max(eps, 1e-6), atol=0.0)


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_factors_and_counts(spatial, normalize, way):
    x = torch.ones(SHAPES[spatial])
    y, _, factors, counts = operators.drop_blocks(*arguments(x, normalize=normalize))
    dropped = (y == 0).sum()
    assert counts[AFFECTED] == dropped
    assert counts[TOTAL] == x.numel()
    assert counts[ACTIVE] == 1
    assert size_of(int(counts[SIZE])) == x.shape[2:]
    assert factors[0] == 0.3
    kept = x.numel() - dropped
    wanted = {"batch": x.numel() / kept, "expected": 1 / 0.7, None: 1.0}.get(normalize)
    if normalize == "sample":
        torch.testing.assert_close(y.flatten(1).mean(1), torch.ones(len(x)))
    else:
        torch.testing.assert_close(y.max(), torch.as_tensor(wanted, dtype=y.dtype))


@pytest.mark.parametrize("calibration", ["exact", "paper"])
@pytest.mark.parametrize(("size", "edge"), [((14, 14), 7), ((7, 7), 3), ((5, 9), 4), ((3, 3), 7)])
@pytest.mark.parametrize("p", [1e-3, 0.1, 0.4])
def test_the_realized_rate(size, edge, p, calibration, way, use_large_programs):
    """Within 4 standard errors over maps, which are independent of each other."""
    torch.manual_seed(0)
    if way == "kernels":
        use_large_programs()
    maps = 500 if way == "kernels" else 20_000  # the interpreter of Triton is slow
    x = torch.ones(maps // 10, 10, *size)
    y, *_ = operators.drop_blocks(*arguments(x, p, edge, calibration, None))
    shares = (y == 0).double().flatten(2).mean(2).flatten()
    wanted = expected_share(p, size, [edge] * 2, calibration)
    error = shares.std() / math.sqrt(maps)
    assert abs(shares.mean() - wanted) < 4 * error


def test_blocks_are_whole_and_inside(way):
    torch.manual_seed(0)
    x = torch.ones(50, 4, 8, 8)
    y, *_ = operators.drop_blocks(*arguments(x, 0.02, 3))
    dropped = (y == 0).double()
    whole = torch.nn.functional.avg_pool2d(dropped, 3, stride=1) > 0.999
    grown = torch.nn.functional.max_pool2d(
        torch.nn.functional.pad(whole.double(), (2, 2, 2, 2)), 3, stride=1
    )
    assert torch.equal(grown, dropped)
    assert dropped.any()


def test_what_is_not_finite_is_gone_where_dropped(way):
    x = torch.full((4, 4, 6, 6), torch.nan)
    x[1] = torch.inf
    x.requires_grad_()
    y, *_ = operators.drop_blocks(*arguments(x, 0.5, normalize="expected"))
    dropped = y == 0
    assert dropped.any()
    assert not y[~dropped].isfinite().any()
    (back,) = torch.autograd.grad(y, x, torch.full_like(x, torch.nan))
    assert torch.equal(back == 0, dropped)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_the_ends_of_the_range(p, way):
    x = torch.randn(3, 2, 6, 6)
    y, *_ = operators.drop_blocks(*arguments(x, p, 3))
    assert torch.equal(y, x * (1 - p))


@pytest.mark.parametrize("shape", [(0, 3, 5, 5), (2, 0, 5, 5)])
def test_an_empty_batch(shape, way):
    x = torch.empty(shape)
    y, *_, counts = operators.drop_blocks(*arguments(x))
    assert y.shape == x.shape
    assert counts[AFFECTED] == 0


def test_the_second_backward(way):
    x = torch.rand(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    y, *_ = operators.drop_blocks(*arguments(x, normalize="expected"))
    (back,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(back.sum(), x)
    kept = (y != 0).double()
    torch.testing.assert_close(second, 2 * kept / 0.7**2)


@pytest.mark.parametrize(("size", "edge"), [((14, 14), 7), ((7, 7), 3), ((5, 9, 4), 3), ((30,), 7)])
def test_the_seed_rate_on_a_device_is_that_of_the_host(size, edge):
    block = tuple(min(edge, side) for side in size)
    for p in [0.0, 1e-5, 1e-3, 0.05, 0.1, 0.37, 0.5, 0.8, 0.95, 1.0]:
        for calibration in ("exact", "paper"):
            on_device = gamma_on(torch.tensor(p, dtype=torch.float64), size, block, calibration)
            on_host = block_gamma(p, size, block, calibration)
            assert float(on_device) == pytest.approx(on_host, rel=2e-5, abs=1e-12)


def test_sizes_of_maps_as_numbers():
    for size in [(1,), (7, 7), (131_071, 2), (5, 600, 700)]:
        assert size_of(code_of(size)) == size
        assert code_of(size) < 2**53
