"""Observers against the floor, a bare hook of the tensor, and a model that nobody watches."""

import pytest
import torch

from experiments.overhead.kernels import SHAPES
from experiments.overhead.models import Images
from experiments.overhead.observers import SPECS, activation_work, gradient_work, model_work


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "variant",
    ["floor", "ActivationStats", "moments alone", "with shares and bins", "Watchdog", "Capture"],
)
def test_activation(time_variant, shape, channels_last, variant):
    x = torch.randn(shape)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    time_variant(activation_work(x), variant)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", ["floor", "GradientStats", "tensor hook"])
def test_gradient(time_variant, shape, variant):
    time_variant(gradient_work(torch.randn(shape)), variant)


@pytest.mark.parametrize("variant", ["bare", *SPECS])
def test_training_step(time_variant, variant):
    time_variant(model_work(Images(4, 64)), variant)
