"""``attached.log``: what TensorBoard, wandb and others are given."""

import types

import pytest
import torch
from torch import nn

from dropblock_hooks import ActivationStats, Capture, Dropout2d, WeightStats, attach


@pytest.fixture
def attached():
    """The attachment of a model that was trained for a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 64, 2))
    spec = {"0": [ActivationStats(), Capture()], "1": Dropout2d(0.5), "3": WeightStats()}
    attached = attach(model, spec)
    model(torch.randn(4, 3, 10, 10)).square().sum().backward()
    return attached


def test_tensorboard_gets_every_scalar(attached, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="an option of the user's")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        attached.log(writer, 7)
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    expected = attached.scalars()
    assert set(events.Tags()["scalars"]) == set(expected)
    for tag, value in expected.items():
        (event,) = events.Scalars(tag)
        assert (event.step, event.value) == (7, pytest.approx(value, rel=1e-6))


def test_a_logger_gets_all_in_one_call(attached):
    """As a run of wandb, or its module."""
    seen = []
    attached.log(types.SimpleNamespace(log=lambda data, step: seen.append((data, step))), 3)
    assert seen == [(attached.scalars(), 3)]


@pytest.mark.slow  # importing Lightning takes seconds
def test_loggers_of_lightning(attached, tmp_path):
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    logger = loggers.CSVLogger(tmp_path)
    attached.log(logger, 2)
    assert logger.experiment.metrics == [{**attached.scalars(), "step": 2}]


def test_a_writer_of_no_known_kind_is_refused(attached):
    with pytest.raises(TypeError, match=r"add_scalar .*log_metrics, got list"):
        attached.log([], 0)
