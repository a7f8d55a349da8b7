"""The functions that torch.compile traces, run as plain Python, so that each line is seen."""

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ActivationStats,
    ActivityL1,
    ActivityL2,
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
    GradNoise,
    ScaleGrad,
    StochasticDepth,
    Watchdog,
    ZeroGrad,
    ZLoss,
    attach,
)
from dropblock_hooks.sites import compiled, observed

ACTIVATIONS = {
    "Dropout": Dropout(0.4),
    "Dropout2d": Dropout2d(0.4),
    "DropPath": DropPath(0.4),
    "StochasticDepth": StochasticDepth(0.4),
    "GaussianNoise": GaussianNoise(0.4),
    "GaussianDropout": GaussianDropout(0.4),
    "DropBlock2d": DropBlock2d(0.4, 3),
    "DropBlock2d NHWC": DropBlock2d(0.4, 3, layout="NHWC"),
    "Dropout2d NHWC": Dropout2d(0.4, layout="NHWC"),
    "Disout": Disout(0.4, 3),
}
GRADIENTS = {
    "ClampGrad": ClampGrad(-0.5, 0.5),
    "ClipGradNorm": ClipGradNorm(0.5),
    "ClipGradNorm of samples": ClipGradNorm(0.5, per="sample"),
    "ScaleGrad": ScaleGrad(-2.0),
    "ZeroGrad": ZeroGrad(),
    "GradNoise": GradNoise(0.1),
    "DropGrad2d": DropGrad2d(0.4),
    "ActivityL1": ActivityL1(0.4),
    "ActivityL2": ActivityL2(0.4),
    "ZLoss": ZLoss(0.4),
}


def site_of(regularizer, **options):
    attached = attach(nn.Sequential(nn.Identity()), {"0": regularizer}, **options)
    return attached, attached.sites[0]


def images():
    return (torch.rand(64, 6, 6, 6) + 0.5).requires_grad_()


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_activations(case):
    attached, site = site_of(ACTIVATIONS[case])
    torch.manual_seed(0)
    x = images()
    shortcut = torch.zeros_like(x) + 0.1
    y = compiled.regularize(site._live, x, shortcut, True)
    y.sum().backward()
    assert (site.calls, site.active_calls) == (1, 1)
    if "Noise" in case or case == "GaussianDropout":
        assert site.realized_rate is None
        assert 0.3 < (y.detach() / x.detach() - 1).std() < 1
        return
    unchanged = {"StochasticDepth": shortcut, "Disout": x}.get(case, torch.zeros(()))
    hit = y == unchanged
    share = 1 - hit.double().mean() if case == "Disout" else hit.double().mean()
    assert site.realized_rate == pytest.approx(share.item())
    assert site.realized_rate == pytest.approx(0.4, abs=0.16)
    assert site.expected_rate == pytest.approx(0.4)
    if case not in ("StochasticDepth", "Disout"):
        torch.testing.assert_close(x.grad, y.detach() / x.detach())
    with attached.paused():
        torch.testing.assert_close(compiled.regularize(site._live, x, shortcut, True), x)
    assert (site.calls, site.active_calls) == (2, 1)


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients(case):
    """Against the eager hook, where nothing is drawn."""
    attached, site = site_of(GRADIENTS[case])
    eager, of_eager = site_of(GRADIENTS[case])
    assert len(eager) == len(attached)
    x = images()
    y = compiled.regularize(site._live, x, None, True)
    assert torch.equal(y, x)
    y.square().sum().backward()
    assert (site.calls, site.active_calls) == (1, 1)
    if not site.regularizer.random:
        plain = x.detach().requires_grad_()
        eager._base(plain).square().sum().backward()
        torch.testing.assert_close(x.grad, plain.grad)
        assert site.realized_rate == of_eager.realized_rate
        mine, theirs = site.norms, of_eager.norms
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.count == theirs.count
            assert mine.mean == pytest.approx(theirs.mean)
    with attached.paused():
        x.grad = None
        compiled.regularize(site._live, x, None, True).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
    assert (site.calls, site.active_calls) == (2, 1)
    with torch.no_grad():
        assert compiled.regularize(site._live, x, None, True) is x
    assert (site.calls, site.active_calls) == (3, 1)


def test_bounds_with_a_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    _, site = site_of(ClampGrad(-0.5, 0.5), grad_scaler=scaler)
    x = images()
    scaler.scale(compiled.regularize(site._live, x, None, True).sum()).backward()
    assert torch.equal(x.grad, torch.full_like(x, 4.0))


@pytest.mark.parametrize(
    "observer", [ActivationStats(), GradientStats(every=1), Watchdog(every=None)]
)
def test_observers(observer):
    """Against the eager hook."""
    attached, site = site_of(observer)
    eager, of_eager = site_of(observer)
    for _ in range(3):
        x = images()
        output = x * 1.0
        new = observed.observe(site._live, [output], [x], True)
        y = new[0] if new else output
        y.square().sum().backward()
        eager._base(x * 1.0).square().sum().backward()
    assert (site.calls, site.active_calls) == (of_eager.calls, of_eager.active_calls) == (3, 3)
    assert attached.report()[0].observed == eager.report()[0].observed
    with attached.paused():
        observed.observe(site._live, [images() * 1.0], [], True)
    assert (site.calls, site.active_calls) == (4, 3)
