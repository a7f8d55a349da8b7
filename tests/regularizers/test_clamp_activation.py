"""ClampActivation: values and gradients of a clamp and of a soft cap, by formulas."""

import copy
import math

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import ClampActivation, LinearSchedule, attach, functional
from tests.pair import one_process
from tests.sites.test_graph import calls_of_the_package

CASES = {
    "clamp": {"min": -0.3, "max": 0.2},
    "min": {"min": -0.1},
    "max": {"max": 0.1},
    "cap": {"cap": 0.25},
}
each_case = pytest.mark.parametrize("case", CASES)


class ByHand(torch.autograd.Function):
    """The function and its derivative, both written out."""

    @staticmethod
    def forward(ctx, x, bounds):
        ctx.save_for_backward(x)
        ctx.bounds = bounds
        if "cap" in bounds:
            return (bounds["cap"] * torch.tanh(x.double() / bounds["cap"])).to(x.dtype)
        y = torch.where(x < bounds.get("min", -math.inf), bounds.get("min", -math.inf), x)
        return torch.where(y > bounds.get("max", math.inf), bounds.get("max", math.inf), y)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        bounds = ctx.bounds
        if "cap" in bounds:
            slope = 1 - torch.tanh(x.double() / bounds["cap"]) ** 2
            return (grad * slope).to(x.dtype), None
        inside = (x >= bounds.get("min", -math.inf)) & (x <= bounds.get("max", math.inf))
        return torch.where(inside, grad, 0.0), None


def beyond(x, bounds):
    if "cap" in bounds:
        return x.abs() > bounds["cap"]
    return (x < bounds.get("min", -math.inf)) | (x > bounds.get("max", math.inf))


@each_case
def test_values_and_gradients_in_float64(case):
    bounds = CASES[case]
    x = torch.randn(40, 30, dtype=torch.float64)
    x[0] = torch.linspace(-0.3, 0.3, 30)  # values at the bounds
    x.requires_grad_()
    grad = torch.randn_like(x)
    y = functional.clamp_activation(x, **bounds)
    wanted = ByHand.apply(x, bounds)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    mine, theirs = (torch.autograd.grad(each, x, grad)[0] for each in (y, wanted))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@each_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_low_precision(case, dtype):
    x = torch.randn(100).to(dtype)
    y = functional.clamp_activation(x, **CASES[case])
    assert y.dtype == dtype
    wanted = ByHand.apply(x.double(), CASES[case])
    torch.testing.assert_close(y.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_nan_and_infinity():
    x = torch.tensor([math.nan, math.inf, -math.inf])
    assert functional.clamp_activation(x, -1.0, 1.0).tolist()[1:] == [1.0, -1.0]
    assert functional.clamp_activation(x, cap=2.0).tolist()[1:] == [2.0, -2.0]
    for options in ({"min": -1.0}, {"cap": 2.0}):
        assert functional.clamp_activation(x, **options)[0].isnan()
    x = torch.ones(3, dtype=torch.float16)
    assert torch.equal(functional.clamp_activation(x, -1e30, 1e30), x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.inner = nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)
        self.use_reentrant = None

    def body(self, x):
        return self.act(self.inner(x))

    def forward(self, x):
        x = self.stem(x).tanh()
        if self.use_reentrant is None:
            x = self.body(x)
        else:
            x = checkpoint(self.body, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def make(dtype=torch.float64):
    torch.manual_seed(1)
    return Net().to(dtype)


def batches(parts, dtype):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8, 6, generator=generator).to(dtype) for _ in range(parts)]


def backward(call, parts=1, scaler=None, dtype=torch.float64):
    for x in batches(parts, dtype):
        with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
            loss = call(x).square().mean() / parts
        (loss if scaler is None else scaler.scale(loss)).backward()


def gradients(net):
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def reference(bounds, *arguments):
    net = make(arguments[-1] if len(arguments) == 3 else torch.float64)
    net.inner.register_forward_hook(lambda module, args, y: ByHand.apply(y, bounds))
    backward(net, *arguments)
    return gradients(net)


def close(got, wanted):
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-6, atol=1e-6)


