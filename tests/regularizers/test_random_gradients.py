"""GradNoise and DropGrad2d: the forward is untouched, the backward has the statistics they say."""

import math

import pytest
import torch
from torch import nn

from dropblock_hooks import DropGrad2d, GradNoise, SpecError, attach, functional


def gradient(regularizer, x, **options):
    """What comes back through an identity with the regularizer on it, of the sum of the outputs."""
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": regularizer}, **options)
    x = x.clone().requires_grad_()
    y = model(x)
    assert torch.equal(y, x)
    y.sum().backward()
    return x.grad, attached


def test_noise_has_its_mean_and_deviation():
    """Of 10**6 values: the mean within 4 / 1000 deviations, the deviation within .3 %."""
    torch.manual_seed(0)
    grad, attached = gradient(GradNoise(0.25), torch.zeros(1000, 1000))
    assert abs(grad.double().mean().item() - 1.0) < 4 * 0.25 / 1000
    assert grad.double().std().item() == pytest.approx(0.25, rel=0.003)
    assert attached.sites[0].realized_rate is None


@pytest.mark.parametrize("regularizer", [GradNoise(0.0), DropGrad2d(0.0)], ids=repr)
def test_a_rate_of_zero_draws_nothing(regularizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    state = torch.get_rng_state()
    grad, _ = gradient(regularizer, torch.zeros(2, 3, 4, 4), grad_scaler=scaler)
    assert torch.equal(grad, torch.ones(2, 3, 4, 4))
    assert torch.equal(torch.get_rng_state(), state)


def test_dropping_is_dropout2d_of_the_gradient():
    torch.manual_seed(7)
    grad, attached = gradient(DropGrad2d(0.4), torch.zeros(64, 50, 3, 3))
    torch.manual_seed(7)
    wanted = functional.dropout2d(torch.ones(64, 50, 3, 3), 0.4)
    assert torch.equal(grad, wanted)
    share = (grad == 0).double().mean().item()
    assert share == pytest.approx(0.4, abs=4 * math.sqrt(0.24 / 3200))
    assert attached.sites[0].realized_rate == pytest.approx(share)
    assert attached.sites[0].map_size == (3, 3)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_passes(bad):
    model = nn.Sequential(nn.Identity())
    attach(model, {"0": DropGrad2d(0.9)})
    x = torch.zeros(4, 8, 3, 3, requires_grad=True)
    weight = torch.ones_like(x)
    weight[..., 0, 0] = bad
    torch.manual_seed(0)
    (model(x) * weight).sum().backward()
    assert not x.grad[..., 0, 0].isfinite().any()
    assert (x.grad[..., 1:, 1:] == 0).any()


def test_parameters_have_no_map():
    with pytest.raises(SpecError, match="a parameter has no map, which DropGrad2d needs"):
        attach(nn.Conv2d(1, 1, 1), {"param:weight": DropGrad2d(0.5)})
