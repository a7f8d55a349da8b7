"""Triton kernels against the torch operations that they replace.

Triton's interpreter runs them on a CPU. On a machine with a GPU they run there.

`test_operators` runs the operators of compiled code with the kernels of blocks; `test_launches`
counts them.
"""

import contextlib
import gc
import itertools
import math
import random
import subprocess
import sys
import types

import pytest
import torch
from scipy import stats
from torch import nn

from dropblock_hooks import HookWarning, functional
from dropblock_hooks._torch import COMPILING
from dropblock_hooks.functional import dropblock, gradients, measures, operators
from dropblock_hooks.functional.dropout import drop_units
from dropblock_hooks.functional.kernels import launch
from dropblock_hooks.functional.masks import generator_on
from tests.cases import rest_slow
from tests.conftest import KERNEL_DEVICE

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORMATS = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1) if x.ndim > 2 else x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim > 1 else x,
    "sliced": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand_as(x) if x.ndim else x,
}
SHAPES = [(), (5,), (3, 7), (2, 5, 9), (4, 3, 5, 6), (2, 3, 4, 5, 3)]
VALUES = {
    "normal": lambda x: x,
    "large": lambda x: x * 1e4,
    "small": lambda x: x * 1e-4,
    "Inf": lambda x: torch.where(_one_of(x), math.inf, x),
    "NaN": lambda x: torch.where(_one_of(x), math.nan, x),
    "zero": torch.zeros_like,
}


def drop_blocks(x, p, edges, normalize="batch", share_channels=False):
    return dropblock.drop_blocks(x, p, edges, "exact", normalize, share_channels)


def blocks_of_3(x, p):
    return drop_blocks(x, p, [3, 3])[0]


