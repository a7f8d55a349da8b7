"""Automatic mixed precision: types, bounds in the unit of the unscaled loss, overflow."""

import functools

import pytest
import torch

from dropblock_hooks import attach
from tests.stacks import (
    GRADIENT_SITES,
    GRADIENTS,
    MASKED,
    Stack,
    make_net,
    regularizers,
    train,
)

LOW = [Stack(precision="bf16"), Stack(precision="fp16")]


@functools.cache
def in_float32(name):
    return train(regularizers()[name], Stack())


@pytest.mark.parametrize("stack", LOW, ids=str)
@pytest.mark.parametrize("name", regularizers())
def test_training_in_low_precision_is_that_in_float32(stack, name):
    low, full = train(regularizers()[name], stack), in_float32(name)
    assert low.counts[0][:2] == full.counts[0][:2]
    if name in MASKED:
        assert low.counts == full.counts, "the same masks"
    for key, grad in full.gradients.items():
        assert (low.gradients[key] - grad).norm() <= 0.1 * grad.norm() + 1e-4, key


# what puts zeros in place of a gradient leaves nothing that could overflow
PASSING = {name: r for name, r in GRADIENTS.items() if name != "ZeroGrad"}


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize(("name", "selector"), [s for s in GRADIENT_SITES if s[0] in PASSING])
def test_an_overflow_skips_the_step_and_lowers_the_scale(name, selector, bad):
    """Only layers before the site are trained: the overflow is seen through the regularizer."""
    net = make_net(PASSING[name])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trained = list(net.body[0].parameters())
    optimizer = torch.optim.SGD(trained, lr=1.0)
    attach(net, {selector: PASSING[name]}, grad_scaler=scaler)
    before = [p.detach().clone() for p in trained]
    y = net.body[0](net.stem(net.example()))
    weight = torch.ones_like(y)
    weight.view(-1)[y.argmax()] = bad
    scaler.scale((y * weight).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(p, b) for p, b in zip(trained, before, strict=True))
