"""FreezeNorm: norms with the statistics of evaluation in a training model, to the bit."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    Dropout,
    FreezeNorm,
    Kind,
    LinearSchedule,
    SpecError,
    StepSchedule,
    attach,
    attachments,
)
from tests.cases import rest_slow
from tests.pair import one_process
from tests.sites.test_graph import calls_of_the_package

NORMS = "type:_BatchNorm"


class Net(nn.Module):
    """Two convolutions with norms that have seen data, and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv = nn.Conv2d(6, 6, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 2)
        self.use_reentrant = None

    def body(self, x):
        return self.bn2(self.conv(torch.relu(self.bn1(x))))

    def forward(self, x):
        x = self.stem(x)
        if self.use_reentrant is None:
            x = self.body(x)
        else:
            x = checkpoint(self.body, x, use_reentrant=self.use_reentrant)
        return self.head(x.mean((2, 3)))


def make(dtype=torch.float32):
    torch.manual_seed(1)
    net = Net()
    for _ in range(3):
        net(torch.randn(8, 3, 6, 6) * 2 + 1)
    return net.to(dtype)


def images(step=0, dtype=torch.float32):
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step)).to(dtype)


def by_hand(net, parameters=False):
    """The usual way: a call after each ``model.train()``."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
            module.requires_grad_(not parameters)
    return net


def loss_of(net, x):
    return net(x).square().mean()


def gradients(net):
    return {name: p.grad for name, p in net.named_parameters()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value is second[name] is None or torch.equal(value, second[name]), name


def train(net, freeze=None, steps=3, parts=1, scaler=None, call=None):
    """Train as a loop does that calls ``model.train()`` in each epoch; `freeze` comes after it."""
    decay = {"momentum": 0.9, "weight_decay": 0.1}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, **decay)
    for step in range(steps):
        net.train()
        if freeze is not None:
            freeze(net, step)
        optimizer.zero_grad()
        for part in range(parts):
            with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
                loss = loss_of(net if call is None else call, images(step * parts + part)) / parts
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return net.state_dict()


@pytest.mark.parametrize("parameters", [False, True], ids=["statistics", "and parameters"])
@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=str)
@pytest.mark.parametrize("stack", ["plain", "accumulation", "fp16"])
def test_trains_as_norms_in_evaluation_mode_do(parameters, use_reentrant, stack):
    ours, theirs = make(), make()
    ours.use_reentrant = theirs.use_reentrant = use_reentrant
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    if stack != "fp16":
        scalers = [None, None]
    parts = 4 if stack == "accumulation" else 1

    attached = attach(ours, {NORMS: FreezeNorm(parameters=parameters)}, grad_scaler=scalers[0])
    got = train(ours, parts=parts, scaler=scalers[0])
    wanted = train(theirs, lambda net, _: by_hand(net, parameters), parts=parts, scaler=scalers[1])
    assert_same(got, wanted)
    assert_same(gradients(ours), gradients(theirs))

    assert torch.equal(got["bn1.running_mean"], make().bn1.running_mean)
    assert [(s.calls, s.active_calls) for s in attached] == [(3 * parts, 3 * parts)] * 2
    assert not attached.verify()


def test_the_equation_in_float64():
    net = make(torch.float64)
    attach(net, {"bn1": FreezeNorm()})
    x = images(dtype=torch.float64)
    seen = []
    net.bn1.register_forward_hook(lambda module, args, y: seen.append((args[0], y)))
    net(x)
    ((given, y),) = seen
    bn = net.bn1
    centered = given - bn.running_mean.view(1, -1, 1, 1)
    normalized = centered / (bn.running_var.view(1, -1, 1, 1) + bn.eps).sqrt()
    wanted = normalized * bn.weight.view(1, -1, 1, 1) + bn.bias.view(1, -1, 1, 1)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)


def test_flags_are_those_of_the_user():
    net = make()
    net.bn2.bias.requires_grad_(False)
    before = {name: p.requires_grad for name, p in net.named_parameters()}
    attached = attach(net, {NORMS: FreezeNorm(parameters=True)})
    assert not net.bn1.weight.requires_grad
    for mode in (True, False, True):
        net.train(mode)
        net(images())
        assert all(module.training is mode for module in net.modules())
    net.bn1.eval()
    net(images())
    assert [m.training for m in (net, net.bn1, net.bn2)] == [True, False, True]

    attached.remove()
    assert [m.training for m in (net, net.bn1, net.bn2)] == [True, False, True]
    assert {name: p.requires_grad for name, p in net.named_parameters()} == before
    statistics = net.bn2.running_mean.clone()
    net(images())
    assert not torch.equal(net.bn2.running_mean, statistics)


def test_remove_leaves_nothing(hook_count):
    net = make()
    attach(net, {NORMS: FreezeNorm(parameters=True)}).remove()
    assert hook_count(net) == 0
    assert not any(m._forward_hooks_always_called for m in net.modules())


def test_parameters_that_others_unfreeze_are_frozen_again():
    net = make()
    with attach(net, {NORMS: FreezeNorm(parameters=True)}):
        net.requires_grad_(True)
        loss_of(net, images()).backward()
        assert net.bn1.weight.grad is None
        assert net.conv.weight.grad is not None
    assert all(p.requires_grad for p in net.parameters())


@pytest.mark.parametrize(
    "regularizer",
    [
        FreezeNorm(parameters=True, begin=2),
        FreezeNorm(StepSchedule({0: 0, 2: 1}), parameters=True),
        FreezeNorm(LinearSchedule(0.0, 1.0, epochs=2, delay=1), parameters=True),
    ],
    ids=["begin", "steps", "ramp"],
)
def test_begins_later(regularizer):
    ours, theirs = make(), make()
    attached = attach(ours, {NORMS: regularizer})
    got = train(ours, lambda net, step: attached.step(step), steps=5)

    def freeze(net, step):
        if step < 2:
            return
        by_hand(net, parameters=True)
        for bn in (net.bn1, net.bn2):
            bn.weight.grad = bn.bias.grad = None

    assert_same(got, train(theirs, freeze, steps=5))
    assert not torch.equal(got["bn1.running_mean"], make().bn1.running_mean)
    assert attached.report()[0].rate == 1.0


def test_a_begin_that_nobody_steps_to_is_told():
    net = make()
    attached = attach(net, {NORMS: FreezeNorm(begin=1)})
    train(net)
    assert Kind.NOT_STEPPED in {finding.kind for finding in attached.verify()}


def test_paused_and_set():
    net = make()
    attached = attach(net, {NORMS: FreezeNorm(parameters=True)})

    def moves():
        before = net.bn1.running_mean.clone()
        net(images())
        assert net.training
        return not torch.equal(before, net.bn1.running_mean)

    assert not moves()
    with attached.paused():
        assert net.bn1.weight.requires_grad
        assert moves()
    assert not net.bn1.weight.requires_grad
    attached.set("bn1", frozen=0.0)
    assert moves()
    assert net.bn1.weight.requires_grad
    assert not net.bn2.weight.requires_grad


@pytest.mark.parametrize("at", ["output", "input"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_other_regularizers_of_the_norm_act(at, order):
    dropout = Dropout(0.5, at=at)
    both = [dropout, FreezeNorm()] if order == "before" else [FreezeNorm(), dropout]
    net = make()
    attached = attach(net, {"bn1": both})
    net(images())
    assert all(site.active_calls == 1 for site in attached)
    assert torch.equal(net.bn1.running_mean, make().bn1.running_mean)


def test_a_forward_that_raises_leaves_the_mode():
    net = make()
    attach(net, {NORMS: FreezeNorm()})
    with pytest.raises(ValueError, match="expected 4D"):
        net.bn1(torch.ones(6))
    assert net.bn1.training


def test_copies_and_pickles():
    net = make()
    attach(net, {NORMS: FreezeNorm(parameters=True)})
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        (attached,) = attachments(other)
        train(other)
        assert torch.equal(other.bn1.running_mean, make().bn1.running_mean)
        assert torch.equal(other.bn1.weight, make().bn1.weight)
        attached.remove()
        assert other.bn1.weight.requires_grad
    assert not net.bn1.weight.requires_grad


def test_other_norms_with_statistics():
    timm = pytest.importorskip("timm")
    norms = (
        nn.InstanceNorm2d(6, track_running_stats=True),
        timm.layers.BatchNormAct2d(6, drop_layer=nn.Dropout),
        nn.LazyBatchNorm2d(),
    )
    for norm in norms:
        net = nn.Sequential(norm)
        attached = attach(net, {"0": FreezeNorm()})
        net(torch.randn(4, 6, 5, 5) + 3)
        assert float(net[0].running_mean.abs().max()) == 0.0
        attached.remove()


REFUSED = {
    "LayerNorm": (nn.LayerNorm(4), "0", r"a LayerNorm without running statistics \(running_mean\)"),
    "GroupNorm": (nn.GroupNorm(2, 4), "0", "a GroupNorm without running statistics"),
    "InstanceNorm": (nn.InstanceNorm2d(4), "0", "an InstanceNorm2d without running statistics"),
    "without statistics": (
        nn.BatchNorm2d(4, track_running_stats=False),
        "0",
        "a BatchNorm2d without running statistics",
    ),
    "no norm": (nn.Linear(4, 4), "0", "a Linear without running statistics"),
    "parameter": (nn.BatchNorm2d(4), "param:0.weight", "takes only regularizers of gradients"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, hook_count):
    layer, selector, error = REFUSED[case]
    net = nn.Sequential(layer)
    with pytest.raises(SpecError, match=error) as caught:
        attach(net, {selector: FreezeNorm()})
    assert len(caught.value.problems) == 1
    assert hook_count(net) == 0


BAD = {
    "negative": ({"begin": -1}, r"begin must be >= 0, got -1"),
    "text": ({"begin": "5"}, "begin must be a number, got '5'"),
    "both": ({"frozen": StepSchedule({0: 0, 1: 1}), "begin": 2}, "both say when FreezeNorm begins"),
    "input": ({"at": "input"}, "it takes no at, index, layout or active"),
    "layout": ({"layout": "NHWC"}, "it takes no at, index, layout or active"),
    "always": ({"active": "always"}, "it takes no at, index, layout or active"),
    "range": ({"frozen": 2}, r"frozen must be in \[0, 1\], got 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    arguments, error = BAD[case]
    with pytest.raises((ValueError, TypeError), match=error):
        FreezeNorm(**arguments)


@pytest.mark.parametrize("parameters", [False, True], ids=["statistics", "and parameters"])
def test_distributed_data_parallel(parameters):
    ours, theirs = make(), make()
    attach(ours, {NORMS: FreezeNorm(parameters=parameters)})
    with one_process():
        got = train(ours, call=nn.parallel.DistributedDataParallel(ours))
    assert_same(got, train(theirs, lambda net, _: by_hand(net, parameters)))


@pytest.mark.every(2)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "parameters", rest_slow([False, True]), ids=["statistics", "and parameters"]
)
def test_compiled(parameters, backend):
    """Two training graphs, without and with frozen norms, and no Python in a warm step."""
    ours, theirs = make(), make()
    attached = attach(ours, {NORMS: FreezeNorm(parameters=parameters, begin=3)})
    torch._dynamo.reset()
    counters.clear()
    call = torch.compile(ours, backend=backend, fullgraph=True)
    got = train(ours, lambda net, step: attached.step(step), steps=8, call=call)
    assert counters["stats"]["unique_graphs"] == 2

    def freeze(net, step):
        if step >= 3:
            by_hand(net, parameters)
        if step == 3 and parameters:
            for bn in (net.bn1, net.bn2):
                bn.weight.grad = bn.bias.grad = None

    wanted = train(theirs, freeze, steps=8)
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)
    assert torch.equal(got["bn1.num_batches_tracked"], torch.tensor(6))
    assert not calls_of_the_package(lambda: loss_of(call, images()).backward())
    assert ours.bn1.training
    assert [(s.calls, s.active_calls) for s in attached] == [(9, 9)] * 2
    ours.eval()
    assert torch.allclose(call(images()), by_hand(ours)(images()), atol=1e-5)
    torch._dynamo.reset()
