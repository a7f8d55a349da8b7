"""ActivationStats on models: against NumPy, compiled, checkpointed, over processes, saved."""

import copy

import numpy as np
import pytest
import torch
from torch import distributed, nn

from dropblock_hooks import ActivationStats, attach
from tests.pair import run_pair

NAMES = ("mean", "std", "rms", "largest", "norm", "zeros")
BATCHES = (4, 4, 7, 3)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Sigmoid(), nn.Flatten()
    )


def batches(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 3, 12, 12, generator=generator) for n in BATCHES]


def collected(model, names, inputs):
    """What a plain hook collects of these layers, by name."""
    found = {name: [] for name in names}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda m, a, y, name=name: found[name].append(y.detach().double().numpy().copy())
        )
    for x in inputs:
        model(x)
    return found


def reference(calls):
    x = np.concatenate([call.ravel() for call in calls])
    return {
        "mean": x.mean(),
        "std": x.std(),
        "rms": np.sqrt((x**2).mean()),
        "largest": np.abs(x).max(),
        "norm": np.mean([np.linalg.norm(call.ravel()) for call in calls]),
        "zeros": (x == 0).mean(),
    }


def observed(attached, distributed=False):
    return {
        row.site.split("/")[0]: row.observed for row in attached.report(distributed=distributed)
    }


def assert_moments(found, calls):
    wanted = reference(calls)
    for name in NAMES:
        value = getattr(found, name)
        assert value == pytest.approx(wanted[name], rel=1e-5, abs=1e-6 * wanted["rms"]), name
    assert found.calls == len(calls)


def assert_is(found, calls):
    assert_moments(found, calls)
    assert found.values == sum(call.size for call in calls)
    others = range(calls[0].ndim)
    zero = np.stack([(call == 0).all(tuple(a for a in others if a != 1)) for call in calls])
    assert found.dead == zero.all(0).sum()


def test_an_epoch_of_uneven_batches_against_numpy():
    model = make_model()
    wanted = collected(copy.deepcopy(model), ("0", "1", "3"), batches())
    attached = attach(model, {name: ActivationStats(every=1) for name in wanted})
    for x in batches():
        model(x).sum().backward()
    found = observed(attached)
    for name, calls in wanted.items():
        assert_is(found[name], calls)
        x = np.concatenate([each.ravel() for each in calls])
        sizes = np.abs(x[x != 0])
        edges = np.array([0, *ActivationStats().edges, np.inf])
        assert found[name].histogram == tuple(np.histogram(sizes, edges)[0])


def gloo_epoch(rank):
    model = make_model()
    with torch.no_grad():
        model[0].bias[5] = -100.0  # dead
    inputs = batches(0)[:2], batches(1)[:3]
    seen = collected(copy.deepcopy(model), ("1", "3"), [*inputs[0], *inputs[1]])
    attached = attach(model, {"1": ActivationStats(every=1), "3": ActivationStats(every=1)})
    for x in inputs[rank]:
        model(x)
    found = observed(attached, distributed=True)
    for name, calls in seen.items():
        assert_is(found[name], calls)
    assert found["1"].dead == 1


@pytest.mark.slow
@pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
def test_over_two_processes(tmp_path):
    run_pair(tmp_path, "tests.observers.test_activation_stats", ["gloo_epoch"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 1.0, "high": 0.1}, "high must be above low, got low=1, high=0.1"),
        ({"low": 0.0}, "low must be in .1e-30, 1e.30., got 0.0"),
        ({"high": 1e40}, "high must be in .*, got 1e.40"),
        ({"every": 0}, "every must be an integer >= 1, got 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ActivationStats(**options)


def test_running_statistics_against_those_of_the_batches():
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(6)
    model = nn.Sequential(layer)
    attached = attach(model, {"0": ActivationStats(every=1)})
    means, variances = [], []
    for n in (8, 8, 5):
        x = torch.randn(n, 6, 7, 7) * torch.arange(1, 7).view(6, 1, 1) + 50
        model(x)
        y = x.double().movedim(1, 0).flatten(1).numpy()
        means.append(y.mean(1))
        variances.append(y.var(1, ddof=1))
    mean, variance = layer.running_mean.double().numpy(), layer.running_var.double().numpy()
    found = observed(attached)["0"]
    off = np.abs(np.mean(means, 0) - mean) / np.sqrt(variance)
    assert found.mean_shift == pytest.approx(off.mean(), rel=1e-4)
    logs = np.abs(np.log(np.mean(variances, 0) / variance))
    assert found.variance_shift == pytest.approx(logs.mean(), rel=1e-4)
    attached.step(1)
    assert observed(attached)["0"].mean_shift == found.mean_shift
    assert "running" in str(attached)


def test_a_window_is_an_epoch():
    model = nn.Sequential(nn.ReLU())
    attached = attach(model, {"0": ActivationStats(every=2)})
    for epoch, value in enumerate((1.0, 2.0, 3.0)):
        attached.step(epoch)
        for _ in range(3):
            model(torch.full((2, 2), value))
        found = observed(attached)["0"]
        assert (found.mean, found.calls, sum(found.histogram)) == (value, 2, 8)
    attached.step()
    assert observed(attached)["0"].mean == 3.0
    model.eval()(torch.zeros(2, 2))
    assert observed(attached)["0"].mean == 3.0
