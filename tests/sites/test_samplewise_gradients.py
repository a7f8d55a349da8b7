"""Gradients of each sample, as Opacus computes them: its optimizer makes ``grad`` of them."""

import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import ClipGradNorm, HookWarning, Kind, attach

BOUND = 1e-3


def keep_gradients_of_samples(model):
    """Add the hooks of Opacus to the linear layers: they write ``grad_sample``."""
    for layer in model.modules():
        if not isinstance(layer, nn.Linear):
            continue
        for parameter in layer.parameters():
            parameter.grad_sample = None
        layer.register_forward_hook(keep_input)
        layer.register_full_backward_hook(keep_gradients)


def keep_input(layer, args, output):
    layer.kept = args[0].detach()


def keep_gradients(layer, grad_input, grad_output):
    of_samples = grad_output[0] * len(grad_output[0])
    layer.weight.grad_sample = torch.einsum("ni,nj->nij", of_samples, layer.kept)
    layer.bias.grad_sample = of_samples


class PrivateOptimizer:
    """The step of Opacus' optimizer, without its clipping and noise."""

    def __init__(self, optimizer):
        self.original_optimizer = optimizer

    def step(self):
        for group in self.original_optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad_sample.mean(0)
        self.original_optimizer.step()


def train(when, private):
    """Two updates; the norms of the gradients, and what `verify` finds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attached = attach(model, {"param:**": ClipGradNorm(BOUND, when=when)}, optimizer=optimizer)
    if private:
        keep_gradients_of_samples(model)
        optimizer = PrivateOptimizer(optimizer)
    for _ in range(2):
        model.zero_grad()
        x = torch.linspace(0, 1, 32).reshape(8, 4).requires_grad_()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.grad.norm().item() for p in model.parameters()], attached.verify()


def test_a_bound_without_effect_is_told():
    with pytest.warns(HookWarning, match="grad_sample") as caught:
        norms, findings = train("backward", private=True)
    assert len(caught) == 1
    assert max(norms) > BOUND
    assert [finding.kind for finding in findings] == [Kind.OVERWRITTEN]
    assert len(findings[0].sites) == 4
    assert 'when="accumulated"' in findings[0].cure


@pytest.mark.parametrize(
    ("when", "private"), [("accumulated", True), ("accumulated", False), ("backward", False)]
)
def test_a_bound_that_acts_is_silent(when, private):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norms, findings = train(when, private)
    assert max(norms) <= BOUND * (1 + 1e-5)
    assert findings == []
