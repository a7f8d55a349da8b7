"""The mean norm of gradients before they were clipped, in the table, eager and compiled."""

import json

import pytest
import torch
from torch import nn

from dropblock_hooks import ClipGradNorm, Dropout, ScaleGrad, attach
from tests.cases import rest_slow


class Scaler:
    """A loss scale, as a GradScaler has it."""

    def __init__(self, scale):
        self.scale = scale

    def get_scale(self):
        return self.scale


class Unclipped(nn.Module):
    """Two layers, whose gradients are written down before anything clips them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def norms(grad, per, norm_type):
    groups = {"tensor": [grad], "sample": grad.unbind(0), "channel": grad.unbind(1)}[per]
    return [float(torch.linalg.vector_norm(g.double(), norm_type)) for g in groups]


def gradients(model, x, scale):
    """The gradient at the output of the first layer, of the unscaled loss."""
    seen = []
    handle = model.first.register_forward_hook(
        lambda module, args, output: output.register_hook(lambda g: seen.append(g / scale)) and None
    )
    (model(x).square().sum() * scale).backward()
    handle.remove()
    return seen[0]


@pytest.mark.parametrize(
    ("compiled", "per", "norm_type", "scale"),
    rest_slow(
        [
            (False, "tensor", 2.0, 1.0),
            (False, "sample", 1.0, 1024.0),
            (False, "channel", 3.0, 1024.0),
            (True, "sample", 1.0, 1024.0),
            (True, "tensor", 2.0, 1.0),
        ],
        plain=4,
    ),
)
def test_it_is_the_mean_of_the_norms_of_the_unscaled_loss(compiled, per, norm_type, scale):
    xs = [torch.randn(5, 6) for _ in range(3)]
    expected = [n for x in xs for n in norms(gradients(Unclipped(), x, scale), per, norm_type)]
    model = Unclipped()
    regularizer = ClipGradNorm(0.5, norm_type, per)
    attached = attach(model, {"first": regularizer}, grad_scaler=Scaler(scale))
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for x in xs:
        (call(x).square().sum() * scale).backward()
    (site,) = attached.sites
    assert site.mean_norm == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert attached.report()[0].mean_norm == site.mean_norm
    assert f"{site.mean_norm:.4g}" in str(attached)


def test_it_is_of_the_window_and_in_the_state():
    model = Unclipped()
    attached = attach(model, {"param:first.weight": ClipGradNorm(1e-6)})
    (site,) = attached.sites
    assert site.mean_norm is None
    means = []
    for epoch in range(2):
        attached.step(epoch)
        model.zero_grad()
        (model(torch.ones(2, 6)).sum() * (epoch + 1)).backward()
        means.append(site.mean_norm)
    assert means[1] == pytest.approx(2 * means[0])
    state = attached.state_dict()
    assert json.loads(json.dumps(state)) == state
    saved = state["sites"][site.key]
    assert saved["norms"]["total"] == pytest.approx(sum(means))
    assert sum(n for _, n in saved["norms"]["bins"]) == 2
    loaded = attach(Unclipped(), {"param:first.weight": ClipGradNorm(1e-6)})
    loaded.load_state_dict(state)
    assert loaded.state_dict()["sites"] == state["sites"]


def test_overflow_leaves_no_infinite_mean():
    model = Unclipped()
    attached = attach(model, {"first": ClipGradNorm(1.0)})
    (model(torch.ones(2, 6)).sum() * float("inf")).backward()
    assert attached.sites[0].mean_norm is None
    assert attached.sites[0].active_calls == 1
    model(torch.ones(2, 6)).sum().backward()
    assert 0 < attached.sites[0].mean_norm < 100


def test_what_takes_no_norm_has_none():
    model = Unclipped()
    attached = attach(model, {"first": [Dropout(0.5), ScaleGrad(2.0)]})
    model(torch.ones(2, 6)).sum().backward()
    for row in attached.report():
        assert row.mean_norm is row.median_norm is row.largest_norm is None
    assert [site.norms for site in attached] == [None, None]
