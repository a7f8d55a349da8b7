"""Sums of values against a float64 reference, whatever the values."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropblock_hooks import ActivationStats, Seen, Watch
from dropblock_hooks.axes.view import View
from dropblock_hooks.functional import measures, outliers, residual


def state_of(*calls, observer=None, channels=False, scale=1.0):
    """The state of an observer that has seen these calls."""
    watch = Watch(observer or ActivationStats(every=1))
    for x in calls:
        form = View("") if channels else None
        watch.update(Seen([x], 0.0, {}, view=lambda x, view=form: view, scale=scale))
    return watch.open


def seen(*calls, every=1, **options):
    observer = ActivationStats(every=every)
    return observer.compute(state_of(*calls, observer=observer, **options))


def flat(calls):
    return np.concatenate([x.double().numpy().ravel() for x in calls])


def assert_is(found, calls):
    """What was found is what NumPy says, in float64."""
    x = flat(calls)
    rms = np.sqrt((x**2).mean())
    assert found.values == x.size
    assert found.mean == pytest.approx(x.mean(), rel=1e-5, abs=1e-6 * rms)
    assert found.std == pytest.approx(x.std(), rel=1e-5, abs=1e-7 * rms)
    assert found.rms == pytest.approx(rms, rel=1e-5)
    assert found.largest == np.abs(x).max()
    norms = [np.linalg.norm(flat([call])) for call in calls]
    assert found.norm == pytest.approx(np.mean(norms), rel=1e-5)
    assert found.zeros == (x == 0).mean()


VALUES = {
    "plain": lambda x: x,
    "rectified": lambda x: x.relu(),
    "far from zero": lambda x: 100 + 0.1 * x,
    "very far from zero": lambda x: 1e4 + 0.1 * x,
    "large": lambda x: 1e15 * x,
    "small": lambda x: 1e-15 * x,
    "squares overflow": lambda x: 1e20 * x,
    "sums overflow": lambda x: 1e37 * (x.abs() + 1),
    "squares vanish": lambda x: 1e-25 * x,
    "all zero": lambda x: x * 0,
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("edge", [3, 40])  # below and above what is summed in float64 at once
def test_float32_against_float64(values, edge):
    torch.manual_seed(0)
    calls = [VALUES[values](torch.randn(n, 8, edge, edge)) for n in (4, 4, 7, 3)]
    found = seen(*calls)
    assert_is(found, calls)
    assert sum(found.histogram) == np.count_nonzero(flat(calls))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("values", ["plain", "far from zero", "rectified"])
def test_other_types(dtype, values):
    torch.manual_seed(0)
    calls = [VALUES[values](torch.randn(n, 8, 40, 40)).to(dtype) for n in (3, 5)]
    assert_is(seen(*calls), calls)


@given(
    st.lists(
        st.lists(
            st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False),
            max_size=40,
        ),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=100, deadline=None)
def test_any_values(calls):
    tensors = [torch.tensor(values, dtype=torch.float32) for values in calls]
    found = seen(*tensors)
    x = flat(tensors)
    assert found.calls == len(calls)
    assert found.values == x.size
    if x.size:
        scale = np.abs(x).max()
        assert found.mean == pytest.approx(x.mean(), rel=1e-6, abs=1e-12 * scale)
        assert found.std == pytest.approx(x.std(), rel=1e-6, abs=1e-7 * scale)
        assert found.largest == scale
        assert sum(found.histogram) == np.count_nonzero(x)
    else:
        assert found.mean is found.zeros is None


def test_the_bins_are_octaves_with_closed_lower_edges():
    observer = ActivationStats(every=1, low=0.25, high=2.0)
    assert observer.edges == (0.25, 0.5, 1.0, 2.0)
    x = torch.tensor([0.0, 0.1, 0.25, -0.4, 0.5, -1.0, 1.99, 2.0, -1e30, math.inf, math.nan])
    found = observer.compute(state_of(x, observer=observer))
    assert found.histogram == (1, 2, 1, 2, 2)
    assert (found.zeros, found.nonfinite) == (1 / 11, 2 / 11)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("n", [10, 50_000])
def test_a_call_with_a_value_that_is_not_finite_is_left_out_and_counted(bad, n):
    good, worse = torch.ones(n), torch.ones(n)
    worse[3] = bad
    found = seen(good, worse, 3 * good)
    assert (found.calls, found.left_out, found.values) == (3, 1, 2 * n)
    assert (found.mean, found.std, found.largest) == pytest.approx((2.0, 1.0, 3.0), rel=1e-12)
    assert found.nonfinite == pytest.approx(1 / (3 * n))


def test_parts_add_up_to_the_whole():
    torch.manual_seed(0)
    calls = [torch.randn(n, 40).clamp_min(-1) + 3 for n in (3, 5, 2)]
    for x in calls:
        x[:, 7] = 0.0
    calls[0][:, 9] = 0.0
    empty = torch.ones(0, 40)
    observer = ActivationStats(every=1)

    def state(*part):
        return state_of(*part, channels=True)

    def merged(a, b):
        return observer.compute(observer.merge(state(*a), state(*b)))

    whole = observer.compute(state(*calls))
    total = merged(calls[:1], calls[1:])
    for name, value in vars(whole).items():
        if value not in ("", None):
            assert getattr(total, name) == pytest.approx(value, rel=1e-12), name
    assert total.dead == 1
    both = observer.compute(state(calls[0], empty))
    for total in (merged([calls[0]], [empty]), merged([empty], [calls[0]])):
        assert (total.mean, total.std) == (both.mean, both.std)
        assert total.norm == pytest.approx(both.norm)
        assert (total.calls, total.dead) == (2, both.dead)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_outliers_of_large_tensors_are_measured_in_chunks(memory_format, dtype, bad, monkeypatch):
    monkeypatch.setattr(outliers, "_CHUNK", 5000)
    x = torch.randn(3, 8, 40, 30).pow(5).to(dtype, memory_format=memory_format)
    if bad is not None:
        x[-1, 0, 0, 0] = bad
    state = outliers.new_outliers()
    outliers.add_outliers(state, x, x)
    if bad is not None:
        assert not any(number.any() for number in state.values())
        return
    values = x.double().numpy()
    distances = values - values.mean()
    wanted = (distances**4).mean() / values.var() ** 2
    assert outliers.kurtosis(state["moments"]) == pytest.approx(wanted, rel=1e-6)
    assert state["outliers"] == (np.abs(distances) > 6 * values.std()).sum() > 0
    assert state["peaks"].tolist() == np.abs(values).max((0, 2, 3)).tolist()


@pytest.mark.parametrize("on", [(0.0, 1.0), (1.0, 0.0)], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_device_that_is_not_read_counts_the_same(on, training, monkeypatch):
    """On a GPU, torch operations choose the measured calls without reading the state."""
    found = []
    for read in (True, False):
        monkeypatch.setattr(measures, "READ", {"cpu"} if read else set())
        state = torch.zeros(measures.SUMS, dtype=torch.float64)
        state[:2] = torch.tensor(on)
        tails = outliers.new_tails()
        peaks = torch.zeros(4, dtype=torch.float64)
        branch = residual.new_branch()
        torch.manual_seed(0)
        for call in range(7):
            state[measures.CALLS] = call
            x, y = torch.randn(2, 3, 4, 5)
            outliers.add_tails(y, y, training, 3, state, tails, peaks)
            residual.add_branch(y, x, training, 3, state, branch)
        found.append((tails, peaks, branch))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)
    is_on = bool(on[training])
    assert found[0][0][0] == (3 * 60 if is_on else 0)
    assert bool(found[0][2].any()) == is_on
