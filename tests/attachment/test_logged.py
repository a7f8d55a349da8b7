"""``attached.log``: what TensorBoard, wandb and others are given."""

import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ActivationStats,
    Capture,
    Dropout2d,
    GradientStats,
    WeightStats,
    attach,
)

SPEC = {
    "0": [ActivationStats(every=1), Capture()],
    "1": [Dropout2d(0.5), GradientStats(every=1)],
    "3": [WeightStats(), Capture()],
}
HISTOGRAMS = {f"reg/{key}/histogram" for key in ("0/ActivationStats", "1/GradientStats")} | {
    "reg/3/WeightStats/histogram"
}


def make():
    """A model that was trained for a step, and its attachment."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 64, 2))
    attached = attach(model, SPEC)
    model(torch.randn(4, 3, 10, 10)).square().sum().backward()
    return attached


def counted(values, edges):
    """How many magnitudes lie between the edges, by NumPy."""
    sizes = np.abs(np.asarray(values, dtype=np.float64)).ravel()
    return np.histogram(sizes[sizes > 0], edges)[0].tolist()


def test_tensorboard_gets_scalars_and_histograms(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="an option of the user's")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    attached = make()
    with tensorboard.SummaryWriter(tmp_path) as writer:
        attached.log(writer, 7)
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    tags = events.Tags()
    expected = attached.scalars()
    assert set(tags["scalars"]) == set(expected)
    for tag, value in expected.items():
        (event,) = events.Scalars(tag)
        assert (event.step, event.value) == (7, pytest.approx(value, rel=1e-6))
    assert set(tags["histograms"]) == HISTOGRAMS
    (event,) = events.Histograms("reg/0/ActivationStats/histogram")
    found = event.histogram_value
    values = attached.captured("0")["0"][0].value
    assert event.step == 7
    assert found.num == sum(found.bucket) == values.numel()
    assert list(found.bucket) == counted(values, [found.min, *found.bucket_limit])
    assert found.min <= values.abs().min() <= values.abs().max() <= found.max
    assert found.sum == pytest.approx(float(values.abs().sum()), rel=0.1)
    assert found.sum_squares == pytest.approx(float(values.square().sum()), rel=0.2)


@pytest.fixture
def wandb(monkeypatch):
    """wandb's interface, as its documentation has it: what it was given is kept."""
    module = types.ModuleType("wandb")

    class Histogram:
        def __init__(self, sequence=None, np_histogram=None, num_bins=64):
            self.histogram, self.bins = np_histogram
            assert len(self.histogram) + 1 == len(self.bins) <= 512

    class Run:
        def __init__(self):
            self.logged = []

        def log(self, data, step=None, commit=None):
            self.logged.append((data, step))

    for kind in (Histogram, Run):
        kind.__module__ = "wandb.sdk"
        setattr(module, kind.__name__, kind)
    run = Run()
    module.run, module.log = run, run.log
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.mark.parametrize("who", ["run", "module"])
def test_wandb_gets_all_in_one_call(wandb, who):
    attached = make()
    attached.log(wandb if who == "module" else wandb.run, 3)
    ((data, step),) = wandb.run.logged
    assert step == 3
    scalars = attached.scalars()
    assert {tag: data[tag] for tag in scalars} == scalars
    assert set(data) == set(scalars) | HISTOGRAMS
    weights = torch.cat([p.detach().flatten() for p in attached._base[3].parameters()])
    drawn = data["reg/3/WeightStats/histogram"]
    assert list(drawn.histogram) == counted(weights, drawn.bins)


def test_a_writer_of_scalars_alone_gets_them():
    attached = make()

    class Scalars:
        def __init__(self):
            self.seen = {}

        def add_scalar(self, tag, value, step):
            self.seen[tag] = value

    scalars = Scalars()
    attached.log(scalars, 0)
    assert scalars.seen == attached.scalars()
    seen = []
    other = types.SimpleNamespace(log=lambda data, step: seen.append((data, step)))
    attached.log(other, 1)
    assert seen == [(attached.scalars(), 1)]


@pytest.mark.slow  # importing Lightning takes seconds
def test_loggers_of_lightning(tmp_path):
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    attached = make()
    logger = loggers.CSVLogger(tmp_path)
    attached.log(logger, 2)
    assert logger.experiment.metrics == [{**attached.scalars(), "step": 2}]


def test_a_writer_of_no_known_kind_is_refused():
    with pytest.raises(TypeError, match=r"add_scalar .*log_metrics, got list"):
        make().log([], 0)
