"""What the hooks do in a forward and a backward: modes, elements, gradients, AMP, checkpointing."""

import contextlib
import dataclasses
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    Applied,
    ClampGrad,
    ClipGradNorm,
    Disout,
    DropBlock1d,
    DropBlock2d,
    DropBlock3d,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropPath,
    GaussianDropout,
    GaussianNoise,
    HookWarning,
    Probability,
    Regularizer,
    ScaleGrad,
    SiteError,
    StochasticDepth,
    ZeroGrad,
    attach,
    register,
)
from tests.cases import not_in_dynamo_of_2_9, rest_slow


class Returns(nn.Module):
    """Gives back what `make` builds from its input."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, *args, **kwargs):
        return self.make(*args, **kwargs)


def gradient_through(model, x):
    x = x.clone().requires_grad_(True)
    model(x).sum().backward()
    return x.grad


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


Pair = namedtuple("Pair", ["a", "b"])


@pytest.mark.parametrize(
    ("make", "index"),
    [
        (lambda x: (x, x + 1), 0),
        (lambda x: (x, x + 1), -1),
        (lambda x: [x, x + 1], 1),
        (lambda x: Pair(x, x + 1), 1),
        (lambda x: {"out": x, "aux": None}, "out"),
        (lambda x: OrderedDict(out=x, aux=None), "out"),
    ],
)
def test_elements_of_outputs(make, index):
    model = Returns(make)
    x = torch.ones(3)
    bare = model(x)
    with attach(model, {".": Dropout(1.0, index=index)}):
        got = model(x)
    assert type(got) is type(bare)
    assert (got[index] == 0).all()
    keys = bare.keys() if isinstance(bare, dict) else range(len(bare))
    last = len(bare) - 1 if index == -1 else index
    assert all(got[k] is bare[k] or torch.equal(got[k], bare[k]) for k in keys if k != last)
    assert bare[index].sum() != 0, "the layer's own tuple is not changed in place"
    with attach(model, {".": ZeroGrad(index=index)}):
        leaf = x.clone().requires_grad_(True)
        model(leaf)[index].sum().backward()
        assert (leaf.grad == 0).all()


class Unsure(dict):
    """As a mapping of tensors may be: neither true nor false."""

    def __bool__(self):
        raise RuntimeError("ambiguous")


@pytest.mark.parametrize(
    ("make", "index", "text"),
    [
        (lambda x: (x, x), None, "tuple of 2 elements.*index="),
        (lambda x: {"out": x}, None, "dict with the keys 'out'.*index="),
        (lambda x: Unsure(out=x), None, "Unsure with the keys 'out'.*index="),
        (lambda x: {}, None, "dict with no keys.*index="),
        (lambda x: (x, x), 2, "no element 2"),
        (lambda x: {"out": x}, "aux", "no element 'aux'"),
        (lambda x: x, "aux", "no element 'aux'"),
        (lambda x: (x, None), 1, "NoneType"),
        (lambda x: x.long(), None, "int64 tensor of shape"),
        (lambda x: None, None, "NoneType"),
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
        with pytest.raises(
            SiteError, match=r"0/Dropout.*no element 'y'.*arguments: 2, keywords: \[\]"
        ):
            inner(torch.ones(3), torch.ones(3))
        inner.eval()(torch.ones(3), y=torch.ones(3))


def test_gradient_of_an_input_is_that_of_this_use_only():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU(inplace=True)

        def forward(self, x):
            h = x * 1
            return h * 2 + self.act(h * 1 + 0 * h)

    model = Twice()
    x = torch.ones(3)
    assert (gradient_through(model, x) == 3).all()
    with attach(model, {"act": ZeroGrad(at="input")}):
        assert (gradient_through(model, x) == 2).all()
    with attach(model, {"act": ZeroGrad()}):
        assert (gradient_through(model, x) == 2).all()


@pytest.mark.parametrize("at", ["input", "output"])
def test_an_identity_layer_leaves_the_shortcut_alone(at):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Identity()

        def forward(self, x):
            h = x * 1
            return h + self.drop(h)

    model = Block()
    with attach(model, {"drop": ZeroGrad(at=at)}):
        assert (gradient_through(model, torch.ones(3)) == 1).all()


def test_a_leaf_is_not_hooked_for_good():
    model = nn.Sequential(nn.Identity())
    x = torch.ones(3, requires_grad=True)
    with attach(model, {"0": ScaleGrad(2.0)}):
        for _ in range(3):
            x.grad = None
            model(x).sum().backward()
            assert (x.grad == 2).all()
    assert not x._backward_hooks


@pytest.mark.parametrize("at", ["input", "output"])
def test_before_an_in_place_relu(at):
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(inplace=True))
    x = torch.randn(2, 1, 4, 4)
    with attach(model, {("0" if at == "output" else "1"): ScaleGrad(3.0, at=at)}):
        scaled = gradient_through(model, x)
    assert torch.allclose(scaled, 3 * gradient_through(model, x))


def test_gradients_are_bounded_scaled_and_counted():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    spec = {"0": [ClampGrad(-0.1, 0.1), ScaleGrad(-2.0)]}
    attached = attach(model, spec)
    model(torch.randn(4, 3)).sum().backward()
    clamp, scale = attached.sites
    assert model[0].bias.grad.abs().max() <= 4 * 0.2 + 1e-6
    assert model[0].bias.grad.abs().max() > 0.2
    assert 0 < clamp.realized_rate <= 1
    assert scale.realized_rate is None
    assert (clamp.calls, clamp.active_calls) == (1, 1)
    assert attached.verify() == []


def test_double_backward_through_a_gradient_hook():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    attach(model, {"0": [ClipGradNorm(0.1), ClampGrad(-0.05, 0.05)]})
    x = torch.randn(4, 3, requires_grad=True)
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    g.square().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert x.grad.abs().sum() > 0


def test_forward_without_gradients():
    model = nn.Sequential(nn.Linear(3, 3))
    attached = attach(model, {"0": ClampGrad(-1, 1)})
    with torch.no_grad():
        model(torch.ones(1, 3))
    with torch.inference_mode():
        model(torch.ones(1, 3))
    assert (attached.sites[0].calls, attached.sites[0].active_calls) == (2, 0)


def test_inference_mode_and_training_count_together():
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": Dropout(1.0, active="always")})
    with torch.inference_mode():
        model(torch.ones(2))
    model(torch.ones(2))
    assert attached.sites[0].realized_rate == 1.0


def test_parameters():
    model = nn.Sequential(nn.Linear(3, 3))
    attached = attach(
        model, {"param:**": ClipGradNorm(0.01, per="channel"), "param:0.bias": ScaleGrad(2)}
    )
    model(torch.randn(4, 3)).sum().backward()
    assert torch.allclose(model[0].weight.grad.norm(dim=1), torch.tensor(0.01), atol=1e-6)
    assert (model[0].bias.grad.abs() <= 0.0201).all()
    assert [s.key for s in attached.sites] == [
        "0.weight/ClipGradNorm",
        "0.bias/ClipGradNorm",
        "0.bias/ScaleGrad",
    ]
    assert attached.sites[0].at == "parameter"
    assert attached.verify() == []
    model.zero_grad()
    model[0].eval()
    model(torch.randn(4, 3)).sum().backward()
    assert model[0].weight.grad.norm() > 0.1, "off while the owner is in evaluation"


def test_a_parameter_whose_owner_is_never_called():
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            return nn.functional.linear(x, self.inner.weight)

    model = Owner()
    attached = attach(model, {"param:inner.weight": ZeroGrad()})
    model(torch.ones(1, 2)).sum().backward()
    assert (model.inner.weight.grad == 0).all()
    assert attached.verify() == []


def test_a_parameter_frozen_and_thawed():
    model = nn.Sequential(nn.Linear(2, 2))
    attach(model, {"param:0.weight": ZeroGrad()})
    model[0].weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    model(torch.ones(1, 2))
    model[0].weight.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    assert (model[0].weight.grad == 0).all()


def test_two_calls_in_one_forward_are_counted_apart():
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": [Dropout(0.5), ZeroGrad()]})
    x = torch.ones(3, requires_grad=True)
    (model[0](x) + model[0](x)).sum().backward()
    assert [s.active_calls for s in attached.sites] == [2, 2]
    assert (x.grad == 0).all()


class Scaler:
    """Stands for a GradScaler: the scale only."""

    def __init__(self, scale):
        self._scale = None if isinstance(scale, float) else scale
        self.scale = scale

    def get_scale(self):
        return self.scale


@pytest.mark.parametrize("scale", [65536.0, torch.tensor(65536.0)])
@pytest.mark.parametrize("regularizer", [ClampGrad(-3.0, 3.0), ClipGradNorm(0.5)])
def test_bounds_are_those_of_the_unscaled_loss(scale, regularizer):
    model = nn.Sequential(nn.Linear(3, 3))
    x = torch.randn(4, 3)

    def gradients(factor, **options):
        model.zero_grad()
        with attach(model, {"0": regularizer, "param:**": regularizer}, **options):
            (model(x).pow(2).sum() * 5 * factor).backward()
        return model[0].weight.grad / factor

    plain = gradients(1.0)
    assert torch.allclose(gradients(65536.0, grad_scaler=Scaler(scale)), plain, rtol=1e-5)
    assert not torch.allclose(gradients(65536.0), plain, rtol=0.5)


def test_a_real_scaler():
    model = nn.Sequential(nn.Linear(3, 3))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach(model, {"param:0.weight": ClampGrad(-1e-3, 1e-3)}, grad_scaler=scaler)
    for factor in (1.0, float("inf")):
        loss = model(torch.randn(4, 3)).sum() * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        biggest = model[0].weight.grad.abs().max()
        assert (biggest <= 1e-3 + 1e-9) if factor == 1 else not torch.isfinite(biggest)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    assert scaler.get_scale() == 512.0, "the overflow was seen"


def test_a_disabled_scaler_scales_nothing():
    model = nn.Sequential(nn.Linear(3, 3))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    attach(model, {"param:0.weight": ClampGrad(-1e-3, 1e-3)}, grad_scaler=scaler)
    scaler.scale(model(torch.randn(4, 3)).sum()).backward()
    assert model[0].weight.grad.abs().max() <= 1e-3


def test_a_loaded_model_asks_for_its_scaler():
    import pickle

    from dropblock_hooks import attachments

    model = nn.Sequential(nn.Linear(3, 3))
    attach(model, {"0": ClampGrad(-1, 1)}, grad_scaler=Scaler(2.0))
    (attached,) = attachments(pickle.loads(pickle.dumps(model)))
    assert attached.verify()[0].kind == "grad_scaler"
    attached.grad_scaler = Scaler(2.0)
    assert attached.verify()[0].kind == "not_run"
    assert attached.grad_scaler.get_scale() == 2.0


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
    spec = {"1": [DropBlock2d(0.4, 3), Dropout2d(0.3)], "2": ClipGradNorm(0.5)}
    x = torch.randn(4, 2, 8, 8)

    def gradients(call):
        model.zero_grad()
        torch.manual_seed(5)
        with attach(model, spec) as attached:
            leaf = x.clone().requires_grad_(True)
            call(leaf).square().sum().backward()
        counts = [(s.calls, s.active_calls, s.realized_rate) for s in attached.sites]
        return leaf.grad, model[0].weight.grad.clone(), counts

    plain = gradients(model)
    again = gradients(lambda leaf: checkpoint(model, leaf, use_reentrant=reentrant))
    assert torch.equal(plain[0], again[0])
    assert torch.equal(plain[1], again[1])
    assert plain[2] == again[2]


@pytest.mark.parametrize(
    ("regularizer", "shape"),
    [
        (Dropout(0.5), (4, 6)),
        (Dropout1d(0.5), (4, 6, 8)),
        (Dropout2d(0.5), (4, 6, 8, 8)),
        (Dropout3d(0.5), (4, 6, 4, 4, 4)),
        (DropBlock2d(0.5, 3), (4, 6, 8, 8)),
        (DropBlock2d(0.5, 3, layout="NHWC"), (4, 8, 8, 6)),
        (Disout(0.5, 3), (4, 6, 8, 8)),
        (Disout(0.5, 3, layout="NHWC"), (4, 8, 8, 6)),
        (Dropout1d(0.5, layout="NLC"), (4, 8, 6)),
        (Dropout3d(0.5, layout="NDHWC"), (4, 4, 4, 4, 6)),
        (DropPath(0.5), (4, 6)),
        (StochasticDepth(0.5), (4, 6)),
        (GaussianNoise(0.5), (4, 6)),
        (GaussianDropout(0.5), (4, 6)),
    ],
)
def test_every_activation_regularizer_on_a_layer(regularizer, shape):
    model = nn.Sequential(Returns(lambda x: x * 2))
    x = torch.rand(shape) + 1
    attached = attach(model, {"0": regularizer})
    y = model(x)
    assert y.shape == x.shape
    assert not torch.equal(y, x * 2)
    noisy = isinstance(regularizer, GaussianNoise | GaussianDropout)
    assert (attached.sites[0].realized_rate is None) == noisy
    if not noisy and not isinstance(regularizer, StochasticDepth):
        affected = y != x * 2 if isinstance(regularizer, Disout) else y == 0
        assert attached.sites[0].realized_rate == pytest.approx(affected.float().mean().item())
    attached.set("0", **dict.fromkeys(regularizer.rates, 0.0))
    assert torch.equal(model(x), x * 2)


def test_channels_last_layouts_drop_channels():
    model = nn.Sequential(nn.Identity())
    attach(model, {"0": Dropout2d(0.5, layout="NHWC")})
    y = model(torch.ones(8, 5, 5, 16))
    planes = y.permute(0, 3, 1, 2).flatten(2)
    assert set(planes.mean(2).flatten().tolist()) == {0.0, 2.0}
    assert y.is_contiguous()


def test_rate_zero_gives_the_very_same_tensor():
    model = nn.Sequential(Returns(lambda x: x))
    x = torch.ones(2, 3, 4, 4)
    for regularizer in (DropBlock2d(0.0), Dropout2d(0.0, layout="NHWC"), GaussianNoise(0.0)):
        state = torch.get_rng_state()
        with attach(model, {"0": regularizer}):
            assert model(x) is x
        assert torch.equal(torch.get_rng_state(), state)


IDLE = [
    *(make(0.0) for make in (Dropout, Dropout1d, Dropout2d, Dropout3d, DropPath)),
    *(make(0.0) for make in (DropBlock1d, DropBlock2d, DropBlock3d, Disout)),
    *(make(0.0) for make in (GaussianNoise, GaussianDropout)),
]


@pytest.mark.parametrize("regularizer", IDLE, ids=repr)
def test_calls_at_rate_zero_count_as_if_it_ran(regularizer, monkeypatch):
    def counts(idle):
        monkeypatch.setattr(type(regularizer), "idle_at_zero", idle)
        given = []
        model = nn.Sequential(Returns(lambda x: given.append(2 * x) or given[-1]))
        attached = attach(model, {"0": regularizer})
        for shape in ((2, 3), (2, 3), (4, 5), (2, 3)):
            x = torch.randn(*shape, *[3] * (regularizer.spatial or 2))
            assert model(x) is given[-1]
        (site,) = attached.sites
        attached.set(site.key, **dict.fromkeys(regularizer.rates, 0.5))
        torch.manual_seed(0)
        assert not torch.equal(model(x), given[-1]), "and it acts again"
        return site.calls, site.active_calls, attached.state_dict()

    assert type(regularizer).idle_at_zero
    assert counts(True) == counts(False)


def test_a_subclass_that_acts_at_zero_runs_every_time():
    class Shift(Dropout):
        def apply(self, x, now):
            return x + 1, None

    model = nn.Sequential(nn.Identity())
    with attach(model, {"0": Shift(0.0)}):
        for _ in range(3):
            assert torch.equal(model(torch.zeros(3)), torch.ones(3))


def test_at_rate_zero_a_block_must_keep_its_shape():
    model = nn.Sequential(Returns(lambda x: x[..., :4]))
    with attach(model, {"0": StochasticDepth(0.0)}):
        model(torch.zeros(2, 4))
        with pytest.raises(SiteError, match="keeps its shape"):
            model(torch.zeros(2, 8))


def test_at_rate_zero_what_is_no_tensor_is_still_an_error():
    model = nn.Sequential(Returns(lambda x: x if len(x) == 2 else {"y": x}))
    (site,) = attach(model, {"0": Dropout(0.0)}).sites
    for _ in range(2):
        model(torch.ones(2, 3))
    model[0].make = lambda x: {"y": x}
    with pytest.raises(SiteError, match="dict with the keys 'y'"):
        model(torch.ones(2, 3))
    assert site.active_calls == 2


def test_at_rate_zero_a_class_of_ones_own_runs():
    @register
    class AddsOne(Regularizer):
        p: Probability = 0.0

        def apply(self, x, now):
            return x + 1, None

    model = nn.Sequential(nn.Identity())
    attach(model, {"0": AddsOne()})
    for _ in range(3):
        assert model(torch.zeros(2)).sum() == 2


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")  # whose category differs by version
def test_at_rate_zero_a_trace_is_refused():
    model = nn.Sequential(nn.Identity())
    attach(model, {"0": Dropout(0.0)})
    model(torch.ones(2, 2))
    with pytest.raises(SiteError, match=r"jit\.trace"):
        torch.jit.trace(model, torch.ones(2, 2))


def test_stochastic_depth_needs_the_input():
    model = nn.Sequential(Returns(lambda x: x))
    attach(model, {"0": StochasticDepth(0.5)})
    with pytest.raises(SiteError, match="first positional argument"):
        model[0](x=torch.ones(3, 2))


def test_stochastic_depth_passes_the_input():
    model = nn.Sequential(Returns(lambda x: x + 1))
    attach(model, {"0": StochasticDepth(1.0)})
    x = torch.randn(4, 3)
    assert torch.equal(model(x), x)


@pytest.mark.parametrize("result", [torch.ones(2), (torch.ones(2), 0), (None, 0), 3])
def test_an_apply_that_breaks_its_contract(result):
    class Broken(Regularizer):
        def apply(self, x, now) -> Applied:
            return result

    model = nn.Sequential(nn.Identity())
    attach(model, {"0": Broken()})
    with pytest.raises(SiteError, match="0/Broken"):
        model(torch.ones(5))


def test_a_regularizer_of_ones_own_sees_now():
    seen = {}

    @register
    class Peek(Regularizer):
        p: Probability = 0.25
        factor: float = 2.0

        def apply(self, x, now):
            seen.update(p=now.p, layout=now.layout, training=now.training, input=now.input)
            return x * self.factor, x.numel()

    model = nn.Sequential(Returns(lambda x: x + 1))
    attached = attach(model, {"0": Peek(layout="NHWC")})
    x = torch.ones(2, 3)
    assert (model(x) == 4).all()
    assert seen == {"p": 0.25, "layout": "NHWC", "training": True, "input": x}
    assert attached.sites[0].realized_rate == 1.0


@pytest.mark.parametrize("backend", rest_slow(["eager", "aot_eager"], 0))
def test_under_compile_it_acts_and_does_not_recompile(backend):
    from dropblock_hooks import LinearSchedule

    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3))
    spec = {"1": [DropBlock2d(LinearSchedule(0.0, 0.5, epochs=20), 3), ClipGradNorm(1e-3)]}
    attached = attach(model, spec)
    compiled = torch.compile(model, backend=backend)
    torch._dynamo.utils.counters.clear()
    x = torch.randn(4, 1, 12, 12)
    frames = []
    for epoch in range(20):
        attached.step(epoch)
        compiled(x).sum().backward()
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert frames[1] == frames[-1]
    assert attached.sites[0].active_calls == attached.sites[1].active_calls == 20
    assert attached.sites[0].rate == 0.5
    model.eval()
    on = compiled(x)
    attached.remove()
    assert torch.equal(on, model(x))
    torch._dynamo.reset()


def clipped_norm(model, x, between):
    """Norm of a parameter's gradient when something runs between forward and backward."""
    model.zero_grad()
    loss = model(x).sum() * 100
    between(model)
    loss.backward()
    return model[0].weight.grad.norm().item()


