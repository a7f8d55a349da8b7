"""The ratio of a residual branch to its shortcut, against sums of plain hooks in float64."""

import copy
import math

import pytest
import torch
from torch import distributed, nn

from dropblock_hooks import ActivationStats, HookWarning, SiteError, attach
from tests.cases import rest_slow
from tests.pair import run_pair
from tests.sites.test_graph import calls_of_the_package

OBSERVER = ActivationStats(every=1, residual=True)
PARTLY = "layer2.0/.*: the output of the layer has another shape than its input"


class Block(nn.Module):
    """Adds a branch to its input."""

    def __init__(self, width=6):
        super().__init__()
        self.branch = nn.Linear(width, width)

    def forward(self, x):
        return x + self.branch(x)


def blocks(number=3):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(number))).double()


def resnet():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("resnet18", layers=(2, 1, 1, 1), num_classes=3).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # the branches of timm begin at 0
            nn.init.uniform_(module.weight, 0.5, 1.5)
    model.layer3, model.layer4 = nn.Identity(), nn.Identity()
    model.fc = nn.Linear(128, 3).double()
    names = ["layer1.0", "layer1.1", "layer2.0"]
    return model, {"layer*.*": OBSERVER}, names


def vit():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).double()
    return model, {"blocks.*": OBSERVER}, ["blocks.0", "blocks.1"]


def reference(model, names, inputs):
    """The ratios, from the sums of squares of all calls; None where the shapes differ."""
    sums = {name: [0.0, 0.0] for name in names}

    def add(name, x, y):
        if x.shape == y.shape:
            sums[name][0] += (y - x).square().sum().item()
            sums[name][1] += x.square().sum().item()

    for name in names:
        layer = model.get_submodule(name)
        layer.register_forward_hook(lambda m, args, y, name=name: add(name, args[0], y))
    for x in inputs:
        model(x)
    return [math.sqrt(a / b) if b else None for a, b in sums.values()]


def ratios(attached):
    return [row.observed.residual for row in attached.report()]


@pytest.mark.parametrize("compiled", rest_slow([False, True]), ids=["eager", "compiled"])
@pytest.mark.parametrize("make", rest_slow([resnet, vit]))
def test_models_of_timm(make, compiled):
    model, spec, names = make()
    torch.manual_seed(1)
    inputs = [torch.randn(n, 3, 32, 32, dtype=torch.float64) for n in (2, 2, 2)]
    wanted = reference(copy.deepcopy(model), names, inputs)
    attached = attach(model, spec)
    torch._dynamo.reset()
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    if make is resnet:
        with pytest.warns(HookWarning, match=PARTLY) as told:
            called(inputs[0])
        assert len(told) == 1
        inputs = inputs[1:]
    for x in inputs:
        called(x)
    found = ratios(attached)
    for ratio, of_hooks in zip(found, wanted, strict=True):
        assert ratio == (None if of_hooks is None else pytest.approx(of_hooks, rel=1e-6))
    assert found.count(None) == (1 if make is resnet else 0)
    assert "branch/" in str(attached)
    assert attached.scalars()[f"reg/{names[0]}/ActivationStats/residual"] == found[0]


@pytest.mark.parametrize("compiled", rest_slow([False, True]), ids=["eager", "compiled"])
def test_each_nth_call_and_epochs_of_their_own(compiled):
    model = blocks()
    wanted = reference(copy.deepcopy(model), ["1"], [torch.ones(2, 6).double()])
    attached = attach(model, {"1": ActivationStats(every=2, residual=True)})
    torch._dynamo.reset()
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    called(torch.ones(2, 6).double()).sum().backward()
    called(torch.randn(2, 6).double()).sum().backward()
    assert ratios(attached) == pytest.approx(wanted, rel=1e-9)
    attached.step()
    x = torch.randn(2, 6).double()
    called(x).sum().backward()
    assert ratios(attached) == pytest.approx(reference(blocks(), ["1"], [x]), rel=1e-9)


@pytest.mark.slow
def test_a_warm_compiled_step_calls_no_python():
    model = blocks()
    attach(model, {"*": ActivationStats(outliers=True, residual=True)})
    torch._dynamo.reset()
    called = torch.compile(model, backend="aot_eager", fullgraph=True)

    def step():
        called(torch.randn(2, 6).double()).sum().backward()

    for _ in range(3):
        step()
    assert not calls_of_the_package(step)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_call_that_is_not_finite_is_left_out(bad):
    model = blocks()
    x = torch.randn(2, 6).double()
    worse = torch.full_like(x, bad)
    attached = attach(model, {"*": OBSERVER})
    for each in (x, worse, x):
        model(each)
    assert ratios(attached) == pytest.approx(reference(blocks(), "012", [x]), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_small_branch_is_measured_in_low_precision(dtype):
    """The difference of the sums of squares would be rounded to 0."""

    class Adds(nn.Module):
        def forward(self, x):
            return x + x.sign() * 2.0**-5

    model = nn.Sequential(Adds())
    attached = attach(model, {"0": OBSERVER})
    x = torch.tensor([4.0, -6.0, 2.0, 7.0]).repeat(2, 3).to(dtype)
    model(x)
    wanted = 2.0**-5 / x.double().square().mean().sqrt().item()
    assert ratios(attached) == pytest.approx([wanted], rel=1e-6)


def test_an_input_of_zeros_has_no_ratio():
    model = blocks(1)
    attached = attach(model, {"0": OBSERVER})
    model(torch.zeros(2, 6).double())
    assert ratios(attached) == [None]


def test_blocks_that_are_called_by_keyword_and_return_a_tuple():
    class Named(Block):
        def forward(self, mask, hidden=None):
            return super().forward(hidden), None

    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Named().double()

        def forward(self, x):
            return self.block(torch.ones(2, dtype=torch.bool), hidden=x)[0]

    torch.manual_seed(0)
    model = Holds()
    x = torch.randn(2, 6).double()
    attached = attach(model, {"block": ActivationStats(every=1, residual=True, index=0)})
    y = model(x)
    wanted = ((y - x).square().sum() / x.square().sum()).sqrt().item()
    assert ratios(attached) == pytest.approx([wanted], rel=1e-9)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layer_that_gets_no_tensor_is_refused(compiled):
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3))
    attach(model, {"0": OBSERVER})
    torch._dynamo.reset()
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    ids = torch.zeros(2, 4, dtype=torch.int64)
    text = r"0/ActivationStats.*this layer gets no floating-point tensor: choose a residual block"
    with pytest.raises(Exception if compiled else SiteError, match=text):
        called(ids)


def test_the_input_has_no_ratio():
    with pytest.raises(ValueError, match="residual=True compares the output.* takes no at='input'"):
        ActivationStats(residual=True, at="input")


def test_it_is_off_by_default():
    model = blocks(1)
    attached = attach(model, {"0": ActivationStats()})
    model(torch.ones(2, 6).double())
    assert ratios(attached) == [None]
    assert "branch/" not in str(attached)


def gloo_epoch(rank):
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(n, 6, generator=generator).double() * n for n in (4, 3, 7)]
    wanted = reference(blocks(), "012", inputs)
    model = blocks()
    attached = attach(model, {"*": OBSERVER})
    for x in inputs[:1] if rank else inputs[1:]:
        model(x)
    found = [row.observed.residual for row in attached.report(distributed=True)]
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
def test_over_two_processes(tmp_path):
    run_pair(tmp_path, "tests.observers.test_residual", ["gloo_epoch"])
