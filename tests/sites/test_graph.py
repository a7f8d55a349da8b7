"""Compiled code calls no Python of the package, needs no CPU, and has one graph for all rates."""

import copy
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func

import dropblock_hooks
from dropblock_hooks import (
    L2SP,
    ActivationStats,
    ActivityL1,
    ActivityL2,
    AdaGC,
    ClampActivation,
    ClampGrad,
    ClipGradNorm,
    Disout,
    DropBlock2d,
    DropGrad2d,
    Dropout,
    Dropout2d,
    DropPath,
    GaussianDropout,
    GaussianNoise,
    GradientStats,
    GradNoise,
    LinearSchedule,
    OnGradients,
    Probability,
    Regularizer,
    ScaleGrad,
    SkipUpdate,
    StochasticDepth,
    Watchdog,
    ZClip,
    ZeroGrad,
    ZLoss,
    attach,
    register,
)
from tests.cases import rest_slow

PACKAGE = str(Path(dropblock_hooks.__file__).parent)
CASES = {
    "DropBlock2d": DropBlock2d(0.2, 3),
    "Dropout2d": Dropout2d(LinearSchedule(0.1, 0.3, epochs=9)),
    "Dropout": Dropout(0.2),
    "DropPath": DropPath(0.2),
    "Disout": Disout(0.2, 3),
    "GaussianNoise": GaussianNoise(0.1),
    "GaussianDropout": GaussianDropout(0.1),
    "ClampActivation": ClampActivation(-0.3, 0.3),
    "ClampGrad": ClampGrad(-1e-3, 1e-3),
    "ClipGradNorm": ClipGradNorm(1e-3),
    "ClipGradNorm of samples": ClipGradNorm(1e-3, per="sample"),
    "ScaleGrad": ScaleGrad(0.5),
    "ZeroGrad": ZeroGrad(),
    "GradNoise": GradNoise(0.1),
    "DropGrad2d": DropGrad2d(0.2),
    "ActivityL1": ActivityL1(0.1),
    "ActivityL2": ActivityL2(0.1),
    "ZLoss": ZLoss(0.1),
    "ActivationStats": ActivationStats(),
    "ActivationStats of outliers": ActivationStats(outliers=True),
    "GradientStats": GradientStats(),
    "Watchdog": Watchdog(every=None),
    "Watchdog with rows": Watchdog(every=None, keep=3),
}
SOON = ["DropBlock2d", "ClampGrad", "Watchdog"]
LAYERS = "blocks.1.*"
PARTS = 4  # of the cases, so that each case of a part has a layer of its own


def spec_of_part(part):
    """Each case of a part on a layer of its own, because to compile each alone takes long."""
    cases = list(CASES.values())[part::PARTS]
    layers = [f"blocks.{block}.{layer}" for block in range(2) for layer in range(3)]
    assert len(cases) <= len(layers)
    return dict(zip(layers, cases, strict=False))


SPECS = {case: {LAYERS: CASES[case]} for case in SOON}
SPECS |= {f"part {part}": spec_of_part(part) for part in range(PARTS)}
each_spec = pytest.mark.parametrize("name", rest_slow(SPECS))


