"""Small models of which every test gets its own."""

import os

import pytest
import torch
from torch import nn

from dropblock_hooks import registry
from dropblock_hooks.functional import operators
from dropblock_hooks.functional.kernels import launch


class Residual(nn.Module):
    """A block that keeps its shape, with an in-place ReLU behind its convolution."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return x + self.act(self.conv(x))


class Net(nn.Module):
    """Stem, two stages of two blocks, head: small, and of the shape that real models have."""

    def __init__(self, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.layer1 = nn.Sequential(Residual(8), Residual(8))
        self.layer2 = nn.Sequential(Residual(8), Residual(8))
        self.fc = nn.Linear(8, classes)

    def forward(self, x):
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(x.mean((2, 3)))


@pytest.fixture
def net():
    return Net()


def hook_count(model):
    """All forward and pre-hooks of a model, and tensor hooks of its parameters."""
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return modules + sum(len(p._backward_hooks or ()) for p in model.parameters())


@pytest.fixture(name="hook_count")
def _hook_count():
    return hook_count


@pytest.fixture
def own_registry(monkeypatch):
    """What a test registers is gone after it, and what other tests registered is not there."""
    own = {n: c for n, c in registry._CLASSES.items() if c.__module__.startswith("dropblock_hooks")}
    monkeypatch.setattr(registry, "_CLASSES", own)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether an interpreter runs Triton kernels on a CPU. Without it they run on a GPU."""
KERNEL_DEVICE = "cpu" if INTERPRETED else "cuda"


def use_kernels(monkeypatch):
    """Run Triton kernels: on a GPU, or on a CPU in the form that a GPU has."""
    triton = pytest.importorskip("triton", reason="Triton comes with torch on Linux only")
    if INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton before 3.7 does not run with NumPy 1.25 and newer")
    if INTERPRETED:
        from tests.interpreter import leave_out_repetitions

        leave_out_repetitions(monkeypatch)
    monkeypatch.setattr(launch, "DEVICES", {KERNEL_DEVICE})
    monkeypatch.setattr(operators, "SEEDED", set())
    launch.is_available.cache_clear()


@pytest.fixture
def kernels(monkeypatch):
    """Kernels in place of torch operations in a whole test, whose tensors are on their device."""
    use_kernels(monkeypatch)
    if INTERPRETED:
        yield launch
        return
    with torch.device(KERNEL_DEVICE):
        yield launch


@pytest.fixture(name="use_kernels")
def _use_kernels(monkeypatch):
    """Begin to use kernels in a part of a test."""
    return lambda: use_kernels(monkeypatch)
