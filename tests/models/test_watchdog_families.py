"""Watchdog keeps silent on healthy models, and names the layer that made NaN in real ones."""

import math
import random

import pytest
import torch
from torch import nn

from dropblock_hooks import watch

timm = pytest.importorskip("timm")

FAMILIES = {
    "resnet10t": {},
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 6},
    "convnext_atto": {},
    "mobilenetv3_small_050": {},
    "regnetx_002": {},
    "efficientnet_lite0": {},
    "mixer_s32_224": {"img_size": 64},
    "ghostnet_050": {},
    "edgenext_xx_small": {},
    "poolformer_s12": {},
}
PLAIN = ("resnet10t", "vit_tiny_patch16_224")


def made(name):
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=10, **FAMILIES[name])


def batches(steps):
    """Handwritten digits, made larger."""
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(labels)
    for _ in range(steps):
        chosen = torch.randint(0, len(x), (4,))
        yield nn.functional.interpolate(x[chosen].expand(-1, 3, -1, -1), size=64), y[chosen]


def trained(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for x, y in batches(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "steps"),
    [(n, 12) for n in PLAIN] + [pytest.param(n, 50, marks=pytest.mark.slow) for n in FAMILIES],
)
def test_it_is_silent_on_a_healthy_model(name, steps):
    model, found = made(name), []
    attached = watch(model, action=found.append)
    trained(model, steps)
    attached.step()
    assert found == []


class Spoil(torch.autograd.Function):
    """The identity, which puts a bad number into the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, math.nan)


def layers_of(model, n):
    """Some layers, at random."""
    names = [name for name, m in model.named_modules() if name and not m._modules]
    return random.Random(0).sample(names, n)


@pytest.mark.parametrize("how", ["weight", "output"])
@pytest.mark.parametrize("n", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PLAIN)
def test_the_layer_that_made_nan_is_named(name, n, how):
    wrong = []
    for layer_name in layers_of(made(name), n):
        model, found = made(name), []
        layer, ran = model.get_submodule(layer_name), []
        layer.register_forward_hook(lambda *_, ran=ran: ran.append(1))
        if how == "weight":
            if getattr(layer, "weight", None) is None:
                continue
            nn.init.constant_(layer.weight, math.nan)
        else:
            layer.register_forward_hook(lambda _m, _a, y: y + math.inf)
        attached = watch(model, "nonfinite", action=found.append)
        trained(model, 2)
        attached.step()
        if ran and [each.layer for each in found] != [layer_name]:
            wrong.append((layer_name, [str(each) for each in found]))
    assert wrong == []
