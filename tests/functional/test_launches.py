"""How many kernels a site starts on a GPU, counted on a CPU with the form for GPUs.

An operator of torch counts as one kernel, and so does a Triton kernel. On a GPU, the backward of
the bare layer copies the gradient of the sum. A site that has a new gradient saves this copy, so a
site of gradients has one kernel less there than here.
"""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dropblock_hooks import (
    ActivationStats,
    AdaptiveClipGrad,
    Capture,
    ClampGrad,
    ClipGradNorm,
    Disout,
    DropBlock2d,
    DropGrad2d,
    Dropout,
    Dropout2d,
    DropPath,
    GaussianDropout,
    GaussianNoise,
    GradientStats,
    ScaleGrad,
    Watchdog,
    ZeroGrad,
    attach,
    register,
)
from dropblock_hooks.functional.kernels import launch

# operators that start nothing: they allocate, look, or draw a seed on the host
FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "promote_types"),
    *("detach", "alias", "_unsafe_view", "lift_fresh", "randint", "_local_scalar_dense"),
}
AT_A_LAYER = {
    DropBlock2d(0.1, 5): 5,
    DropBlock2d(0.1, 5, normalize="expected"): 5,
    DropBlock2d(0.1, 5, normalize="sample"): 5,
    DropBlock2d(0.1, 5, share_channels=True): 5,
    Disout(0.1, 5): 8,
    Dropout(0.1): 4,
    Dropout2d(0.1): 5,
    DropPath(0.1): 5,
    GaussianNoise(0.1): 3,
    GaussianDropout(0.1): 4,
    ClampGrad(-1.0, 1.0): 4,
    ClipGradNorm(1.0): 5,
    ClipGradNorm(1.0, per="sample"): 5,
    ClipGradNorm(1.0, per="channel"): 5,
    ScaleGrad(0.5): 2,
    ZeroGrad(): 2,
    DropGrad2d(0.1): 6,
    Capture(): 1,
    ActivationStats(every=1): 3,
    GradientStats(every=1): 3,
    Watchdog(): 4,
}
AT_A_PARAMETER = {ClampGrad(-1.0, 1.0): 4, ClipGradNorm(1.0): 5, AdaptiveClipGrad(0.01): 6}


class Operators(TorchDispatchMode):
    """Counts the operators that start a kernel, by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if not (operator.is_view or name in FREE):
            self.names[name] += 1
        return operator(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _like_a_gpu(kernels, monkeypatch):
    start = launch.start

    def start_alone(*args, **options):
        with _disable_current_modes():  # the interpreter calls operators of torch
            start(*args, **options)

    monkeypatch.setattr(launch, "start", start_alone)


def started(spec):
    """What a step starts with these sites beyond that of the bare layer, by name."""
    x = torch.randn(8, 8, 14, 14)
    counts = []
    for attached in (spec, {}):
        model = nn.Sequential(nn.Conv2d(8, 8, 1))
        if attached:
            attach(model, attached)
        model(x).sum().backward()  # which allocates what stays
        before = launch.launched
        with Operators() as operators:
            model(x).sum().backward()
        operators.names["a Triton kernel"] = launch.launched - before
        counts.append(operators.names)
    counts[0].subtract(counts[1])
    return +counts[0]


@pytest.mark.parametrize(("item", "most"), AT_A_LAYER.items(), ids=repr)
def test_a_site_starts_few_kernels(item, most):
    names = started({"0": item})
    assert names.total() <= most, names


@pytest.mark.parametrize(("item", "most"), AT_A_PARAMETER.items(), ids=repr)
def test_a_site_of_a_parameter_starts_few_kernels(item, most):
    names = started({"param:0.weight": item})
    assert names.total() <= most, names


def test_the_count_sees_a_kernel_that_is_not_needed(own_registry):
    @register
    class Wasteful(Dropout):
        def apply(self, x, now):
            return super().apply(x + 0, now)

    assert started({"0": Wasteful(0.1)}).total() == started({"0": Dropout(0.1)}).total() + 1