def _one_of(x):
    place = torch.zeros(x.numel(), dtype=torch.bool)
    place[x.numel() // 2] = True
    return place.view(x.shape)


def tensors(number, shapes=SHAPES, values=VALUES, types=TYPES):
    """A sample of tensors of all kinds, the same ones each time, by readable names."""
    cases = list(itertools.product(shapes, FORMATS, values, types))
    chosen = random.Random(0).sample(cases, number)
    for shape, layout, value, dtype in chosen:
        torch.manual_seed(len(shape))
        x = FORMATS[layout](VALUES[value](torch.randn(shape))).to(dtype)
        yield f"{shape} {layout} {value} {dtype}", x


@pytest.fixture
def both(kernels, monkeypatch):
    """Run a function with torch operations, and then with kernels, of which some must start."""

    def run(function, *args, **options):
        monkeypatch.setattr(launch, "DEVICES", set())
        dense = function(*args, **options)
        monkeypatch.setattr(launch, "DEVICES", {KERNEL_DEVICE})
        before = launch.launched
        fast = function(*args, **options)
        assert launch.launched > before
        return dense, fast

    return run


def same(name, dense, fast, ulps=1):
    """Check that two lists of results are equal up to the rounding of their types."""
    for a, b in zip(dense, fast, strict=True):
        assert a.dtype == b.dtype or not a.is_floating_point(), name
        # Triton's interpreter cuts the digits of bfloat16 off, where a GPU rounds
        eps = max(torch.finfo(a.dtype).eps, 1e-6) if a.is_floating_point() else 0
        close = torch.allclose(a, b.to(a.dtype), rtol=2 * ulps * eps, atol=1e-12, equal_nan=True)
        assert close, (name, a, b)


# bounds ---------------------------------------------------------------------------------------

BOUNDS = [(-0.5, 0.5), (None, 0.25), (-0.25, None), (-1e30, 1e30), (1e6, None)]
SCALES = [1.0, 8.0, torch.tensor(1024.0, device=KERNEL_DEVICE)]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_clamp(bounds, both):
    types_of = [torch.float32, torch.bfloat16, torch.float16]
    for (name, x), scale in zip(tensors(14, types=types_of), itertools.cycle(SCALES)):
        if max(bound or 0.0 for bound in bounds) > 1e5 and isinstance(scale, torch.Tensor):
            continue  # the torch operations can't limit a bound that they don't read
        dense, fast = both(gradients.clamp_measured, x, *bounds, scale)
        assert dense[0].stride() == fast[0].stride(), name
        same(name, [dense[0], dense[1]], [fast[0], fast[1]])
        if dense[2] < math.inf:
            same(name, [dense[2].double()], [fast[2]])
        else:
            assert not fast[2] < math.inf, name


def test_a_bound_beyond_the_type_is_its_largest_value(both):
    x = torch.tensor([-3.0, 0.5, math.inf, math.nan], dtype=torch.float16)
    dense, fast = both(gradients.clamp_measured, x, 1e6, None, 1.0)
    assert fast[0][:2].tolist() == [torch.finfo(torch.float16).max] * 2
    same("1e6", dense[:2], fast[:2])


@pytest.fixture(params=rest_slow(["one kernel", "two kernels"]))
def steps(request, monkeypatch):
    """Small tensors are clipped in one step, or in several."""
    if request.param == "one kernel":
        yield
        return
    from dropblock_hooks.functional.kernels import clip

    caches = (clip.units_of, clip._plan)
    monkeypatch.setattr(clip, "_SIZE", 64)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("per", ["tensor", "sample", "channel"])
def test_clip(per, both, steps):
    types_of = [torch.float32, torch.bfloat16, torch.float16]
    shapes = SHAPES if per != "channel" else SHAPES[2:]
    for (name, x), scale in zip(tensors(14, shapes, types=types_of), itertools.cycle(SCALES)):
        dense, fast = both(gradients.clip_measured, x, 0.5, 2.0, per, scale)
        assert dense[0].stride() == fast[0].stride(), name
        norms = dense[2].reshape(-1)
        same(name, [dense[0], dense[1], norms], [fast[0], fast[1], fast[2]])


@pytest.mark.parametrize("neighbor", [math.inf, math.nan, 1e38, 1e-30], ids=str)
@pytest.mark.parametrize("per", ["sample", "channel"])
def test_the_norm_of_a_unit_does_not_depend_on_its_neighbors(per, neighbor, both, steps):
    """One program reads units of very different sizes, and one unit with an extreme value."""
    x = torch.randn(5, 3, 4)
    units = x if per == "sample" else x.transpose(0, 1)
    units[0, 0, 0] = neighbor
    units[1] *= 1e20
    units[2] *= 1e-20
    dense, fast = both(gradients.clip_measured, x, 1e-21, 2.0, per, 1.0)
    norms = dense[2].reshape(-1)
    same(per, [dense[0], dense[1], norms], [fast[0], fast[1], fast[2]])
    assert norms[1:].isfinite().all()


def test_clip_by_weights(both, steps):
    types_of = [torch.float32, torch.bfloat16, torch.float16]
    for (name, x), scale in zip(tensors(14, types=types_of), itertools.cycle(SCALES)):
        weights = torch.randn(x.shape) * 0.1
        parameter = nn.Parameter(weights.to(x.dtype))
        given = x, parameter, 0.1, 1e-2, 2.0, scale
        dense, fast = both(gradients.clip_adaptive_measured, *given)
        norms = dense[2].reshape(-1)
        same(name, [dense[0], dense[1], norms], [fast[0], fast[1], fast[2]])


@pytest.mark.parametrize(("numel", "number"), [(4096, 1), (4097, 2)])
def test_a_small_gradient_is_clipped_by_one_kernel(numel, number, kernels):
    x = torch.ones(numel, device=KERNEL_DEVICE)
    before = launch.launched
    gradients.clip_measured(x, 1.0, 2.0, "tensor")
    assert launch.launched == before + number


def test_squares_do_not_overflow(both):
    x = torch.full((3, 50), 1e30)
    dense, fast = both(gradients.clip_measured, x, 1e30, 2.0, "tensor")
    same("1e30", dense[:2], fast[:2])
    assert fast[2].item() == pytest.approx(1e30 * 150**0.5)
    _, fast = both(gradients.clip_measured, x, 1e-5, 2.0, "tensor")  # a factor below 1e-30
    assert fast[0].norm().item() == pytest.approx(1e-5, rel=1e-4)
    tiny = torch.full((3, 50), 1e-30)
    _, fast = both(gradients.clip_measured, tiny, 1e-31, 2.0, "tensor")
    assert fast[0].norm().item() == pytest.approx(1e-31, rel=1e-4)


def test_large_tensors_have_several_programs(both):
    x = torch.randn(3, 9001)
    for per in ("tensor", "sample"):
        dense, fast = both(gradients.clip_measured, x, 1.0, 2.0, per)
        same(per, [*dense[:2], dense[2].reshape(-1)], fast)


# statistics -----------------------------------------------------------------------------------


def sums_of(x, scale):
    state = {
        "sums": torch.zeros(measures.BINS + 43, dtype=torch.float64),
        "largest": torch.zeros((), dtype=torch.float64),
        "all_values": 0,
    }
    for _ in range(2):
        measures.add_measured(state, x, scale, (-27, 14))
    return state


def test_moments(both):
    for (name, x), scale in zip(tensors(16), itertools.cycle(SCALES)):
        dense, fast = both(sums_of, x, scale)
        size = max(float(dense["sums"][measures.NORMS]), 1e-30)
        tolerance = {"rtol": 1e-5, "atol": 1e-5 * size}
        assert torch.allclose(dense["sums"], fast["sums"], **tolerance), (name, dense, fast)
        assert torch.allclose(dense["largest"], fast["largest"], rtol=1e-6), name
        assert dense["all_values"] == fast["all_values"]


def test_the_deviation_is_right_where_the_mean_is_large(both):
    x = torch.randn(2, 6000) * 1e-2 + 100
    sums = both(sums_of, x, 1.0)[1]["sums"]
    count = sums[measures.COUNT]
    mean = sums[measures.SUM] / count
    deviation = (sums[measures.SQUARES] / count - mean * mean).sqrt()
    assert deviation.item() == pytest.approx(x.double().std(correction=0).item(), rel=1e-3)


def test_sums_of_squares_do_not_overflow(both):
    x = torch.full((2, 3000), 1e30)
    dense, fast = both(sums_of, x, 1.0)
    same("1e30", [dense["sums"]], [fast["sums"]])


def test_living_channels(both):
    for name, x in tensors(14, SHAPES[2:]):
        x = x.clone()
        x[:, 1] = 0

        def flags(x, zero):
            state = {}
            measures.add_alive(state, x, zero)
            return state["alive"]

        for zero in (0.0, 0.5):
            dense, fast = both(flags, x, zero)
            assert torch.equal(dense, fast), name


def numbers_of_call(outputs, given):
    """The numbers of a call of a layer, which a Watchdog keeps."""
    found = measures.largest_of_call(outputs, given)
    if found is None:
        worst, positive = measures.extremes(outputs)
        # on a CPU, it is not computed if all values are finite
        positive = worst if positive is None else positive
        found = measures.together([worst, positive, measures.norm_of_arguments(given)])
    return found.tolist()


def test_numbers_that_are_finite_if_all_values_are(both):
    types_of = [torch.float32, torch.bfloat16, torch.float16]
    for name, x in tensors(14, types=types_of):
        mask = torch.tensor([-math.inf, 1.0])
        empty = torch.empty(0)
        for outputs, given in (
            ([x], []),
            ([x], [x]),
            ([mask], [mask]),
            ([x, x], [mask, x]),
            ([x, mask], [x, mask, mask]),
            ([empty, x], [empty, empty, mask]),
        ):
            dense, fast = both(numbers_of_call, outputs, given)
            assert [a < math.inf for a in dense] == [b < math.inf for b in fast], name
            if dense[0] < math.inf:
                largest = max(x.abs().amax().item() for x in outputs if x.numel())
                assert fast[0] == pytest.approx(largest), name


@pytest.fixture
def three_ways(both, monkeypatch):
    """Run a function with torch operations that read tensors, with others, and with kernels.

    On a GPU, torch operations decide without reading a tensor. Here they do so on the CPU.
    """

    def run(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(launch, "DEVICES", set())
            patch.setattr(measures, "READ", set())
            not_reading = function(*args)
        reading, fast = both(function, *args)
        return reading, not_reading, fast

    return run


@pytest.mark.parametrize("on", [(0.0, 1.0), (1.0, 0.0)], ids=["on in training", "on in evaluation"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_statistics_of_compiled_code(on, training, three_ways):
    def run(calls):
        torch.manual_seed(0)
        state = torch.zeros(measures.SUMS + measures.BINS + 43, dtype=torch.float64)
        state[:2] = torch.tensor(on)
        alive = torch.zeros(6, dtype=torch.bool)
        batches = torch.zeros(3, 6, dtype=torch.float64)
        for i in range(4):
            x = torch.randn(2, 6, 5, 5).relu()
            x[:, 2] = 0
            if i == 2:
                x[0, 0] = math.nan
            scale = None if i % 2 else torch.tensor(16.0)
            given = scale, training, calls, 3, -27, 14, state, alive, batches
            measures.add_statistics(x, x, x, *given)
        return state, alive, batches

    for calls in (True, False):
        reading, not_reading, fast = three_ways(run, calls)
        same("with reading", reading, fast, ulps=10)
        same("without reading", not_reading, fast, ulps=10)
        state, alive, _ = reading
        assert alive.any() == bool(on[training])
        assert state[measures.SUMS :].any() == bool(on[training])


@pytest.mark.parametrize(
    ("on", "bad"),
    [
        ((1.0, 1.0), None),
        ((1.0, 1.0), "output"),
        ((1.0, 1.0), "input"),
        ((1.0, 1.0), "mask"),
        ((0.0, 1.0), "output"),
        ((0.0, 0.0), None),
    ],
    ids=str,
)
def test_notes_of_compiled_code(on, bad, three_ways):
    def run(training, bounds, distance):
        torch.manual_seed(0)
        state = torch.zeros(measures.WATCHED, dtype=torch.float64)
        first = [measures.FIRST_BAD, measures.FIRST_MADE, measures.FIRST_BAD_GRADIENT]
        state[[*first, measures.FIRST_WORSE]] = math.inf
        state[:2] = torch.tensor(on)
        state[measures.DISTANCE] = distance
        of_gradients = state.clone()
        alive = torch.zeros(6, dtype=torch.bool)
        for i in range(7 if distance else 4):
            x = torch.rand(2, 6, 5)
            given = torch.randn(2, 6)
            mask = torch.randn(5)
            grad = torch.randn(2, 6)
            if i >= (4 if distance else 2) and bad in ("output", "input"):
                x[0, 0, 0] = math.nan
                grad[0, 0] = math.inf
            if i >= (4 if distance else 2) and bad == "input":
                given[0] = math.nan
            if bad == "mask":
                mask[0] = -math.inf
            measures.add_watched([x, x[:1]], [given, mask], x, training, bounds, state, alive)
            scale = None if i % 2 else torch.tensor(16.0)
            measures.add_watched_gradient(grad, scale, training, of_gradients)
        return state, of_gradients, alive

    for training in (True, False):
        dense, not_reading, fast = three_ways(run, training, [0.0, 1.0], 0)
        same("with reading", dense, fast, ulps=10)
        same("without reading", not_reading, fast, ulps=10)
        if on[training]:
            assert dense[0][measures.MEASURED] == dense[1][measures.GRADIENTS] == 4
    dense, not_reading, fast = three_ways(run, True, [], 3)
    same("with reading", dense, fast, ulps=10)
    same("without reading", not_reading, fast, ulps=10)
    if on[1]:
        state, of_gradients, _ = dense
        assert state[measures.TURN] == of_gradients[measures.TURN] == 7
        # the calls 5 and 7 are not measured
        assert state[measures.MEASURED] == of_gradients[measures.GRADIENTS] == 5
        assert state[measures.FIRST_BAD] == {None: math.inf, "mask": math.inf}.get(bad, 5)


MEASURED = (1, 2, 3, 4, 6, 8, 9)  # of 9 calls, with a distance of 3
BAD = (5, 6, 7)  # calls with NaN or Inf, of which only the sixth is measured


def rows_of(values, is_bad, keep):
    """The rows of calls: their numbers and values. There are none after the first bad one."""
    last = BAD[0] if is_bad else 9
    rows = [[call, values[call - 1]] for call in MEASURED if call <= last][-keep:]
    return torch.tensor([[0, 0]] * (keep - len(rows)) + rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("is_on", "is_bad", "keep"),
    [(True, True, 1), (True, True, 3), (True, False, 1), (True, False, 3), (False, True, 3)],
)
def test_rows_of_compiled_code(is_on, is_bad, keep, three_ways):
    torch.manual_seed(0)
    outputs = torch.randn(9, 2, 3)
    grads = torch.randn(9, 2, 3)
    scales = [1.0 if i % 2 else 16.0 for i in range(9)]

    def run():
        state = torch.zeros(measures.WATCHED + 4 * keep, dtype=torch.float64)
        first = [measures.FIRST_BAD, measures.FIRST_MADE, measures.FIRST_BAD_GRADIENT]
        state[[*first, measures.FIRST_WORSE]] = math.inf
        state[1] = is_on
        state[measures.DISTANCE] = 3
        of_gradients = state.clone()
        for i in range(9):
            bad = math.nan if is_bad and i + 1 in BAD else 1.0
            measures.add_watched([outputs[i] * bad], [], None, True, [], state, None)
            scale = torch.tensor(scales[i])
            measures.add_watched_gradient(grads[i] * bad, scale, True, of_gradients)
        return state, of_gradients

    peaks = [x.abs().max().item() for x in outputs]
    norms = [(g.norm() / scale).item() for g, scale in zip(grads, scales, strict=True)]
    begin = measures.WATCHED
    middle = begin + 2 * keep
    for state, of_gradients in three_ways(run):
        rows = state[begin:middle].view(keep, 2)
        assert not state[middle:].any()
        rows_of_gradients = of_gradients[middle:].view(keep, 2)
        assert not of_gradients[begin:middle].any()
        if is_on:
            torch.testing.assert_close(rows, rows_of(peaks, is_bad, keep), rtol=1e-6, atol=0)
            expected = rows_of(norms, is_bad, keep)
            torch.testing.assert_close(rows_of_gradients, expected, rtol=1e-6, atol=0)
        else:
            assert not rows.any()
            assert not rows_of_gradients.any()


def live_tensors():
    gc.collect()  # tensors of other tests
    return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())


def test_no_memory_of_compiled_code_lives_on(kernels, monkeypatch):
    """A CUDA graph is an error if memory of its first run is still in use afterwards."""
    monkeypatch.setattr(launch, "_thread", launch._Thread())
    x = torch.randn(2, 6, 5, 5)
    watched = torch.zeros(measures.WATCHED, dtype=torch.float64)
    statistics = torch.zeros(measures.SUMS + measures.BINS + 43, dtype=torch.float64)
    alive = torch.zeros(6, dtype=torch.bool)
    batches = torch.zeros(3, 6, dtype=torch.float64)
    launched = launch.launched
    before = live_tensors()
    measures.add_watched([x], [x, x], x, True, [], watched, alive)
    measures.add_watched_gradient(x, None, True, watched)
    measures.add_statistics(x, x, x, None, True, True, 1, -27, 14, statistics, alive, batches)
    measures.add_measured_gradient(x, None, True, 1, -27, 14, statistics)
    assert launch.launched > launched
    assert live_tensors() == before


# dropout of elements and units ----------------------------------------------------------------

DROPOUTS = {
    "elements": (functional.dropout, 4, lambda x: x),
    "channels": (functional.dropout2d, 4, lambda x: x[:, :, :1, :1]),
    "samples": (functional.drop_path, 4, lambda x: x[:, :1, :1, :1]),
    "channels of volumes": (functional.dropout3d, 5, lambda x: x[:, :, :1, :1, :1]),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_units_are_dropped_as_a_whole_in_both_directions(name, kernels):
    function, ndim, one = DROPOUTS[name]
    shape = (6, 5, 3, 7, 2)[:ndim]
    for layout, dtype in zip(FORMATS, itertools.cycle(TYPES), strict=False):
        x = FORMATS[layout](torch.randn(shape) + 3).to(dtype).detach().requires_grad_()
        before = launch.launched
        y = function(x, 0.4)
        y.backward(FORMATS["channels_last"](torch.ones(shape, dtype=dtype)))
        assert launch.launched > before
        assert y.stride() == torch.empty_like(x).stride()
        mask = (y != 0).to(dtype)
        assert torch.equal(mask, one(mask).expand_as(mask))
        factor = 1 / 0.6
        assert torch.allclose(y, x * mask * factor, rtol=2e-2 if dtype.itemsize == 2 else 1e-6)
        assert torch.allclose(x.grad, mask * factor, rtol=2e-2 if dtype.itemsize == 2 else 1e-6)


@pytest.mark.parametrize("axes", [None, 1, 2])
def test_dropped_elements_are_counted(axes, kernels):
    for layout in FORMATS.values():
        y, dropped = drop_units(layout(torch.ones(6, 5, 3, 7)), 0.4, axes)
        assert dropped == (y == 0).sum()


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropped_inf_and_nan_disappear(name, kernels):
    function, ndim, _ = DROPOUTS[name]
    for value in (math.inf, math.nan):
        x = torch.full((8, 5, 2, 2, 2)[:ndim], value)
        y = function(x, 0.5)
        dropped = y == 0
        assert 0 < dropped.sum() < dropped.numel()
        assert not y[~dropped].isfinite().any()
    assert torch.equal(function(x, 1.0), torch.zeros_like(x))


def assert_chance(events, chance):
    """Check by an exact binomial test at 1e-4 that independent events have a chance."""
    assert stats.binomtest(int(events.sum()), events.numel(), chance).pvalue > 1e-4


@pytest.mark.parametrize("p", [1e-4, 0.1, 0.97])
def test_elements_are_dropped_independently_at_the_rate(p, large_programs):
    """The rate of 400,000 elements, and that of pairs with a distance of 1 to 8, each at 1e-4.

    The numbers of eight elements come from one draw. For p = 0.1, the test finds a rate that is
    larger by 2.5 % in 9 of 10 runs, and pairs that are dropped together 12 % more often. For 1e-4
    it finds a rate that is twice as large, and for 0.97 one that is larger by 0.15 %.
    """
    torch.manual_seed(1)
    y, dropped = drop_units(torch.ones(400_000), p)
    zeros = y == 0
    assert dropped == zeros.sum()
    assert_chance(zeros, p)
    for distance in (1, 2, 4, 8):
        pairs = zeros.view(-1, 2, distance)
        assert_chance(pairs.all(1), p**2)


def test_a_rate_between_two_steps_is_rounded_at_random(large_programs):
    """A number of 16 bits decides, so the steps of a rate are 2^-16.

    Of 4 million elements, 24 are dropped on average. They would be 0 or 61 if the rate were always
    rounded down or up. The test finds the first for certain, and the second in 98 of 100 runs.
    """
    torch.manual_seed(1)
    p = 0.4 / 2**16
    _, dropped = drop_units(torch.ones(4_000_000), p)
    assert stats.binomtest(int(dropped), 4_000_000, p).pvalue > 1e-4


def test_channels_are_dropped_at_the_rate(kernels):
    """Of 20,000 channels, at 1e-4: finds a rate that is larger by 6 % in 9 of 10 runs."""
    torch.manual_seed(1)
    y = functional.dropout2d(torch.ones(200, 100, 1, 1), 0.3)
    assert_chance(y == 0, 0.3)


# blocks ---------------------------------------------------------------------------------------

MAPS = {
    "1d": ((2, 3, 17), 5),
    "a wide row": ((1, 2, 200), 20),
    "2d": ((2, 3, 9, 9), 3),
    "an even block": ((2, 3, 8, 11), 4),
    "the whole map": ((2, 6, 4, 4), 7),
    "a tall block": ((1, 2, 20, 12), 11),
    "65 columns": ((1, 2, 3, 65), 2),
    "130 columns": ((1, 1, 5, 130), 5),
    "3d": ((2, 2, 4, 5, 6), 2),
}


def blocks_of(mask, block):
    """The positions of the whole blocks inside a mask of a map, from the mask alone."""
    edges = [min(block, size) for size in mask.shape]
    windows = mask
    for axis, edge in enumerate(edges):
        windows = windows.unfold(axis, edge, 1)
    return windows.flatten(len(edges)).all(-1), edges


def grown(starts, edges, shape):
    """The mask that blocks from these positions make."""
    mask = torch.zeros(shape, dtype=torch.bool)
    for start in starts.nonzero().tolist():
        place = tuple(slice(at, at + edge) for at, edge in zip(start, edges, strict=True))
        mask[place] = True
    return mask


@pytest.mark.parametrize("name", MAPS)
def test_blocks_are_whole(name, kernels):
    shape, block = MAPS[name]
    x = torch.ones(shape, requires_grad=True)
    before = launch.launched
    y, dropped = drop_blocks(x, 0.3, [block] * (x.ndim - 2))
    y.sum().backward()
    assert launch.launched == before + 4
    zeros = y == 0
    assert dropped == zeros.sum()
    assert torch.equal(x.grad == 0, zeros)
    kept = zeros.numel() - int(dropped)
    assert torch.allclose(y[~zeros], torch.tensor(zeros.numel() / max(kept, 1)))
    for one in zeros.flatten(0, 1):
        starts, edges = blocks_of(one, block)
        assert torch.equal(grown(starts, edges, one.shape), one)


@pytest.mark.parametrize("layout", FORMATS)
def test_a_mask_is_that_of_the_backward_in_all_formats_and_types(layout, kernels):
    masks = []
    for dtype in TYPES:
        x = FORMATS[layout](torch.randn(2, 4, 6, 7) + 5).to(dtype).detach().requires_grad_()
        torch.manual_seed(0)
        y, dropped = drop_blocks(x, 0.3, [3, 3], normalize="sample")
        grad = FORMATS["transposed"](torch.ones(2, 4, 6, 7, dtype=dtype))
        y.backward(grad)
        assert y.stride() == torch.empty_like(x).stride()
        zeros = y == 0
        masks.append(zeros)
        assert dropped == zeros.sum()
        kept = (~zeros).sum((1, 2, 3), keepdim=True)
        factor = torch.where(kept > 0, zeros[0].numel() / kept.clamp(min=1), 0.0)
        tolerance = {"rtol": 2e-2 if dtype.itemsize == 2 else 1e-6}
        assert torch.allclose(y.float(), x.float() * ~zeros * factor, **tolerance)
        assert torch.allclose(x.grad.float(), (~zeros * factor).float(), **tolerance)
    for mask in masks:  # one seed gives one mask for all types
        assert torch.equal(mask, masks[0])


@pytest.mark.pairwise
@pytest.mark.parametrize("share_channels", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("keeps_blocks", [False, True], ids=["drop", "keep"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_words_are_applied_to_rows_of_every_width(last, keeps_blocks, share_channels, kernels):
    """Strips of neighboring elements take their bits from one word or from several."""
    from dropblock_hooks.functional.kernels import blocks

    torch.manual_seed(0)
    widths = 1, 2, 3, 5, 7, 8, 14, 17, 33, 63, 64, 65, 66, 72, 130, 136
    for width, dtype in zip(widths, TYPES * 4, strict=True):
        shape = 2, 3, 3, width
        plan = blocks.plan_of(shape, (1, 1), share_channels, False, False)
        mask = torch.rand(2, plan.channels, 3, width) < 0.5
        words = blocks.words_of(plan, mask)
        x = FORMATS["channels_last" if last else "contiguous"](torch.rand(shape) + 1).to(dtype)
        factors = [2.0, torch.tensor([2.0]), torch.tensor([2.0, 4.0])]
        for factor in factors if width == 17 else [factors[width % 3]]:
            y = blocks.apply_words(x, plan, words, factor, keeps_blocks=keeps_blocks)
            rate = torch.as_tensor(factor).view(-1, 1, 1, 1).to(dtype)
            assert torch.equal(y, torch.where(mask == keeps_blocks, x * rate, 0)), (width, dtype)
            assert y.stride() == x.stride()


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_each_sample_is_counted_by_all_programs(last, kernels):
    """A program has words of one sample or of two."""
    from dropblock_hooks.functional.kernels import blocks

    plan = blocks.plan_of((3, 90, 7, 7), (3, 3), False, last, False)
    device = torch.device(KERNEL_DEVICE)
    words, dropped = blocks.draw_words(plan, device, 2**40 + 1, 0.05, per_sample=True)
    mask = blocks.mask_of(plan, words)
    assert torch.equal(dropped, mask.sum((1, 2, 3)))


def test_blocks_drop_inf_and_nan(kernels):
    for value in (math.inf, math.nan):
        y, _ = drop_blocks(torch.full((4, 4, 8, 8), value), 0.4, [3, 3])
        assert 0 < (y == 0).sum() < y.numel()
        assert not y[y != 0].isfinite().any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("share_channels", rest_slow([False, True]))
@pytest.mark.parametrize("size", [(9,), (8, 14), (5, 70), (3, 4, 6)], ids=str)
def test_a_graph_applies_blocks_alike(size, share_channels, dtype, kernels):
    """In torch operations, to Inf and NaN, too, with one factor and with one for each sample."""
    from dropblock_hooks.functional.kernels import blocks

    shape = (3, 4, *size)
    torch.manual_seed(0)
    values = torch.randn(shape)
    values.view(-1)[::7] = math.inf
    values.view(-1)[3::7] = math.nan
    for layout in ("contiguous", "channels_last"):
        x = FORMATS[layout](values).to(dtype)
        last = layout == "channels_last"
        plan = blocks.plan_of(shape, (2,) * len(size), share_channels, last, False)
        words, _ = blocks.draw_words(plan, x.device, 2**40 + 1, 0.1)
        for factors in (torch.tensor([1.5]), torch.tensor([1.5, 0.5, 2.0])):
            factors = factors.double()
            expected = blocks.apply_words(x, plan, words, factors)
            y = blocks.apply_traced(x, plan, words, factors)
            torch.testing.assert_close(y, expected, equal_nan=True)
            assert y.stride() == expected.stride()
            assert (y == 0).any()


def test_blocks_begin_everywhere_with_the_same_chance(large_programs):
    """Chi-square of the places of the single blocks in 20,000 maps, at 1e-4.

    About 70 blocks begin at each of the 35 places. The test finds one place where blocks begin
    never, or twice as often as elsewhere, in 9 of 10 runs.
    """
    torch.manual_seed(3)
    gamma_of_few = 0.004
    y, _ = drop_blocks(torch.ones(1, 20_000, 6, 9), gamma_of_few * 6, [2, 3])
    zeros = (y == 0)[0].flatten(1)
    maps_with_one_block = zeros[zeros.sum(1) == 6]
    first_places = maps_with_one_block.int().argmax(1)
    starts = torch.bincount(first_places, minlength=6 * 9).view(6, 9)
    assert not starts[5].any()
    assert not starts[:, 7:].any()
    assert starts.sum() > 2000
    assert stats.chisquare(starts[:5, :7].flatten().tolist()).pvalue > 1e-4


@pytest.mark.parametrize("gamma", [0.004, 0.3, 0.95])
def test_seeds_are_independent_of_their_neighbors(gamma, large_programs):
    """The rate of 84,000 places, that of pairs of neighbors, and of columns, each at 1e-4.

    A row of 70 places has two words. For γ = 0.3, the test finds a rate that is larger by 3 % in 9
    of 10 runs, and pairs that are seeds together 9 % more often. For 0.004 it finds a rate that is
    larger by 30 %, and for 0.95 one that is larger by 0.5 %.
    """
    torch.manual_seed(2)
    y, _ = drop_blocks(torch.ones(1, 300, 4, 70), gamma, [1, 1])
    seeds = (y == 0)[0]
    assert_chance(seeds, gamma)

    in_rows = seeds.view(300, 4, 35, 2)
    from_the_second_place = seeds[..., 1:-1].reshape(300, 4, 34, 2)
    in_columns = seeds.view(300, 2, 2, 70)
    assert_chance(in_rows.all(-1), gamma**2)
    assert_chance(from_the_second_place.all(-1), gamma**2)
    assert_chance(in_columns.all(2), gamma**2)

    counts = seeds.sum((0, 1)).double()
    expected = seeds[..., 0].numel() * gamma
    statistic = float(((counts - expected) ** 2).sum() / (expected * (1 - gamma)))
    assert stats.chi2.sf(statistic, len(counts)) > 1e-4


@pytest.mark.parametrize(("size", "block"), [((7, 7), 3), ((5, 70), 3), ((20,), 7)], ids=str)
def test_realized_rate_of_blocks(size, block, large_programs):
    """Within 4 standard errors over 3000 maps, which are independent of each other.

    This finds a rate that is larger by 8 %, 3 % and 11 % in the three cases, in 9 of 10 runs.
    """
    torch.manual_seed(0)
    y, dropped = drop_blocks(torch.ones(1500, 2, *size), 0.2, [block] * len(size))
    zeros = y == 0
    assert dropped == zeros.sum()
    shares = zeros.double().flatten(2).mean(2).flatten()
    error = shares.std() / len(shares) ** 0.5
    assert abs(shares.mean() - 0.2) < 4 * error


def test_shared_channels_have_one_mask(kernels):
    y, _ = drop_blocks(torch.ones(3, 5, 9, 9), 0.3, [3, 3], share_channels=True)
    zeros = y == 0
    assert torch.equal(zeros, zeros[:, :1].expand_as(zeros))
    assert zeros.any()


# bad input ------------------------------------------------------------------------------------


def test_empty_tensors_start_nothing(kernels):
    before = launch.launched
    for shape in ((0, 3, 5, 5), (2, 0, 5, 5)):
        x = torch.ones(shape, requires_grad=True)
        for function in (functional.dropout, functional.dropout2d, functional.drop_path):
            assert function(x, 0.5).shape == shape
        assert drop_blocks(x, 0.5, [3, 3])[0].shape == shape
        assert functional.clip_grad_norm(x, 1.0).shape == shape
        assert functional.clamp_grad(x, -1.0, 1.0).shape == shape
    assert launch.launched == before


def test_a_gradient_of_another_type(kernels):
    """As under autocast, where a site gives float16 on and gets a gradient of float32."""
    x = torch.ones(2, 3, 6, 6, dtype=torch.float16, requires_grad=True)
    for function in (
        functional.dropout2d,
        functional.dropout,
        lambda x, p: drop_blocks(x, p, [3, 3])[0],
    ):
        y = function(x, 0.3)
        (grad,) = torch.autograd.grad(y.float().sum(), x)
        assert grad.dtype == torch.float16
        assert torch.equal(grad == 0, y == 0)


def test_places_are_computed_with_64_bits_where_needed(kernels, monkeypatch):
    assert launch.is_big(2**31, torch.ones(2))
    assert launch.is_big(0, torch.empty((2, 2**31), device="meta"))
    assert not launch.is_big(2**30, torch.ones(2, 3))
    monkeypatch.setattr(launch, "is_big", lambda *given: True)
    test_blocks_are_whole("2d", kernels)
    test_units_are_dropped_as_a_whole_in_both_directions("channels", kernels)
    x = torch.randn(3, 5)
    assert torch.allclose(functional.clip_grad_norm(x, 1.0), x / x.norm())


@pytest.mark.parametrize("version", [None, "3.1.0", "2.0"])
def test_without_a_new_triton_torch_operations_are_used(version, kernels, monkeypatch):
    def find(name):
        if version is None:
            raise ImportError("No module named 'triton'")
        return types.SimpleNamespace(__version__=version)

    monkeypatch.setattr(launch.importlib, "import_module", find)
    launch.is_available.cache_clear()
    before = launch.launched
    with pytest.warns(HookWarning, match="DROPBLOCK_HOOKS_TRITON=0"):
        y = functional.dropout(torch.ones(1000), 0.5)
    assert 300 < (y == 0).sum() < 700
    functional.dropout(torch.ones(1000), 0.5)  # without another warning, which would be an error
    assert launch.launched == before
    launch.is_available.cache_clear()


class Compiled:
    """A kernel of Triton and its compiled form, which note how they are started."""

    arg_names = ("x", "seed", "p", "n_rows", "STEP")

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.calls.append((grid, arguments, options))
            return self

        return run


@pytest.fixture
def compiled(monkeypatch):
    """A kernel on a GPU, with a version of Triton whose compiled forms can be kept."""
    monkeypatch.setattr(launch, "current_cuda_device", lambda: 0)
    monkeypatch.setattr(launch, "raw_cuda_stream", lambda index: 7)
    monkeypatch.setattr(launch, "_version_of_triton", lambda: (3, 3))
    launch._keeps_forms.cache_clear()
    yield Compiled()
    launch._keeps_forms.cache_clear()


def test_the_compiled_form_of_a_kernel_is_kept(compiled):
    """For other seeds too, but not for another type, and not for an address of another kind."""
    device = torch.device("cuda", 0)

    def grid_of(x, seed):
        launch.start(compiled, 5, device, x, seed, 0.5, 3, STEP=4)
        grid, arguments, options = compiled.calls.pop()
        whole = grid == (5, 1, 1)
        assert arguments == ((x, seed, 0.5, 3, 4) if whole else (x, seed, 0.5, 3))
        assert options == ({"stream": 7} if whole else {"STEP": 4})
        return grid

    x = torch.zeros(8)
    assert grid_of(x, 2**40) == (5,)
    assert grid_of(x, 2**41) == (5, 1, 1)
    assert grid_of(torch.ones(8), 2**40) == (5, 1, 1)
    assert grid_of(x[1:], 2**40) == (5,)
    assert grid_of(x[2:], 2**40) == (5, 1, 1)
    assert grid_of(x.double(), 2**40) == (5,)
    assert grid_of(x, torch.zeros(1)) == (5,)


def test_a_kernel_starts_on_the_device_of_its_tensors(compiled, monkeypatch):
    current = [0]

    @contextlib.contextmanager
    def on(device):
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(launch, "current_cuda_device", lambda: current[-1])
    monkeypatch.setattr(launch, "raw_cuda_stream", lambda index: 10 + index)
    monkeypatch.setattr(torch.cuda, "device", on)
    before = launch.launched
    for expected in ((5,), (5, 1, 1)):
        launch.start(compiled, 5, torch.device("cuda", 1), torch.zeros(8), 2**40, 0.5, 3, STEP=4)
        (call,) = compiled.calls
        assert call[0] == expected
        compiled.calls.clear()
    assert call[2] == {"stream": 11}
    assert launch.launched == before + 2
    assert current == [0]


def test_arguments_that_do_not_vary_are_not_told_apart(compiled):
    prepared = launch.Launch(compiled, 5, (3,), varies=False, STEP=4)
    for x, expected in ((torch.zeros(8), (5,)), (torch.ones(8), (5, 1, 1))):
        prepared.start(torch.device("cuda", 0), x, 2**40, 0.5)
        grid, arguments, _ = compiled.calls.pop()
        assert grid == expected
        assert arguments[0] is x


@pytest.mark.parametrize("function", [functional.dropout, functional.dropout2d, blocks_of_3])
def test_another_address_has_a_launch_of_its_own(function, kernels, monkeypatch):
    """Triton compiles for whether 16 divides the address, and a kept form must fit."""
    launches = {}

    def see(self, device, kinds, arguments):
        x = arguments[0]
        if x.dtype == torch.float32:
            launches.setdefault(id(self), set()).add(launch.is_aligned(x))

    monkeypatch.setattr(launch.Launch, "_start_first", see)
    whole = torch.ones(1 + 2 * 4 * 8 * 8, device=KERNEL_DEVICE)
    for x in (whole[:-1], whole[1:]):
        function(x.view(2, 4, 8, 8), 0.3)
    assert all(len(kinds) == 1 for kinds in launches.values())
    assert set().union(*launches.values()) == {True, False}


@pytest.mark.parametrize("function", [functional.dropout2d, blocks_of_3])
def test_another_address_of_a_saved_tensor_has_a_launch_of_its_own(function, kernels, monkeypatch):
    """A hook that stores tensors may load a mask to any address."""
    launches = {}
    start = launch.Launch.start

    def see(self, device, *arguments):
        kinds = [launch._kind(x) for x in arguments if isinstance(x, torch.Tensor)]
        launches.setdefault(id(self), set()).add(tuple(kinds))
        start(self, device, *arguments)

    def store(x):
        flat = torch.empty(x.numel() + 1, dtype=x.dtype)
        flat[1:] = x.reshape(-1)
        return flat, x.shape

    def load(stored):
        flat, shape = stored
        return flat[1:].view(shape)

    monkeypatch.setattr(launch.Launch, "start", see)
    x = FORMATS["channels_last"](torch.ones(2, 32, 8, 8)).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(store, load):
        y = function(x, 0.3)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(grad, y.detach())
    assert all(len(kinds) == 1 for kinds in launches.values())


def test_the_switch_needs_no_warning(kernels, monkeypatch):
    monkeypatch.setenv(launch.SWITCH, "0")
    launch.is_available.cache_clear()
    before = launch.launched
    functional.dropout(torch.ones(1000), 0.5)
    assert launch.launched == before
    launch.is_available.cache_clear()


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_kernel_that_fails_is_told_once_and_replaced(when, kernels, monkeypatch):
    monkeypatch.setattr(launch, "_failed", False)
    start = launch.Launch._start_first

    def fail(self, *arguments):
        if self.kernel.__name__ in ("_apply_kernel", "_drop_elements_kernel"):
            raise RuntimeError("no compiler was found")
        start(self, *arguments)

    x = torch.ones(4, 6, 8, 8, requires_grad=True)
    y = drop_blocks(x, 0.3, [3, 3])[0] if when == "backward" else None
    monkeypatch.setattr(launch.Launch, "_start_first", fail)

    def act(y):
        y = drop_blocks(x, 0.3, [3, 3])[0] if y is None else y
        y.sum().backward()
        return y

    with pytest.warns(HookWarning, match="_apply_kernel .*no compiler was found") as told:
        y = act(y)
    assert len(told) == 1
    assert torch.equal(x.grad, y.detach())
    assert 0 < (y == 0).sum() < y.numel()
    assert (functional.dropout(torch.ones(1000), 0.5) == 0).any()


def test_a_seed_while_a_graph_is_captured_is_on_the_device(kernels, monkeypatch):
    """Each replay of a CUDA graph must draw another mask, and begin to count at 0."""
    monkeypatch.setattr(launch, "is_capturing", lambda device: True)
    seed = launch.draw_seed(torch.device(KERNEL_DEVICE))
    assert isinstance(seed, torch.Tensor)
    x = torch.ones(4, 6, 8, 8, requires_grad=True)
    for function in (
        functional.dropout,
        functional.dropout2d,
        lambda x, p: drop_blocks(x, p, [3, 3])[0],
    ):
        y = function(x, 0.3)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad == 0, y == 0)
        assert 0 < (y == 0).sum() < y.numel()


RANDOM = {
    "dropout": lambda x, **how: functional.dropout(x, 0.3, **how),
    "dropout2d": lambda x, **how: functional.dropout2d(x, 0.3, **how),
    "drop_block2d": lambda x, **how: functional.drop_block2d(x, 0.3, 3, **how),
    "disout": lambda x, **how: functional.disout(x, 0.3, 3, **how),
    "gaussian_dropout": lambda x, **how: functional.gaussian_dropout(x, 0.3, **how),
    "gaussian_noise": lambda x, **how: functional.gaussian_noise(x, 0.3, **how),
    "neftune": lambda x, **how: functional.neftune(x.flatten(2), 0.3, **how),
}


@pytest.mark.parametrize("device", dict.fromkeys(["cpu", KERNEL_DEVICE]))
@pytest.mark.parametrize("name", RANDOM)
def test_a_generator_repeats_the_mask(name, device, kernels):
    x = torch.randn(4, 6, 8, 8)
    generator = torch.Generator(device)
    ways = []
    for seed in (7, 7, 8):
        generator.manual_seed(seed)
        ways.append(RANDOM[name](x, generator=generator))
    ways.append(RANDOM[name](x, generator=generator))
    assert torch.equal(ways[0], ways[1])
    assert not torch.equal(ways[0], ways[2])
    assert not torch.equal(ways[2], ways[3])


def test_a_cpu_generator_draws_the_seed_of_another_device(monkeypatch):
    class OfDevice:
        def __init__(self, device):
            self.device = device

        def manual_seed(self, seed):
            self.seed = seed
            return self

    generator = torch.Generator().manual_seed(7)
    assert generator_on(torch.device("cpu"), generator) is generator
    assert generator_on(torch.device("cuda"), None) is None
    monkeypatch.setattr(torch, "Generator", OfDevice)
    cuda = torch.device("cuda", 1)
    first, second = (generator_on(cuda, generator) for _ in range(2))
    assert first.device == cuda
    assert first.seed != second.seed
    assert generator_on(cuda, first) is first
    assert generator_on(cuda, generator.manual_seed(7)).seed == first.seed


def test_no_kernel_sees_tensors_that_are_traced(kernels, monkeypatch):
    assert not operators.SEEDED
    x = torch.randn(2, 3)
    assert launch.takes(x)
    seen = []
    torch.vmap(lambda row: seen.append(launch.takes(row)) or row)(x)
    monkeypatch.setattr(launch, "is_tracing", lambda: True)
    seen.append(launch.takes(x))
    monkeypatch.setattr(launch, "is_tracing", lambda: False)
    monkeypatch.setattr(torch.compiler, COMPILING, True)
    seen.append(launch.takes(x))
    assert seen == [False, False, False]


# norms of earlier updates ------------------------------------------------------------------------

MEMORIES = {
    "adagc": lambda x, m: functional.adagc(x, m, 1.05, 1.5, 0.9, 4),
    "adagc, high bound": lambda x, m: functional.adagc(x, m, 1.05, 1e9, 0.9, 4),
    "zclip": lambda x, m: functional.zclip(x, m, 1.0, None, 0.9, 4),
    "zclip, max_norm": lambda x, m: functional.zclip(x, m, 1.0, 2.0, 0.9, 4),
    "skip_update": lambda x, m: functional.skip_update(x, m, 2.0, 1.5, 0.9, 4),
    "skip_update, no z": lambda x, m: functional.skip_update(x, m, 2.0, None, 0.9, 4),
}


@pytest.mark.parametrize("number", [1, 1500])
@pytest.mark.parametrize("name", MEMORIES)
def test_norms_are_judged_and_remembered_alike(name, number, both):
    """A program judges 1024 norms. The first four updates are the warmup."""

    def run():
        generator = torch.Generator("cpu").manual_seed(number)
        memory = functional.new_memory(name.partition(",")[0], number, KERNEL_DEVICE)
        results = []
        for update in range(11):
            norms = torch.rand(number, generator=generator, dtype=torch.float64, device="cpu") * 2
            norms = norms.to(KERNEL_DEVICE) * (10.0 if update % 5 == 4 else 1.0)
            if update in (2, 8):  # in the first updates, and later
                norms[number // 2] = (math.inf, math.nan)[update == 8]
            if update in (3, 9):
                norms[0] = 0.0
            result, memory = MEMORIES[name](norms, memory)
            results += [result, memory]
        return results

    dense, fast = both(run)
    for a, b in zip(dense, fast, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-12, equal_nan=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton comes with torch on Linux only")
@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)]
)
def test_all_kernels_compile_for_a_gpu(dtype):
    """The interpreter takes what the compiler refuses, such as a variable that changes its type."""
    command = [sys.executable, "-m", "tests.functional.compile_kernels", dtype]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert int(result.stdout.split()[0]) > 60
