"""Compiled code with symbolic sizes, for images of several sizes: it counts and acts as ever."""

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ActivationStats,
    AdaptiveClipGrad,
    ClipGradNorm,
    DropBlock2d,
    DropGrad2d,
    GradNoise,
    ScaleGrad,
    ZLoss,
    attach,
)
from tests.cases import not_in_dynamo_of_2_9, rest_slow

SIZES = (12, 16, 20)
ON_GRADIENTS = [
    {"1": GradNoise(std=0.0)},
    {"1": ClipGradNorm(max_norm=1e-3, norm_type=3.0)},
    {"1": ClipGradNorm(max_norm=1e-3, per="sample")},
    {"1": ScaleGrad(0.5)},
    {"1": ZLoss(weight=0.1, dim=1)},
    {"1": DropGrad2d(p=0.0)},
    {"param:0.weight": AdaptiveClipGrad(clip_factor=1e-3, eps=0.002)},
]
READ_BY_RULES = [DropBlock2d(p=0.2, block_size=3), ActivationStats(every=1)]


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


def gradients(model, call):
    """The gradients of the weights, summed over images of several sizes."""
    generator = torch.Generator().manual_seed(1)
    for size in SIZES:
        images = torch.randn(2, 3, size, size + 1, generator=generator)
        call(images).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@not_in_dynamo_of_2_9("a backward with symbolic sizes in an autograd.Function")
@pytest.mark.parametrize("spec", rest_slow(ON_GRADIENTS), ids=repr)
def test_gradients_are_those_of_eager_mode(spec):
    eager = net()
    attach(eager, spec)
    expected = gradients(eager, eager)

    model = net()
    attached = attach(model, spec)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    torch.testing.assert_close(gradients(model, compiled), expected)
    assert [row.calls for row in attached.report()] == [len(SIZES)]


@pytest.mark.parametrize("regularizer", rest_slow(READ_BY_RULES, 1), ids=repr)
def test_the_axes_of_a_layer_that_is_compiled_alone(regularizer):
    model = net()
    attached = attach(model, {"1": regularizer})
    model[1].compile(backend="aot_eager", dynamic=True)
    gradients(model, model)
    assert [row.calls for row in attached.report()] == [len(SIZES)]
    assert attached.verify() == []
