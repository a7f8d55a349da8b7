"""Parameters that a parametrization moves into a child of their layer after attaching."""

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


def test_a_parameter_that_becomes_two_others_is_lost():
    model = nn.Sequential(nn.Linear(4, 4))
    attached = attach(model, {"param:0.weight": ZeroGrad()})
    nn.utils.parametrizations.weight_norm(model[0])
    model(torch.ones(2, 4)).sum().backward()
    assert [each.kind for each in attached.verify()] == ["lost"]
