"""The order in which what acts on gradients acts: as written, eager and compiled alike."""

import copy
import dataclasses
import itertools
import pickle

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ClampGrad,
    ClipGradNorm,
    Dropout,
    GaussianNoise,
    Regularizer,
    ScaleGrad,
    ZeroGrad,
    attach,
    detach_all,
)
from tests.handing_out import SINGLE, by_hand, spec_of

EAGER = [name for name in SINGLE if name != "by sample"]
COMPILED = ["clamp", "clip", "scale", "zero"]  # compiled code is slow to make


class Branches(nn.Module):
    """Many layers side by side, so that no gradient has passed another's regularizer."""

    def __init__(self, n):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(n)])

    def forward(self, x):
        return sum(layer(x.sin()).tanh().square().sum() for layer in self.layers)


class ByHand(nn.Module):
    def __init__(self, layer, names, at):
        super().__init__()
        self.layer, self.names, self.at = layer, names, at

    def forward(self, x):
        if self.at == "input":
            return self.layer(by_hand(x, self.names))
        return by_hand(self.layer(x), self.names)


def branches(pairs, at):
    torch.manual_seed(0)
    model = Branches(len(pairs)).double()
    reference = copy.deepcopy(model)
    for i, names in enumerate(pairs):
        reference.layers[i] = ByHand(reference.layers[i], names, at)
    attached = attach(
        model, {f"layers.{i}": spec_of(names, at=at) for i, names in enumerate(pairs)}
    )
    return model, reference, attached


def of_input(call, factor=3.0):
    torch.manual_seed(1)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    (call(x) * factor).backward()
    return x.grad


def of_parameters(model):
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("at", ["output", "input"])
def test_all_pairs(at):
    model, reference, attached = branches([*itertools.product(EAGER, repeat=2)], at)
    assert torch.allclose(of_input(model), of_input(reference), rtol=1e-9)
    for a, b in zip(of_parameters(model), of_parameters(reference), strict=True):
        assert torch.allclose(a, b, rtol=1e-9)
    assert {site.active_calls for site in attached} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("at", ["output", "input"])
def test_all_pairs_compiled(at):
    model, reference, attached = branches([*itertools.product(COMPILED, repeat=2)], at)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(of_input(compiled), of_input(reference), rtol=1e-9)
    for a, b in zip(of_parameters(model), of_parameters(reference), strict=True):
        assert torch.allclose(a, b, rtol=1e-9)
    assert {site.active_calls for site in attached} == {1}
    torch._dynamo.reset()


SCALE, CLAMP = ScaleGrad(10.0), ClampGrad(-1.0, 1.0)
BOTH = [((SCALE, CLAMP), 1.0), ((CLAMP, SCALE), 10.0)]
each_order = pytest.mark.parametrize(("pair", "wanted"), BOTH, ids=["scale first", "clamp first"])
each_at = pytest.mark.parametrize("at", ["output", "input"])


class Double(Regularizer):
    """Acts on the activation: a gradient that passes it is doubled."""

    def apply(self, x, now):
        return x * 2, None


def at_of(regularizer, at, index=None):
    return dataclasses.replace(regularizer, at=at, index=index)


def gradient(model, value=1.0):
    """What arrives at the input where `value` arrives at the output."""
    x = torch.ones(2, 3, requires_grad=True)
    (value * model(x)).sum().backward()
    (found,) = set(x.grad.flatten().tolist())
    return found


@pytest.fixture(params=["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def arrives(request):
    """`gradient`, of the model as it is, or compiled."""
    if request.param == "eager":
        yield gradient
        return
    torch._dynamo.reset()
    yield lambda model, value=1.0: gradient(
        torch.compile(model, backend="aot_eager", fullgraph=True), value
    )
    torch._dynamo.reset()


def identity():
    return nn.Sequential(nn.Identity())


@each_at
@each_order
def test_later_attachments_follow(pair, wanted, at, arrives):
    model = identity()
    for regularizer, idle in zip(pair, (Dropout(0.0), GaussianNoise(0.0)), strict=True):
        attach(model, {"0": [at_of(idle, at), at_of(regularizer, at)]})
        model[0].register_forward_hook(lambda module, args, output: None)
    assert arrives(model) == wanted


@each_at
def test_what_acts_on_activations_comes_before_also_when_it_comes_later(at, arrives):
    model = identity()
    attach(model, {"0": at_of(CLAMP, at)})
    attach(model, {"0": Double(at=at)})
    assert arrives(model, 5.0) == 2.0


@each_order
def test_a_container_comes_before_its_last_child(pair, wanted, arrives):
    """Whatever the order of the entries: the backward meets it first."""
    outer, inner = pair
    for spec in ({"0": outer, "0.0": inner}, {"0.0": inner, "0": outer}):
        model = nn.Sequential(identity())
        attach(model, spec)
        assert arrives(model) == wanted


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}
each_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


def weight_gradient(model):
    model.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    return model[0].weight.grad.item()


def one_weight():
    return nn.Sequential(nn.Linear(1, 1))


@each_order
@each_copy
def test_parameters(copied, pair, wanted):
    model = one_weight()
    attach(model, {"param:0.weight": list(pair)})
    assert weight_gradient(model) == wanted
    assert weight_gradient(copied(model)) == wanted


def test_removing_one_leaves_the_others_in_order():
    model = one_weight()
    made = [attach(model, {"param:0.weight": r}) for r in (ScaleGrad(10.0), CLAMP, ZeroGrad())]
    made[2].remove()
    assert weight_gradient(model) == 1.0
    attach(model, {"param:0.weight": ClipGradNorm(0.5)})
    assert weight_gradient(model) == 0.5
    made[1].remove()
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    assert weight_gradient(model) == 0.5
    detach_all(model)
    assert not model[0].weight._backward_hooks