@pytest.mark.parametrize("selector", ["param:0.weight", "1"])
def test_other_forwards_between_forward_and_backward(selector):
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    attached = attach(model, {selector: ClipGradNorm(1e-3)})
    x = torch.ones(2, 4)
    alone = clipped_norm(model, x, lambda model: None)

    def evaluate(model):
        with torch.no_grad():
            model.eval()(x)
        model.train()

    def pause(model):
        with attached.paused(), torch.no_grad():
            model(x)

    assert alone < 1e-2
    assert clipped_norm(model, x, evaluate) == alone
    assert clipped_norm(model, x, pause) == alone


class Attends(nn.Module):
    """Uses the weight of a layer that is never called, and a parameter list."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8))])

    def forward(self, x):
        return self.attention(x, x, x)[0] * self.scales[0]


def test_parameters_of_owners_that_are_never_called_survive_copies_and_files():
    import copy
    import io

    model = Attends()
    spec = {"param:attention.out_proj.weight": ClipGradNorm(1e-3), "param:scales.0": ZeroGrad()}
    attached = attach(model, spec)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for each in (model, copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        each(torch.randn(3, 2, 8)).square().sum().backward()
        assert each.attention.out_proj.weight.grad.norm() < 1.01e-3
        assert (each.scales[0].grad == 0).all()
        each.zero_grad()
    model.eval()(torch.randn(3, 2, 8)).square().sum().backward()
    assert model.scales[0].grad.abs().sum() > 0, "off in evaluation"
    attached.remove()
    assert not model._forward_pre_hooks


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
    assert "no longer has" in message
    ((kind, message),) = findings(lambda m: nn.utils.parametrizations.weight_norm(m[0]))
    assert "no longer has" in message

    def freeze(model):
        model[0].weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)

    ((kind, message),) = findings(freeze)
    assert "frozen" in message


@pytest.mark.parametrize("call", [lambda i, b: i(b), lambda i, b: i(input=b)])
def test_what_a_layer_passes_through_keeps_its_other_gradients(call):
    layer = nn.Identity()
    attach(layer, {".": ZeroGrad()})
    w = torch.ones(3, requires_grad=True)
    b = w * 1
    (call(layer, b).sum() + 5 * b.sum()).backward()
    assert (w.grad == 5).all()


def test_a_second_argument_that_is_passed_through():
    layer = Returns(lambda a, b: b)
    attach(layer, {".": ZeroGrad()})
    w = torch.ones(3, requires_grad=True)
    b = w * 1
    (layer(1, b).sum() + 5 * b.sum()).backward()
    assert (w.grad == 5).all()


def test_bounds_that_overflow_with_the_loss_scale():
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity())
    spec = {"1": ClipGradNorm(1e35), "param:0.weight": [ClipGradNorm(1e35), ClampGrad(-1e36, 1e36)]}
    attach(model, spec, grad_scaler=Scaler(torch.tensor(65536.0)))
    model(torch.randn(4, 3)).sum().backward()
    assert torch.isfinite(model[0].weight.grad).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_bounds_that_do_not_fit_the_type(dtype):
    model = nn.Sequential(nn.Linear(4, 4)).to(dtype)
    attach(model, {"0": ClampGrad(-1e39, 1e39)})
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    assert torch.isfinite(model[0].weight.grad).all()


@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_a_parameter_without_axes(per):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.s = nn.Parameter(torch.tensor(3.0))

        def forward(self, x):
            return x * self.s

    model = Scale()
    attach(model, {"param:s": ClipGradNorm(1.0, per=per)})
    model(torch.ones(9)).sum().backward()
    assert model.s.grad == 1.0


def test_an_output_without_axes():
    model = nn.Sequential(Returns(lambda x: x.sum()))
    attach(model, {"0": DropPath(0.5)})
    with pytest.raises(SiteError, match="0/DropPath.*0-D"):
        model(torch.ones(3))


def test_an_index_of_a_tensor_or_of_a_record():
    import dataclasses

    @dataclasses.dataclass
    class Record:
        out: torch.Tensor
        aux: int = 3

    model = nn.Sequential(nn.Linear(4, 4))
    with (
        attach(model, {"0": Dropout(0.5, index=0)}),
        pytest.raises(SiteError, match="no element 0"),
    ):
        model(torch.ones(3, 4))
    record = Returns(lambda x: Record(x))
    with attach(record, {".": Dropout(1.0, index="out")}):
        got = record(torch.ones(3))
    assert (got.out == 0).all()
    assert got.aux == 3
    with (
        attach(record, {".": Dropout(1.0)}),
        pytest.raises(SiteError, match="fields out, aux.*index="),
    ):
        record(torch.ones(3))
    keyed = Returns(lambda x: OrderedDict(out=x))
    with (
        attach(keyed, {".": Dropout(1.0, index=0)}),
        pytest.raises(SiteError, match="no element 0"),
    ):
        keyed(torch.ones(3))


def test_a_count_with_a_gradient_keeps_no_graph():
    class Sums(Regularizer):
        def apply(self, x, now):
            return x * 2, x.sum()

    model = nn.Sequential(Returns(lambda x: x * 1))
    attached = attach(model, {"0": Sums()})
    model(torch.ones(3, requires_grad=True))
    assert not attached.sites[0].counter.snapshot().affected.requires_grad


@not_in_dynamo_of_2_9("hooks of the whole model in a strict export")
def test_an_export_in_evaluation_is_that_of_the_bare_model():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()).eval()
    x = torch.ones(1, 1, 8, 8)
    bare = str(torch.export.export(model, (x,), strict=True).graph)
    attach(model, {"1": [DropBlock2d(0.3), ClampGrad(-1, 1)], "0": Dropout(0.1, at="input")})
    assert str(torch.export.export(model, (x,), strict=True).graph) == bare
    torch._dynamo.reset()


@dataclasses.dataclass
class Plain:
    hidden: torch.Tensor
    scores: torch.Tensor = dataclasses.field(init=False, default=None)
    steps: list = dataclasses.field(init=False, default_factory=list)


@dataclasses.dataclass
class Derived:
    hidden: torch.Tensor
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        self.made += 1
        self.steps = []
        self.scores = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: torch.Tensor
    scores: torch.Tensor = dataclasses.field(init=False, default=None)
    steps: list = dataclasses.field(init=False, default_factory=list)


@dataclasses.dataclass(slots=True)
class Slotted:
    hidden: torch.Tensor
    scores: torch.Tensor = dataclasses.field(init=False, default=None)
    steps: list = dataclasses.field(init=False, default_factory=list)


class Records(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        record = self.kind(y)
        object.__setattr__(record, "scores", y * 2)
        object.__setattr__(record, "steps", [1, 2])
        return record


@pytest.mark.parametrize("regularizer", [Dropout(1.0), ZeroGrad()], ids=str)
@pytest.mark.parametrize("kind", [Plain, Derived, Frozen, Slotted])
def test_a_dataclass_keeps_what_its_constructor_does_not_take(kind, regularizer):
    model = nn.Sequential(Records(kind))
    attach(model, {"0": dataclasses.replace(regularizer, index="hidden")})
    found = model(torch.ones(2, 4))
    assert type(found) is kind
    assert found.steps == [1, 2]
    assert torch.equal(found.scores, model[0].linear(torch.ones(2, 4)) * 2)
    assert getattr(found, "made", 1) == 1
    assert (found.hidden == 0).all() == (regularizer == Dropout(1.0))


@dataclasses.dataclass(frozen=True)
class Couple:
    hidden: torch.Tensor
    other: torch.Tensor


def test_dataclasses_in_compiled_code():
    torch._dynamo.reset()
    model = nn.Sequential(Returns(lambda x: Couple(x * 2, x * 3)))
    attach(model, {"0": Dropout(1.0, index="hidden")})
    found = torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2))
    assert type(found) is Couple
    assert (found.hidden == 0).all()
    assert (found.other == 3).all()
    model = nn.Sequential(Returns(Plain))
    attach(model, {"0": Dropout(1.0, index="hidden")})
    with pytest.raises(Exception, match=r"init=False|Observed exception"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2))
    torch._dynamo.reset()


class AddsInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        x += self.conv(x)
        return x


class HandsOnAView(AddsInPlace):
    def forward(self, x):
        return super().forward(x).view_as(x)


class WorksInPlaceInside(AddsInPlace):
    def forward(self, x):
        return torch.relu_(x + torch.relu_(self.conv(x)))


@pytest.mark.parametrize(
    ("block", "mode"),
    [
        *((AddsInPlace, mode) for mode in ("train", "always", "inference", "compiled")),
        *((HandsOnAView, mode) for mode in ("train", "always")),  # nothing counts elsewhere
    ],
)
def test_a_block_that_gives_its_input_back_changed_is_refused(block, mode):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), block())
    options = {"active": "always"} if mode in ("always", "inference") else {}
    attached = attach(model, {"1": StochasticDepth(0.5, **options)})
    model.train("active" not in options)
    call = torch.compile(model, backend="eager", fullgraph=True) if mode == "compiled" else model
    x = torch.randn(2, 3, 8, 8)
    refused = pytest.raises(Exception, match=r"changed in place|Observed exception")
    with torch.inference_mode(mode == "inference"), refused:
        call(x)
    torch._dynamo.reset()
    attached.remove()
    assert not model[1]._forward_hooks
    assert not model[1]._forward_pre_hooks


@pytest.mark.parametrize("block", [WorksInPlaceInside, nn.Identity])
def test_a_block_that_gives_another_tensor_is_not_refused(block):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), block())
    attached = attach(model, {"2": StochasticDepth(1.0)})
    x = torch.randn(2, 3, 8, 8)
    y = model(x)
    attached.remove()
    assert torch.equal(y, model[:2](x))


def test_a_mode_that_is_a_bool_of_numpy():
    model = nn.Sequential(nn.Identity())
    (site,) = attach(model, {"0": Dropout(0.5)}).sites
    model[0].training = np.bool_(True)
    model(torch.ones(3))
    assert (site.calls, site.active_calls) == (1, 1)
