"""What the hooks do in a forward and a backward: modes, elements, gradients, AMP, checkpointing."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    Applied,
    ClampGrad,
    ClipGradNorm,
    DropBlock2d,
    Dropout,
    Dropout2d,
    GaussianNoise,
    HookWarning,
    Regularizer,
    ScaleGrad,
    SiteError,
    ZeroGrad,
    attach,
    attachments,
)


class Returns(nn.Module):
    """Gives back what `make` builds from its input."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, *args, **kwargs):
        return self.make(*args, **kwargs)


@pytest.mark.parametrize("layer_training", [True, False])
@pytest.mark.parametrize("active", ["train", "always"])
def test_the_mode_of_the_layer_counts(layer_training, active):
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": Dropout(1.0, active=active)})
    model.train(not layer_training)
    model[0].train(layer_training)
    on = layer_training or active == "always"
    frozen = model.training and not on
    with pytest.warns(HookWarning, match="frozen") if frozen else contextlib.nullcontext():
        dropped = bool((model(torch.ones(8)) == 0).all())
    assert dropped == on
    assert attached.sites[0].active_calls == on


@pytest.mark.parametrize(
    ("make", "index", "text"),
    [
        (lambda x: (x, x), None, "tuple of 2 elements.*index="),
        (lambda x: {"out": x}, None, "dict with the keys 'out'.*index="),
        (lambda x: (x, x), 2, "no element 2"),
        (lambda x: x, "aux", "no element 'aux'"),
        (lambda x: x.long(), None, "int64 tensor of shape"),
    ],
)
def test_outputs_that_are_no_tensor(make, index, text):
    model = nn.Sequential(Returns(make))
    attached = attach(model, {"0": Dropout(0.5, index=index)})
    with pytest.raises(SiteError, match=f"0/Dropout on Returns '0'.*{text}"):
        model(torch.ones(3))
    assert len(model[0]._forward_hooks) == 1
    attached.remove()
    model(torch.ones(3))


def test_inputs():
    model = nn.Sequential(Returns(lambda x, y=None: x if y is None else x + y))
    with attach(model, {"0": Dropout(1.0, at="input")}) as attached:
        assert (model(torch.ones(3)) == 0).all()
        assert attached.sites[0].at == "input"
    inner = model[0]
    with attach(model, {"0": Dropout(1.0, at="input", index=1)}):
        assert (inner(torch.ones(3), torch.ones(3)) == 1).all()
    with attach(model, {"0": Dropout(1.0, at="input", index="y")}):
        assert (inner(torch.ones(3), y=torch.ones(3)) == 1).all()
        with pytest.raises(SiteError, match=r"0/Dropout.*called without the keyword 'y'"):
            inner(torch.ones(3), torch.ones(3))
        inner.eval()(torch.ones(3), y=torch.ones(3))


def test_parameters():
    model = nn.Sequential(nn.Linear(3, 3))
    attached = attach(
        model, {"param:**": ClipGradNorm(0.01, per="channel"), "param:0.bias": ScaleGrad(2)}
    )
    model(torch.randn(4, 3)).sum().backward()
    assert torch.allclose(model[0].weight.grad.norm(dim=1), torch.tensor(0.01), atol=1e-6)
    assert (model[0].bias.grad.abs() <= 0.0201).all()
    assert attached["0.weight/ClipGradNorm"].at == "parameter"
    assert attached.verify() == []
    model.zero_grad()
    model[0].eval()
    model(torch.randn(4, 3)).sum().backward()
    assert model[0].weight.grad.norm() > 0.1, "off while the owner is in evaluation"


class Attends(nn.Module):
    """Uses the weight of a layer that is never called, and a parameter list."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8))])

    def forward(self, x):
        return self.attention(x, x, x)[0] * self.scales[0]


def test_parameters_of_owners_that_are_never_called():
    model = Attends()
    spec = {"param:attention.out_proj.weight": ClipGradNorm(1e-3), "param:scales.0": ZeroGrad()}
    attached = attach(model, spec)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each(torch.randn(3, 2, 8)).square().sum().backward()
        assert each.attention.out_proj.weight.grad.norm() < 1.01e-3
        assert (each.scales[0].grad == 0).all()
        assert attachments(each)[0].verify() == []
        each.zero_grad()
    model.eval()(torch.randn(3, 2, 8)).square().sum().backward()
    assert model.scales[0].grad.abs().sum() > 0, "off in evaluation"
    attached.remove()
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("regularizer", [ClampGrad(-3.0, 3.0), ClipGradNorm(0.5)])
def test_bounds_are_those_of_the_unscaled_loss(begun, regularizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    if begun:
        scaler.scale(torch.zeros(()))  # its scale is a tensor from then on
    model = nn.Sequential(nn.Linear(3, 3))
    x = torch.randn(4, 3)

    def gradients(factor, **options):
        model.zero_grad()
        with attach(model, {"0": regularizer, "param:**": regularizer}, **options):
            (model(x).pow(2).sum() * 5 * factor).backward()
        return model[0].weight.grad / factor

    plain = gradients(1.0, grad_scaler=False)
    assert torch.allclose(gradients(65536.0, grad_scaler=scaler), plain, rtol=1e-5)
    assert not torch.allclose(gradients(65536.0, grad_scaler=False), plain, rtol=0.5)


def test_rate_zero_gives_the_very_same_tensor():
    model = nn.Sequential(Returns(lambda x: x))
    x = torch.ones(2, 3, 4, 4)
    for regularizer in (DropBlock2d(0.0), Dropout2d(0.0, layout="NHWC"), GaussianNoise(0.0)):
        state = torch.get_rng_state()
        with attach(model, {"0": regularizer}):
            assert model(x) is x
            assert attachments(model)[0].sites[0].active_calls == 1
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("result", [torch.ones(2), (torch.ones(2), 0), (None, 0), 3])
def test_an_apply_that_breaks_its_contract(result):
    class Broken(Regularizer):
        def apply(self, x, now) -> Applied:
            return result

    model = nn.Sequential(nn.Identity())
    attach(model, {"0": Broken()})
    with pytest.raises(SiteError, match="0/Broken"):
        model(torch.ones(5))


def test_verify_tells_of_dead_parameter_sites():
    def findings(change):
        model = nn.Sequential(nn.Linear(4, 4))
        attached = attach(model, {"param:0.weight": ClipGradNorm(1e-3)})
        model(torch.ones(2, 4)).sum().backward()
        assert attached.verify() == []
        change(model)
        return [(f.kind, f.text) for f in attached.verify()]

    ((kind, message),) = findings(lambda model: setattr(model[0], "weight", None))
    assert kind == "lost"
    assert "no longer has the parameter" in message

    def freeze(model):
        model[0].weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)

    ((kind, message),) = findings(freeze)
    assert "frozen" in message