@each_case
@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=str)
@pytest.mark.parametrize("stack", ["plain", "accumulation", "fp16", "ddp"])
def test_stacks(case, use_reentrant, stack):
    arguments = {
        "accumulation": (4,),
        "fp16": (1, torch.amp.GradScaler("cpu", init_scale=64.0), torch.float32),
    }.get(stack, (1,))
    net = make(arguments[-1] if stack == "fp16" else torch.float64)
    net.use_reentrant = use_reentrant
    attached = attach(net, {"inner": ClampActivation(**CASES[case])})
    if stack == "ddp":
        with one_process():
            backward(nn.parallel.DistributedDataParallel(net))
    else:
        backward(net, *arguments)
    wanted = reference(CASES[case], *arguments)
    if stack == "fp16":
        for name, gradient in wanted.items():
            difference = gradients(net)[name] - gradient
            assert difference.norm() <= 5e-3 * gradient.norm() + 1e-6, name
    else:
        close(gradients(net), wanted)
    parts = arguments[0]
    assert [(s.calls, s.active_calls) for s in attached] == [(parts, parts)]


@each_case
def test_the_realized_rate_is_the_share_beyond_the_bounds(case):
    net = make()
    attached = attach(net, {"inner": ClampActivation(**CASES[case])})
    (x,) = batches(1, torch.float64)
    net(x)
    plain = nn.functional.linear(net.stem(x).tanh(), net.inner.weight, net.inner.bias)
    share = beyond(plain, CASES[case]).double().mean().item()
    assert 0 < share < 1
    assert attached.sites[0].realized_rate == pytest.approx(share)
    shown = ", ".join(f"{name}={bound}" for name, bound in CASES[case].items())
    assert shown in str(attached.report())


@pytest.mark.parametrize(
    ("options", "number"), [({"min": -1.0}, 1), ({"max": 1.0}, 2), ({"min": -1.0, "max": 1.0}, 3)]
)
def test_nan_and_the_bounds_themselves_are_not_beyond(options, number):
    net = nn.Sequential(nn.Identity())
    attached = attach(net, {"0": ClampActivation(**options)})
    net(torch.tensor([math.nan, math.inf, -2.0, -1.0, 1.0, 1.5, 0.0, 0.5]))
    assert attached.sites[0].realized_rate == number / 8


@each_case
def test_in_evaluation_only_if_asked(case):
    net = make()
    (x,) = batches(1, torch.float64)
    plain = net.eval()(x)
    with attach(net, {"head": ClampActivation(**CASES[case])}):
        assert torch.equal(net(x), plain)
    with attach(net, {"head": ClampActivation(**CASES[case], active="always")}):
        torch.testing.assert_close(net(x), ByHand.apply(plain, CASES[case]))
    assert torch.equal(net(x), plain)


@pytest.mark.every(2)
@each_case
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(case, backend):
    net = make()
    ramps = {
        name: LinearSchedule(2 * bound, bound, epochs=4) for name, bound in CASES[case].items()
    }
    attached = attach(net, {"inner": ClampActivation(**ramps)})
    torch._dynamo.reset()
    counters.clear()
    call = torch.compile(net, backend=backend, fullgraph=True)

    def step():
        net.zero_grad()
        backward(call)

    for epoch in range(4):
        attached.step(epoch)
        step()
        close(gradients(net), reference(attached.rates["inner/ClampActivation"]))
    assert counters["stats"]["unique_graphs"] == 1
    assert not calls_of_the_package(step)
    with attached.paused():
        step()
    plain = make()
    backward(plain)
    close(gradients(net), gradients(plain))
    torch._dynamo.reset()


BAD = {
    "nothing": ({}, "give min, max or both; or cap alone"),
    "both": ({"min": 0.0, "cap": 1.0}, "give min, max or both; or cap alone"),
    "order": ({"min": 1.0, "max": 0.0}, "min must be <= max, got min=1, max=0"),
    "cap": ({"cap": 0.0}, "cap must be > 0, got 0"),
    "infinite": ({"max": math.inf}, "max must be a finite number, got inf"),
}


def test_one_number_without_a_name_is_no_cap():
    error = r"ClampActivation\(30\) would set all smaller values to 30: write cap=30"
    with pytest.raises(ValueError, match=error):
        ClampActivation(30.0)
    for bounds in (ClampActivation(0.0), ClampActivation(min=1e-6), ClampActivation(1.0, 2.0)):
        assert copy.deepcopy(bounds) == bounds


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    arguments, error = BAD[case]
    with pytest.raises(ValueError, match=error):
        ClampActivation(**arguments)
    with pytest.raises(ValueError, match=error):
        functional.clamp_activation(torch.ones(3), **arguments)
    with pytest.raises(TypeError, match="must be a floating-point tensor"):
        functional.clamp_activation(torch.ones(3, dtype=torch.int64), 0.0)
