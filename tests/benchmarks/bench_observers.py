"""Observers against the floor: one pass over an activation, and a bare hook."""

import copy
import functools

import pytest
import torch
from torch import nn

from dropblock_hooks import ActivationStats, GradientStats, attach
from dropblock_hooks.observers.moments import Moments

SHAPE = (32, 256, 28, 28)
VARIANTS = ["x * scale", "moments", "moments and channels", "with shares and bins"]
HOOKS = ["bare hook", "GradientStats"]
RARELY = 10**9


@functools.lru_cache(maxsize=1)
def values(channels_last):
    x = torch.randn(SHAPE)
    return x.to(memory_format=torch.channels_last) if channels_last else x


def step_of(variant, x):
    """One call of a variant."""
    if variant == "x * scale":
        return lambda: x * 1.1
    moments = Moments(units=variant == "moments and channels")
    channels = x if variant == "moments and channels" else None
    every = 1 if variant == "with shares and bins" else RARELY
    moments.add(x, every, channels)  # the first is always looked at
    return lambda: moments.add(x, every, channels)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_moments(benchmark, channels_last, variant):
    benchmark.group = f"moments {SHAPE} {'channels_last' if channels_last else 'contiguous'}"
    benchmark.pedantic(step_of(variant, values(channels_last)), rounds=10, warmup_rounds=2)


def hooked(kind):
    """A layer that copies, with a hook that takes the moments of its gradient, and its backward."""
    model = nn.Sequential(nn.Identity())
    if kind == "GradientStats":
        attach(model, {"0": GradientStats(every=RARELY)})
    else:
        moments = Moments()
        moments.turn = 1

        def see(grad):
            moments.add(grad, RARELY)

        def hook(module, args, y):
            y.register_hook(see)

        model[0].register_forward_hook(hook)
    x, grad = values(False).clone().requires_grad_(), values(False)
    scale = torch.ones((), requires_grad=True)

    def step():
        (model(x * scale)).backward(grad)

    step()
    return step


@pytest.mark.parametrize("kind", HOOKS)
def test_gradient_hook(benchmark, kind):
    benchmark.group = f"gradients {SHAPE}"
    benchmark.pedantic(hooked(kind), rounds=10, warmup_rounds=2)


@pytest.mark.parametrize("observed", [False, True])
def test_training_step(benchmark, observed):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
    model = nn.Sequential(*(copy.deepcopy(block) for _ in range(4)))
    if observed:
        attach(model, {"type:Conv2d": [ActivationStats(), GradientStats()]})
    x = torch.randn(16, 64, 28, 28)
    benchmark.group = "training step of 4 convolutions"
    benchmark.pedantic(lambda: model(x).sum().backward(), rounds=20, warmup_rounds=2)
