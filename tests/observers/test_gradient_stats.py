"""GradientStats: of layers and of parameters, in the unit of the unscaled loss."""

import copy

import pytest
import torch
from torch import nn

from dropblock_hooks import ClampGrad, GradientStats, attach
from tests.cases import rest_slow
from tests.observers.test_activation_stats import assert_moments, batches, make_model


def gradients(model, name, inputs):
    """What a tensor hook in a plain forward hook collects."""
    found = []

    def see(module, args, y):
        y.register_hook(lambda grad: found.append(grad.double().numpy().copy()))

    handle = model.get_submodule(name).register_forward_hook(see)
    for x in inputs:
        model(x).square().sum().backward()
    handle.remove()
    return found


@pytest.mark.parametrize("backend", rest_slow([None, "aot_eager"]))
def test_in_the_unit_of_the_unscaled_loss(backend):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = make_model()
    calls = gradients(copy.deepcopy(model), "2", batches())
    attached = attach(
        model,
        {"2": GradientStats(every=1), "param:2.weight": GradientStats(every=1)},
        grad_scaler=scaler,
    )
    call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    largest = 0.0
    for x in batches():
        model.zero_grad()
        scaler.scale(call(x).square().sum()).backward()
        largest = max(largest, model[2].weight.grad.abs().max().item() / 1024)
    of_layer, of_parameter = (row.observed for row in attached.report())
    assert_moments(of_layer, calls)
    assert of_parameter.largest == pytest.approx(largest)


def test_what_overflowed_is_left_out_and_told():
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": GradientStats(every=1)})
    for factor in (1.0, float("inf"), 3.0):
        (model(torch.ones(2, 3, requires_grad=True)) * factor).sum().backward()
    found = attached.report()[0].observed
    assert (found.calls, found.left_out, found.mean) == (3, 1, 2.0)
    assert found.channels is found.dead is None
    lines = str(attached).splitlines()
    assert "GradientStats, this epoch" in lines[1]
    assert "dead" not in lines[2]


@pytest.mark.parametrize("when", ["before", "after"])
def test_of_a_parameter_it_sees_each_backward_not_what_has_accumulated(when):
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    listed = [ClampGrad(-1.0, 1.0, when="accumulated"), GradientStats(every=1, when=when)]
    attached = attach(model, {"param:0.weight": listed}, optimizer=optimizer)
    for x in (3.0, 4.0):
        model(torch.full((1, 1), x)).sum().backward()
    optimizer.step()
    assert model[0].weight.grad == 1
    seen = attached.report()[1].observed
    assert (seen.calls, seen.mean, seen.largest) == (2, 3.5, 4.0)
