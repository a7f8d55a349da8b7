"""Kurtosis, outliers and channels far above the others, against SciPy and NumPy in float64."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed, nn

from dropblock_hooks import ActivationStats, Seen, Watch, attach
from tests.pair import run_pair

scipy_stats = pytest.importorskip("scipy.stats")
OBSERVER = ActivationStats(every=1, outliers=True)
CHANNELS_FIRST = SimpleNamespace(to_maps=lambda x: x)


def state_of(*calls, channels=True):
    """The state of an observer that has seen these calls."""
    watch = Watch(OBSERVER)
    for x in calls:
        form = CHANNELS_FIRST if channels else None
        watch.update(Seen([x], 0.0, {}, view=lambda x, view=form: view))
    return watch.open


def flat(calls):
    return np.concatenate([x.double().numpy().ravel() for x in calls])


def reference(calls):
    """Kurtosis, share of outliers and ratio of channels of all calls."""
    beyond = 0
    peaks = []
    for x in calls:
        values = x.double().numpy()
        beyond += (np.abs(values - values.mean()) > 6 * values.std()).sum()
        others = tuple(axis for axis in range(values.ndim) if axis != 1)
        peaks.append(np.abs(values).max(others))
    peak = np.max(peaks, axis=0)
    values = flat(calls)
    kurtosis = scipy_stats.kurtosis(values, fisher=False)
    return kurtosis, beyond / values.size, peak.max() / np.median(peak)


def measured(found):
    return found.kurtosis, found.outliers, found.peak_ratio


VALUES = {
    "normal": lambda x: x,
    "rectified": lambda x: x.relu(),
    "far from zero": lambda x: 1e3 + x,
    "large": lambda x: 1e15 * x,
    "small": lambda x: 1e-20 * x,
    "heavy tails": lambda x: x.pow(5),
    "one massive channel": lambda x: x * torch.tensor([1.0] * 6 + [300.0]).view(7, 1, 1),
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_against_scipy(values, dtype):
    torch.manual_seed(0)
    calls = [VALUES[values](torch.randn(n, 7, 9, 9)).to(dtype) for n in (4, 4, 7, 3)]
    found = OBSERVER.compute(state_of(*calls))
    assert measured(found) == pytest.approx(reference(calls), rel=1e-6)
    if values in ("heavy tails", "one massive channel"):
        assert found.outliers > 0


def test_calls_of_other_means_and_sizes():
    torch.manual_seed(0)
    calls = [torch.randn(n, 4, 5) * scale + mean for n, scale, mean in ((2, 1, 0), (9, 3, 50))]
    found = OBSERVER.compute(state_of(*calls))
    assert measured(found) == pytest.approx(reference(calls), rel=1e-6)


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30),
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30),
)
@settings(max_examples=100, deadline=None)
def test_moments_of_two_sets_are_those_of_their_union(first, second):
    a, b, both = (torch.tensor(x, dtype=torch.float64) for x in (first, second, first + second))
    merged = OBSERVER.merge(state_of(a, channels=False), state_of(b, channels=False))
    found = merged["moments"]
    wanted = state_of(both, channels=False)["moments"]
    size = both.abs().max().clamp(min=1e-30)
    scales = size ** torch.tensor([0, 1, 2, 3, 4]) * len(both)
    torch.testing.assert_close(found / scales, wanted / scales, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_call_with_a_value_that_is_not_finite_is_left_out(bad):
    torch.manual_seed(0)
    calls = [torch.randn(8, 4, 6) ** 5 for _ in range(2)]
    worse = torch.full((8, 4, 6), 1e6)
    worse[0, 0, 0] = bad
    found = OBSERVER.compute(state_of(calls[0], worse, calls[1]))
    assert measured(found) == pytest.approx(reference(calls), rel=1e-6)
    only = OBSERVER.compute(state_of(worse))
    assert measured(only) == (None, None, None)


def test_a_call_whose_powers_exceed_float64_is_left_out():
    good = torch.randn(8, 50).double()
    worse = 1e90 * good
    worse[0, 0] = 1e93
    found = OBSERVER.compute(state_of(good, worse))
    assert measured(found) == pytest.approx(reference([good]), rel=1e-6)


def test_a_value_that_is_almost_an_outlier_where_values_differ_in_their_last_digit():
    """The mean is no number of float32; from the nearest one, there would be two outliers."""
    digits = torch.zeros(2, 10_000)
    digits[0, :8000] = 1.0
    digits[1, 0] = 3.0
    digits[1, 1] = 8.0
    x = 1 + digits * 2.0**-23
    found = OBSERVER.compute(state_of(x))
    assert measured(found)[:2] == pytest.approx(reference([x])[:2], rel=1e-6)
    assert found.outliers == 1 / 20_000


def test_values_that_have_no_ratio():
    equal = OBSERVER.compute(state_of(torch.full((3, 4, 1000), 0.1)))
    assert measured(equal) == (None, 0.0, 1.0)
    dead = torch.zeros(3, 4)
    dead[0, 0] = 1.0
    assert OBSERVER.compute(state_of(dead)).peak_ratio is None
    empty = OBSERVER.compute(state_of(torch.ones(0, 4)))
    assert measured(empty) == (None, None, None)


def test_a_spread_whose_square_is_too_small_has_no_kurtosis():
    found = OBSERVER.compute(state_of(1e-90 * torch.randn(4, 7, 3, 3).double()))
    assert found.kurtosis is None


def test_without_channels_there_is_no_ratio_of_channels():
    x = torch.randn(4, 5)
    found = OBSERVER.compute(state_of(x, channels=False))
    assert found.peak_ratio is None
    assert found.kurtosis == pytest.approx(scipy_stats.kurtosis(flat([x]), fisher=False))


def test_parts_add_up_to_the_whole():
    torch.manual_seed(0)
    calls = [torch.randn(n, 40) ** 5 + n for n in (3, 5, 2)]
    whole = OBSERVER.compute(state_of(*calls))
    for first, second in ((calls[:1], calls[1:]), (calls, ()), ((), calls)):
        merged = OBSERVER.merge(state_of(*first), state_of(*second))
        assert measured(OBSERVER.compute(merged)) == pytest.approx(measured(whole), rel=1e-9)
    none = OBSERVER.merge(state_of(), state_of())
    assert measured(OBSERVER.compute({**none, "calls": 1})) == (None, None, None)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())


def test_it_is_off_by_default_and_shown_where_it_is_on():
    x = torch.randn(4, 3, 12, 12)
    model = make_model()
    plain = attach(model, {"1": ActivationStats()})
    model(x)
    assert measured(plain.report()[0].observed) == (None, None, None)
    assert "kurtosis" not in str(plain)
    assert not any("kurtosis" in name for name in plain.scalars())
    plain.remove()

    attached = attach(model, {"1": ActivationStats(outliers=True)})
    y = model(x)
    found = attached.report()[0].observed
    assert measured(found) == pytest.approx(reference([y.detach()]), rel=1e-6)
    for head in ("kurtosis", "beyond", "peak/"):
        assert head in str(attached)
    assert attached.scalars()["reg/1/ActivationStats/kurtosis"] == found.kurtosis
    attached.step()
    model(2 * x)  # an epoch of its own
    assert attached.report()[0].observed.kurtosis != found.kurtosis


@pytest.mark.parametrize("every", [1, 2])
def test_compiled_code_measures_the_same(every):
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = make_model()
        attached = attach(model, {"1": ActivationStats(every=every, outliers=True)})
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        torch.manual_seed(1)
        for step in range(5):
            x = torch.randn(4, 3, 12, 12)
            if step == 2:
                x[0] = math.nan
            called(x).sum().backward()
        with attached.paused():
            called(torch.randn(4, 3, 12, 12) + 9.0)
        found.append(attached.report()[0].observed)
        attached.step()
        called(torch.randn(4, 3, 12, 12) * 2.0).sum().backward()
        found.append(attached.report()[0].observed)
    for eager, traced in zip(found[:2], found[2:], strict=True):
        assert measured(traced) == pytest.approx(measured(eager), rel=1e-6)
        assert traced.calls == eager.calls
    assert found[0].calls == {1: 5, 2: 3}[every]


def gloo_epoch(rank):
    model = make_model()
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(n, 3, 12, 12, generator=generator) * n for n in (4, 4, 7, 3)]
    wanted = reference([model(x).detach() for x in inputs])
    attached = attach(model, {"1": OBSERVER})
    for x in inputs[:1] if rank else inputs[1:]:
        model(x)
    (row,) = attached.report(distributed=True)
    assert measured(row.observed) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
def test_over_two_processes(tmp_path):
    run_pair(tmp_path, "tests.observers.test_outliers", ["gloo_epoch"])
