"""Parameters that a module held for a time only: none of them keeps a hook after ``remove``."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

from dropblock_hooks import ClipGradNorm, GradientStats, attach

BOUND = 1e-4


def make():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(model, parameters=None):
    x = torch.arange(8.0).view(2, 4)
    y = model(x) if parameters is None else functional_call(model, parameters, (x,))
    return y.square().sum()


def given(model):
    """Other leaves, as of an ensemble."""
    return {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}


def updated(model):
    """The results of an update, as in meta-learning."""
    gradients = torch.autograd.grad(loss_of(model), list(model.parameters()), create_graph=True)
    pairs = zip(model.named_parameters(), gradients, strict=True)
    return {name: p - 0.1 * gradient for (name, p), gradient in pairs}


def hooks_of(tensor):
    return len(tensor._backward_hooks or {})


@pytest.mark.parametrize("item", [ClipGradNorm(BOUND), GradientStats(every=1)])
@pytest.mark.parametrize("parameters_of", [given, updated])
def test_tensors_of_a_functional_call(parameters_of, item):
    model = make()
    attached = attach(model, {"param:0.weight": item})
    parameters = parameters_of(model)
    loss_of(model, parameters).backward()
    weight = parameters["0.weight"]
    assert hooks_of(weight) == 1
    if parameters_of is given and isinstance(item, ClipGradNorm):
        assert weight.grad.norm().item() == pytest.approx(BOUND)
    attached.remove()
    assert not hooks_of(weight)
    assert not hooks_of(model[0].weight)


def test_a_parameter_that_was_replaced():
    model = make()
    attached = attach(model, {"param:0.weight": ClipGradNorm(BOUND)})
    former = model[0].weight
    model[0].weight = nn.Parameter(former.detach() + 1)
    loss_of(model).backward()
    assert hooks_of(former) == hooks_of(model[0].weight) == 1  # the former may come back
    twin = copy.deepcopy(model)
    attached.remove()
    assert not hooks_of(former)
    assert not hooks_of(model[0].weight)
    twin.zero_grad()
    loss_of(twin).backward()
    assert twin[0].weight.grad.norm().item() == pytest.approx(BOUND)


def test_former_parameters_are_not_kept_alive():
    model = make()
    attached = attach(model, {"param:0.weight": ClipGradNorm(BOUND)})
    references = []
    for _ in range(5):
        parameters = given(model)
        references.append(weakref.ref(parameters["0.weight"]))
        loss_of(model, parameters).backward()
    del parameters
    gc.collect()
    assert not any(reference() is not None for reference in references)
    hook = attached._hooks[0]
    assert len(hook.handles) <= 2
