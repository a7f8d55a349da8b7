"""Parameters that a parametrization moves into a child of their layer after attaching."""

import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import ZeroGrad, attach


@pytest.mark.parametrize("parametrize", ["spectral_norm", "orthogonal"])
@pytest.mark.parametrize("when", ["backward", "accumulated"])
def test_a_parameter_that_a_parametrization_moves_is_regularized(parametrize, when):
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    attached = attach(model, {"param:0.weight": ZeroGrad(when=when)}, optimizer=optimizer)
    getattr(nn.utils.parametrizations, parametrize)(model[0])
    for epoch in range(2):
        attached.step(epoch)
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        assert attached.verify() == []
    assert not model[0].parametrizations.weight.original.grad.any()
    assert model[0].bias.grad.any()


def put_weight_norm(layer):
    nn.utils.parametrizations.weight_norm(layer)


def put_old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer)


def remove_old_weight_norm(layer):
    nn.utils.remove_weight_norm(layer)


@pytest.mark.parametrize("when", ["backward", "accumulated"])
@pytest.mark.parametrize(
    ("before", "name", "change"),
    [
        (None, "weight", put_weight_norm),
        (None, "weight", put_old_weight_norm),
        (put_old_weight_norm, "weight_g", remove_old_weight_norm),
    ],
    ids=["put on", "put on, old", "removed, old"],
)
def test_a_parameter_that_is_gone_is_told_with_what_cures_it(before, name, change, when):
    model = nn.Sequential(nn.Linear(4, 4))
    if before:
        before(model[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    attached = attach(model, {f"param:0.{name}": ZeroGrad(when=when)}, optimizer=optimizer)
    change(model[0])
    model(torch.ones(2, 4)).sum().backward()
    (finding,) = attached.verify()
    assert finding.kind == "lost"
    assert finding.text == f"the layer no longer has the parameter '{name}'"
    assert finding.cure.startswith("Call attach again")

    attached.remove()
    now, _ = next((n, p) for n, p in model.named_parameters() if p.ndim == 2)
    again = attach(model, {f"param:{now}": ZeroGrad()})
    model(torch.ones(2, 4)).sum().backward()
    assert again.verify() == []
