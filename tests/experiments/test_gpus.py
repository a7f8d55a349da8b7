"""Runs of a host share its GPUs by locks; no GPU is needed for that."""

import tempfile
import threading
from types import SimpleNamespace

import pytest
import torch

from experiments.config import Config, Runtime
from experiments.processes import make_fabric
from experiments.running.backends import workers
from experiments.running.gpus import own_gpu

CUDA = Config(accelerator="cuda")


def never():
    return False


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = lambda index: SimpleNamespace(uuid=f"GPU-{index}")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def test_each_run_has_a_gpu_of_its_own(two_gpus):
    with own_gpu(CUDA, never) as one, own_gpu(CUDA, never) as other:
        assert {one, other} == {0, 1}
    with own_gpu(CUDA, never) as again:
        assert again == 0


def test_a_run_waits_for_a_gpu(two_gpus):
    with own_gpu(CUDA, never), own_gpu(CUDA, never) as second:
        found = []

        def third():
            with own_gpu(CUDA, never) as gpu:
                found.append(gpu)

        thread = threading.Thread(target=third)
        thread.start()
        thread.join(0.2)
        assert found == []
    thread.join(10)
    assert found[0] in (0, second)


def test_a_run_that_waits_can_be_stopped(two_gpus):
    with own_gpu(CUDA, never), own_gpu(CUDA, never), own_gpu(CUDA, lambda: True) as none:
        assert none is None


def test_runs_on_the_cpu_take_none(two_gpus):
    with own_gpu(Config(accelerator="cpu"), never) as gpu:
        assert gpu is None


def test_as_many_runs_at_once_as_gpus(two_gpus, monkeypatch):
    monkeypatch.setattr("joblib.cpu_count", lambda: 16)
    with workers("loky", None, 4) as (_, fitting):
        assert fitting == 4
    with workers("loky", None, 4, gpu=True) as (_, fitting):
        assert fitting == 2


def test_the_run_is_told_its_gpu(monkeypatch):
    asked = {}
    monkeypatch.setattr("experiments.processes.Fabric", lambda **given: asked.update(given))
    make_fabric(CUDA, Runtime(gpu=1))
    assert asked["devices"] == [1]
    make_fabric(Config(accelerator="cuda", devices=2), Runtime(gpu=1))
    assert asked["devices"] == 2