class Net(nn.Module):
    """Two blocks of a convolution, a norm and an activation."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(c, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
                for c in (3, 6)
            )
        )

    def forward(self, x):
        return self.blocks(x)


def images(device="cpu"):
    return torch.randn(4, 3, 8, 8, device=device)


def calls_of_the_package(step):
    """The functions of the package that a step calls, outside of the kernels for CPUs."""
    found = Counter()

    def note(frame, event, arg):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE) and "functional" not in path:
            found[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def check_that_a_warm_step_calls_no_python(model, spec, backend):
    attached = attach(model, spec)
    torch._dynamo.reset()
    call = torch.compile(model, backend=backend, fullgraph=True)

    def step():
        call(images()).square().mean().backward()

    for epoch in range(3):
        attached.step(epoch)
        step()
    step()
    assert not calls_of_the_package(step)
    assert all(site.calls == 5 for site in attached.sites)
    inside = torch.compile(lambda x: model(x) * 1.0, backend=backend, fullgraph=True)
    for _ in range(3):  # here torch also compiles the hook of the model
        inside(images()).square().mean().backward()
    assert not calls_of_the_package(lambda: inside(images()).square().mean().backward())


@pytest.mark.every(2)
@pytest.mark.parametrize("case", rest_slow(CASES, SOON))
def test_a_warm_step_calls_no_python(case):
    check_that_a_warm_step_calls_no_python(Net(), {LAYERS: CASES[case]}, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_warm_step_of_inductor_calls_no_python(part):
    check_that_a_warm_step_calls_no_python(Net(), spec_of_part(part), "inductor")


@pytest.mark.parametrize(
    "regularizer",
    rest_slow(
        [
            AdaGC(),
            ClipGradNorm(1.0, group=True),
            ZClip(),
            SkipUpdate(),
            L2SP(0.1, when="accumulated"),
        ],
        1,
    ),
    ids=lambda each: each.label,
)
def test_what_acts_once_per_update_calls_python_in_the_update_only(regularizer):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach(model, {"param:**": regularizer}, optimizer=optimizer)
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)

    def step():
        call(images()).square().mean().backward()

    for epoch in range(2):
        attached.step(epoch)
        for _ in range(2):
            step()
            optimizer.step()
    assert not calls_of_the_package(step)
    assert calls_of_the_package(optimizer.step)
    assert {site.active_calls for site in attached.sites} == {5}


def graphs_of(model, x):
    """The graphs of AOTAutograd of a training step, each with its example inputs."""
    graphs = []

    def keep(graph, inputs):
        graphs.append((graph, inputs))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    torch.compile(model, backend=backend, fullgraph=True)(x).square().mean().backward()
    return graphs


@each_spec
def test_on_another_device_no_tensor_is_on_the_cpu(name):
    with torch.device("meta"):
        model, x = Net(), images("meta")
    attach(model, SPECS[name])
    graphs = graphs_of(model, x)
    assert len(graphs) == 2
    for graph, _ in graphs:
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            for each in value if isinstance(value, (tuple, list)) else [value]:
                assert not isinstance(each, torch.Tensor) or each.device.type == "meta", node


@each_spec
def test_only_tensors_that_stay_in_place_are_changed(name):
    model = Net()
    attached = attach(model, SPECS[name])
    static = []

    def backend(graph, inputs):
        static.append(
            {
                id(x)
                for x in inputs
                if getattr(x, "_dynamo_static_input_type", None) is not None
                or isinstance(x, nn.Parameter)
            }
        )
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(images()).sum()
    (static,) = static
    for site in attached.sites:
        tensors = [
            site._live.counts,
            site._live.gradient_counts,
            site._live.norm_cells,
            site._live.cells,
        ]
        if site._live.observed is not None:
            seen = site._live.observed
            tensors += [seen.state, seen.gradients, seen.alive, seen.batches, *seen.sums.values()]
        for x in tensors:
            assert x is None or x._dynamo_static_input_type is not None


@register
@dataclass(frozen=True, repr=False)
class TracedHalf(Regularizer):
    """Halves a share of the elements; compiled code traces it."""

    p: Probability = 0.5
    traced = True

    def apply(self, x, now):
        mask = torch.rand(x.shape, device=x.device) < now.p
        return torch.where(mask, x / 2, x), mask.sum()


@register
@dataclass(frozen=True, repr=False)
class TracedSign(OnGradients, Regularizer):
    """Takes the sign of the gradient."""

    traced = True

    def apply(self, x, now):
        return x.sign(), None


@register
@dataclass(frozen=True, repr=False)
class ReadsAFloat(Regularizer):
    """Reads its rate as a number, which an operator that calls Python gives it."""

    p: Probability = 0.5

    def apply(self, x, now):
        assert isinstance(now.p, float)
        return x * (1 - now.p), 0


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_own_classes(backend):
    ramp = LinearSchedule(0.1, 0.9, epochs=9)
    model = nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity())
    attached = attach(model, {"0": TracedHalf(ramp), "1": TracedSign(), "2": ReadsAFloat(ramp)})
    torch._dynamo.reset()
    counters.clear()
    call = torch.compile(model, backend=backend, fullgraph=True)
    for epoch in range(9):
        attached.step(epoch)
        x = (torch.rand(100, 50) + 1).requires_grad_()
        y = call(x)
        y.sum().backward()
        p = attached.sites[2].rate
        factor = y.detach() / x.detach() / (1 - p)
        assert attached.sites[0].realized_rate == pytest.approx(p, abs=0.04)
        share = ((factor - 0.5).abs() < 1e-4).float().mean().item()
        assert share == pytest.approx(attached.sites[0].realized_rate)
        torch.testing.assert_close(x.grad.abs(), torch.where(factor > 0.7, 1.0, 0.5))
    assert counters["stats"]["unique_graphs"] == 1
    with attached.paused():
        torch.testing.assert_close(call(x.detach()), x.detach())
    assert [site.active_calls for site in attached.sites] == [9, 9, 9]


@pytest.mark.parametrize("case", ["DropBlock2d", "Dropout2d", "Dropout", "GaussianDropout"])
def test_a_step_between_forward_and_backward(case):
    """The backward has the mask and the rate of its forward."""
    p = LinearSchedule(0.1, 0.9, epochs=2)
    options = {"normalize": "expected", "block_size": 3} if case == "DropBlock2d" else {}
    regularizer = getattr(dropblock_hooks, case)(p, **options)
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": regularizer})
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    for before, after in [(0, 1), (1, 0), (0, 1)]:
        attached.step(before)
        x = (torch.rand(4, 4, 6, 6) + 1).requires_grad_()
        y = call(x)
        attached.step(after)
        y.sum().backward()
        torch.testing.assert_close(x.grad, y.detach() / x.detach())


def test_a_step_between_forward_and_backward_of_a_gradient():
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": ScaleGrad(LinearSchedule(2.0, 3.0, epochs=2))})
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    for before, after, wanted in [(0, 1, 2.0), (1, 0, 3.0)]:
        attached.step(before)
        x = torch.ones(3, requires_grad=True)
        y = call(x)
        attached.step(after)
        y.sum().backward()
        assert x.grad.tolist() == [wanted] * 3


@pytest.mark.slow
def test_a_model_that_moves_takes_its_counts_along():
    model = Net()
    attached = attach(model, {"blocks.0.2": Dropout(0.5)})
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager")
    call(images()).sum().backward()
    site = attached.sites[0]
    model.to("meta")
    call(images("meta")).sum().backward()
    assert site._live.cells.device.type == "meta"
    assert site.calls == 1  # a tensor without numbers counts nothing
    rate = site.realized_rate
    assert rate == pytest.approx(0.5, abs=0.1)
    model.to_empty(device="cpu")
    call(images()).sum()
    assert site.calls == 2


@pytest.mark.slow
def test_a_copy_between_forward_and_backward():
    model = Net()
    attached = attach(model, {"blocks.0.2": [Dropout(0.5), ClampGrad(-1e-3, 1e-3)]})
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    y = call(images()).sum()
    copied = copy.deepcopy(model)
    y.backward()
    (of_copy,) = dropblock_hooks.attachments(copied)
    assert [(s.calls, s.active_calls) for s in attached.sites] == [(1, 1), (1, 1)]
    assert [(s.calls, s.active_calls) for s in of_copy.sites] == [(1, 1), (1, 0)]
    torch.compile(copied, backend="aot_eager", fullgraph=True)(images()).sum().backward()
    assert [(s.calls, s.active_calls) for s in attached.sites] == [(1, 1), (1, 1)]
    assert [(s.calls, s.active_calls) for s in of_copy.sites] == [(2, 2), (2, 1)]


@pytest.mark.slow
def test_two_attachments_on_one_model():
    model = Net()
    first = attach(model, {"blocks.0.2": Dropout(LinearSchedule(0.0, 0.5, epochs=2))})
    second = attach(model, {"blocks.1.2": DropBlock2d(0.5, 3)})
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    call(images()).sum().backward()
    first.step(1)
    call(images()).sum().backward()
    assert first.sites[0].realized_rate == pytest.approx(0.5, abs=0.1)
    second.remove()
    torch._dynamo.reset()
    call(images()).sum().backward()
    assert first.sites[0].calls == 3


def test_rates_out_of_range_change_nothing_in_compiled_code():
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": Dropout(0.25)})
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    call(torch.ones(100, 100))
    with pytest.raises(ValueError, match="p must be in"):
        attached.set("0/Dropout", p=1.5)
    torch.manual_seed(0)
    y = call(torch.ones(100, 100))
    assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert y.max().item() == pytest.approx(1 / 0.75)


@pytest.mark.parametrize("mode", ["always", "paused", "removed"])
def test_switches_write_the_board(mode):
    """A graph that nothing compiles again, such as a captured one, follows the switches."""
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": [Dropout(1.0), ScaleGrad(0.5)]})
    torch._dynamo.reset()
    x = torch.ones(2, 2, requires_grad=True)
    kept = []

    def backend(graph, inputs):
        kept.append((graph, inputs))
        return graph.forward

    call = torch.compile(model, backend=backend, fullgraph=True)
    if mode == "always":
        model.eval()
        with attached.always():
            assert not call(x).any()
    else:
        assert not call(x).any()
    graph, inputs = kept[-1]
    if mode == "paused":
        with attached.paused():
            assert torch.equal(graph(*inputs)[0], x)
        assert not graph(*inputs)[0].any()
    else:
        if mode == "removed":
            attached.remove()
        assert torch.equal(graph(*inputs)[0], x)


@pytest.mark.slow
def test_a_watchdog_looks_at_a_compiled_model_as_often_as_in_eager_mode():
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Net()
        looks = []
        attach(model, {"**": Watchdog("nonfinite", action=looks.append, every=5)})
        torch._dynamo.reset()
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for forward in range(1, 13):
            if forward == 7:
                model.blocks[1][0].weight.data[0] = torch.nan
            call(images()).sum().backward()
            if looks:
                found.append((forward, looks[0].layer, str(looks[0].text)))
                break
    assert found[0] == found[1]
    assert found[0][:2] == (8, "blocks.1.0")


def test_stochastic_depth_at_rate_zero_is_the_block_to_the_bit():
    block = nn.Sequential(nn.Linear(5, 5))
    model = nn.Sequential(block)
    attached = attach(model, {"0": StochasticDepth(LinearSchedule(0.0, 0.5, epochs=2))})
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(6, 5)
    assert torch.equal(call(x), block[0](x))
    attached.step(1)
    torch.manual_seed(1)
    y = call(x)
    dropped = (y == x).all(1)
    assert 0 < dropped.sum() < 6
    torch.testing.assert_close(y[~dropped], (x + (block[0](x) - x) * 2)[~dropped])


@pytest.mark.slow
def test_a_watchdog_looks_where_the_hook_of_the_model_is_compiled():
    """Then its clock is a hook of a parameter, which calls no Python unless it is due."""
    model = Net()
    looks = []
    attached = attach(model, {"**": Watchdog("nonfinite", action=looks.append, every=5)})
    torch._dynamo.reset()
    call = torch.compile(lambda x: model(x) * 1.0, backend="aot_eager", fullgraph=True)

    def step():
        call(images()).sum().backward()

    for _ in range(5):
        step()
    assert not calls_of_the_package(step)  # the sixth
    model.blocks[1][0].weight.data[0] = torch.nan
    assert not calls_of_the_package(step)
    assert not looks
    assert calls_of_the_package(step)
    assert [look.layer for look in looks] == ["blocks.1.0"]
    attached.remove()
    for _ in range(9):
        step()
    assert not calls_of_the_package(step)


class ManyParameters(nn.Module):
    """A model with parameters of its own, as timm's vision transformers have."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        for number in range(3):
            self.register_parameter(f"factor{number}", nn.Parameter(torch.ones(3)))

    def forward(self, x):
        for number in range(3):
            x = x * self.get_parameter(f"factor{number}")
        return self.layer(x)


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "model.compile"])
@pytest.mark.parametrize(
    "regularizer",
    [L2SP(0.1), ClipGradNorm(0.1), ClipGradNorm(0.1, when="accumulated"), GradientStats()],
    ids=["L2SP", "ClipGradNorm", "accumulated", "GradientStats"],
)
def test_parameters_of_the_model_itself_make_no_further_graph(regularizer, in_place):
    """Their hooks run outside of the graph, and dynamo would compile each one alone."""
    model = ManyParameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach(model, {"param:**": regularizer}, optimizer=optimizer)
    torch._dynamo.utils.counters.clear()
    if in_place:
        model.compile(backend="eager", fullgraph=True)
    call = model if in_place else torch.compile(model, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            call(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert counters["stats"]["unique_graphs"] == 1
    assert {site.calls for site in attached.sites} == {3}
    assert attached.verify() == []
