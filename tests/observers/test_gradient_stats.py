"""GradientStats: of layers and of parameters, in the unit of the unscaled loss."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import ClampGrad, GradientStats, attach, attachments
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


FORWARDS = [1, 2, 3, 4, 5, 10]


@pytest.mark.parametrize(
    ("mode", "forwards"),
    rest_slow(
        [*itertools.product(["eager", "compiled"], FORWARDS)],
        [*(("eager", forwards) for forwards in FORWARDS), ("compiled", 1), ("compiled", 10)],
    ),
)
def test_forwards_without_a_backward_do_not_hide_gradients(mode, forwards):
    """A GAN calls its generator several times in a step, and detaches all outputs but one."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    attached = attach(model, {"0": GradientStats()}, grad_scaler=False)
    call = torch.compile(model, backend="aot_eager") if mode == "compiled" else model
    steps = 40
    for _ in range(steps):
        for _ in range(forwards - 1):
            call(torch.ones(2, 4)).detach()
        call(torch.ones(2, 4)).sum().backward()
    assert attached.verify() == []
    (row,) = attached.report()
    measured = row.observed.calls
    assert measured >= steps / 10
    assert measured <= steps * forwards / 10 + 1
    if forwards == 1:
        assert measured == steps / 10


def test_a_layer_that_gets_no_gradient_is_reported():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    attached = attach(model, {"0": GradientStats()}, grad_scaler=False)
    for _ in range(40):
        model[1](model[0](torch.ones(2, 4)).detach())
    model(torch.ones(2, 4))
    (finding,) = attached.verify()
    assert "no gradient reached it" in finding.text


@pytest.mark.parametrize("every", [1, 2, 10])
@pytest.mark.parametrize("calls", [2, 3, 5, 20])
def test_a_layer_that_is_called_several_times_before_a_backward(calls, every):
    """No gradient is lost there: all of them come at once."""
    model = nn.Sequential(nn.Linear(4, 4))
    attached = attach(model, {"0": GradientStats(every=every)})
    steps = 20
    for _ in range(steps):
        torch.stack([model(torch.ones(2, 4)) for _ in range(calls)]).sum().backward()
    expected = calls * steps // every
    of_first_step = min(every, calls) - 1  # its calls are measured until a gradient comes
    assert attached.report()[0].observed.calls in (expected, expected + of_first_step)


@pytest.mark.parametrize("way", ["detach", "no_grad", "kept"])
@pytest.mark.parametrize("every", [2, 10])
def test_each_way_to_lose_a_gradient_shifts_the_measured_calls(way, every):
    model = nn.Sequential(nn.Linear(4, 4))
    attached = attach(model, {"0": GradientStats(every=every)})
    steps = 40
    for _ in range(steps):
        with torch.set_grad_enabled(way != "no_grad"):
            lost = model(torch.ones(2, 4))
        lost = lost if way == "kept" else lost.detach()
        model(torch.ones(2, 4)).sum().backward()
    measured = attached.report()[0].observed.calls
    assert 2 * steps / every - 3 <= measured <= 2 * steps / every + 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_of_a_checkpoint_are_not_lost(reentrant):
    model = nn.Sequential(nn.Linear(4, 4))
    attached = attach(model, {"0": GradientStats(every=2)})
    for _ in range(20):
        x = torch.ones(2, 4, requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert attached.report()[0].observed.calls == 10


class Scaler:
    """Its scale is a Python number, so compiled code calls the observers in Python."""

    def get_scale(self):
        return 1.0


@pytest.mark.parametrize("way", ["detach", "no_grad", "shared"])
def test_lost_gradients_in_code_that_is_compiled_without_being_traced(way):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4))
    attached = attach(model, {"0": GradientStats(every=2)}, grad_scaler=Scaler())
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    steps = 40
    for _ in range(steps):
        with torch.set_grad_enabled(way != "no_grad"):
            other = run(torch.ones(2, 4))
        loss = run(torch.ones(2, 4)).sum()
        if way == "shared":
            loss = loss + other.sum()
        loss.backward()
    assert not any(site._live.traced for site in attached)
    measured = attached.report()[0].observed.calls
    expected = steps if way == "shared" else steps - 2
    assert expected <= measured <= steps + 1


def test_a_copy_and_a_file_made_before_a_backward_go_on():
    model = nn.Sequential(nn.Linear(4, 4))
    attach(model, {"0": GradientStats(every=2)})
    y = model(torch.ones(2, 4))
    copied = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    y.sum().backward()
    for each in (model, copied, loaded):
        for _ in range(4):
            each(torch.ones(2, 4)).sum().backward()
        (attached,) = attachments(each)
        assert attached.report()[0].observed.calls == 3
