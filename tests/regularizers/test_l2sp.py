"""L2SP: the gradient of ``loss + weight / 2 * ||w - w0||^2``, by autograd."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    L2SP,
    HookWarning,
    Kind,
    LinearSchedule,
    SiteError,
    SpecError,
    attach,
    attachments,
    functional,
)
from tests.cases import rest_slow
from tests.pair import one_process

WEIGHT = 0.3
SPEC = {"param:inner.*": L2SP(WEIGHT), "param:head.weight": L2SP(WEIGHT)}
ONCE = {selector: L2SP(WEIGHT, when="accumulated") for selector in SPEC}
NAMES = ("inner.weight", "inner.bias", "head.weight")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)
        self.use_reentrant = None

    def body(self, x):
        return torch.tanh(self.inner(x))

    def forward(self, x):
        x = self.stem(x)
        if self.use_reentrant is None:
            x = self.body(x)
        else:
            x = checkpoint(self.body, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def make(dtype=torch.float64):
    torch.manual_seed(1)
    return Net().to(dtype)


def batch(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, generator=generator).to(dtype)


class ByHand:
    """A training with the penalty in the loss."""

    def __init__(self, net, names=NAMES, weight=WEIGHT):
        self.weight = weight
        parameters = dict(net.named_parameters())
        self.pairs = [(parameters[name], parameters[name].detach().clone()) for name in names]

    def __call__(self):
        return self.weight / 2 * sum((w - w0).pow(2).sum() for w, w0 in self.pairs)


def train(net, steps=range(4), parts=1, scaler=None, penalty=None, call=None, optimizer=None):
    dtype = net.stem.weight.dtype
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        optimizer.zero_grad()
        for part in range(parts):
            x = batch(step * parts + part, dtype)
            with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
                y = net(x) if call is None else call(x)
                loss = y.square().mean()
            loss = (loss + (penalty() if penalty else 0.0)) / parts
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return net.state_dict()


def close(got, wanted, tolerance=1e-6):
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance)


def reference(dtype=torch.float64, **options):
    net = make(dtype)
    return train(net, penalty=ByHand(net), **options)


def test_the_function():
    w, w0 = torch.randn(2, 5, 4, dtype=torch.float64).requires_grad_().unbind()
    assert torch.autograd.gradcheck(functional.l2_sp, (w.detach().requires_grad_(), w0.detach()))
    w = w.detach().requires_grad_()
    value = functional.l2_sp(w, w0.detach())
    assert value.item() == pytest.approx(((w - w0) ** 2).sum().item() / 2)
    with pytest.raises(ValueError, match=r"must have the same shape, got \(3,\) and \(2,\)"):
        functional.l2_sp(torch.ones(2), torch.ones(3))


@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=str)
@pytest.mark.parametrize("when", ["backward", "accumulated"])
def test_against_autograd(when, use_reentrant):
    net = make()
    net.use_reentrant = use_reentrant
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    attached = attach(net, SPEC if when == "backward" else ONCE, optimizer=optimizer)
    close(train(net, optimizer=optimizer), reference())
    assert [site.active_calls for site in attached] == [4, 4, 4]
    assert not attached.verify()


@pytest.mark.parametrize("when", ["backward", "accumulated"])
def test_accumulation_of_4(when):
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    spec = ONCE
    if when == "backward":  # the loss of each backward is divided by 4
        spec = {selector: L2SP(WEIGHT / 4) for selector in SPEC}
    attach(net, spec, optimizer=optimizer)
    close(train(net, parts=4, optimizer=optimizer), reference(parts=4))


@pytest.mark.parametrize("kind", ["plain", "foreach", "fused"])
@pytest.mark.parametrize("when", ["backward", "accumulated"])
def test_fp16_with_a_grad_scaler(when, kind):
    options = {} if kind == "plain" else {kind: True}
    results = []
    for ours in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        net = make(torch.float32)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, **options)
        penalty = None
        if ours:
            spec = SPEC if when == "backward" else ONCE
            attach(net, spec, optimizer=optimizer, grad_scaler=scaler)
        else:
            penalty = ByHand(net)
        results.append(train(net, scaler=scaler, penalty=penalty, optimizer=optimizer))
    close(*results, tolerance=1e-4)


@pytest.mark.parametrize("when", ["backward", "accumulated"])
def test_distributed_data_parallel(when):
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    attach(net, SPEC if when == "backward" else ONCE, optimizer=optimizer)
    with one_process():
        wrapped = nn.parallel.DistributedDataParallel(net)
        close(train(net, call=wrapped, optimizer=optimizer), reference())


def in_two_processes(rank):
    from torch import distributed

    for spec in (SPEC, ONCE):
        net = make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        attach(net, spec, optimizer=optimizer)
        wrapped = nn.parallel.DistributedDataParallel(net)
        train(net, call=lambda x, wrapped=wrapped: wrapped(x * (1 + rank)), optimizer=optimizer)

        other = make()
        penalty = ByHand(other)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            for each in (1, 2):
                ((other(batch(step) * each).square().mean() + penalty()) / 2).backward()
            optimizer.step()
        close(net.state_dict(), other.state_dict())
        distributed.barrier()


@pytest.mark.slow
def test_two_processes(tmp_path):
    from tests.pair import run_pair

    run_pair(tmp_path, "tests.regularizers.test_l2sp", ["in_two_processes"])


@pytest.mark.parametrize("when", rest_slow(["backward", "accumulated"]))
def test_compiled(when):
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    attach(net, SPEC if when == "backward" else ONCE, optimizer=optimizer)
    torch._dynamo.reset()
    call = torch.compile(net, backend="aot_eager", fullgraph=True)
    close(train(net, call=call, optimizer=optimizer), reference())
    torch._dynamo.reset()


def models():
    torchvision = pytest.importorskip("torchvision.models")
    timm = pytest.importorskip("timm")
    transformers = pytest.importorskip("transformers")
    yield (
        torchvision.ResNet(torchvision.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5),
        torch.randn(2, 3, 32, 32).double(),
    )
    vit = timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5
    )
    yield vit, torch.randn(2, 3, 16, 16).double()
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
    )
    yield transformers.LlamaForCausalLM(config), torch.randint(32, (2, 6))


@pytest.mark.parametrize("when", rest_slow(["backward", "accumulated"]))
def test_models_against_autograd(when):
    for net, x in models():
        states = []
        for ours in (True, False):
            other = copy.deepcopy(net).double()
            optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
            penalty = ByHand(other, dict(other.named_parameters()))
            if ours:
                attach(other, {"param:**": L2SP(WEIGHT, when=when)}, optimizer=optimizer)
            for _ in range(3):
                optimizer.zero_grad()
                y = other(x)
                loss = getattr(y, "logits", y).square().mean()
                (loss if ours else loss + penalty()).backward()
                optimizer.step()
            states.append(other.state_dict())
        close(*states)


class Operators(TorchDispatchMode):
    """Counts operators. Reading a parameter detaches it, which starts nothing on a device."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is not torch.ops.aten.detach.default
        return func(*args, **(kwargs or {}))


def test_an_update_takes_a_constant_number_of_operators():
    numbers = []
    for layers in (2, 20):
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=True)
        attach(net, {"param:**": L2SP(WEIGHT, when="accumulated")}, optimizer=optimizer)
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with Operators() as operators:
            optimizer.step()
        bare = torch.optim.SGD(net.parameters(), lr=0.1, foreach=True)
        with Operators() as without:
            bare.step()
        numbers.append(operators.number - without.number)
    assert numbers[0] == numbers[1] <= 20


LOWER = [torch.bfloat16, torch.float16]


def pulled_once(weights, starts, grads, weight):
    """The gradients after one update with these weights, whose values at attach are `starts`."""
    net = nn.ParameterList(nn.Parameter(start.clone()) for start in starts)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    attach(net, {"param:*": L2SP(weight, when="accumulated")}, optimizer=optimizer)
    for parameter, value, grad in zip(net, weights, grads, strict=True):
        parameter.data.copy_(value)
        parameter.grad = grad.clone()
    optimizer.step()
    return [parameter.grad for parameter in net]


@pytest.mark.parametrize("dtype", LOWER, ids=str)
def test_an_update_in_lower_precision_is_rounded_once(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 30), (500,), (20, 5, 3, 3), (1,)]
    groups = []
    for _ in range(3):
        tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        tensors[2] = tensors[2].to(memory_format=torch.channels_last)
        groups.append(tensors)

    got = pulled_once(*groups, WEIGHT)
    differs = []
    for x, w, w0, g in zip(got, *groups, strict=True):
        exact = g.double() + WEIGHT * (w.double() - w0.double())
        assert x.dtype is dtype
        differs.append((x != exact.to(dtype)).flatten())
    # float32 in between rounds some elements to the other neighbor; three roundings, over 10 %
    assert torch.cat(differs).double().mean() < 0.01


def test_a_distance_beyond_float16_does_not_overflow():
    start = torch.tensor([-4e4, 4e4, 1.0], dtype=torch.float16)
    grads = pulled_once([-start], [start], [torch.ones_like(start)], 1e-3)
    wanted = torch.tensor([81.0, -79.0, 0.998])
    torch.testing.assert_close(grads[0].float(), wanted, rtol=1e-3, atol=0.0)


# Memory -------------------------------------------------------------------------------------------


def test_a_resumed_training_pulls_to_the_same_values():
    whole = make()
    attach(whole, SPEC)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    wanted = train(whole, range(6), optimizer=optimizer)

    first = make()
    attached = attach(first, SPEC)
    train(first, range(3), optimizer=torch.optim.SGD(first.parameters(), lr=0.1))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "attached": attached.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)

    second = make()
    second.load_state_dict(saved["model"])
    resumed = attach(second, SPEC)  # on the weights of the checkpoint
    resumed.load_state_dict(saved["attached"])
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    got = train(second, range(3, 6), optimizer=optimizer)
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


def test_a_state_with_another_shape_is_refused():
    attached = attach(nn.Sequential(nn.Linear(4, 3)), {"param:0.weight": L2SP(0.1)})
    other = attach(nn.Sequential(nn.Linear(4, 5)), {"param:0.weight": L2SP(0.1)})
    before = other.sites[0]._live.anchor.clone()
    with pytest.raises(ValueError, match=r"has the shape \(3, 4\) in the state, and \(5, 4\) in"):
        other.load_state_dict(attached.state_dict())
    other.load_state_dict(attached.state_dict(), strict=False)
    assert torch.equal(other.sites[0]._live.anchor, before)


@pytest.mark.filterwarnings("ignore:.*has changed between attach and the first forward")
def test_set_and_schedules_keep_the_values():
    net = make()
    attached = attach(net, {"param:head.weight": L2SP(LinearSchedule(0.0, 0.2, epochs=3))})
    start = net.head.weight.detach().clone()
    with torch.no_grad():
        net.head.weight.add_(1.0)
    for epoch, weight in enumerate((0.0, 0.1, 0.2)):
        attached.step(epoch)
        net.zero_grad()
        net(batch(0)).square().mean().backward()
        got = net.head.weight.grad.clone()
        with attached.paused():
            net.zero_grad()
            net(batch(0)).square().mean().backward()
        wanted = net.head.weight.grad + weight * (net.head.weight.detach() - start)
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    attached.set(L2SP, weight=5.0)
    assert torch.equal(attached.sites[0]._live.anchor, start)


def test_copies_and_pickles():
    net = make()
    attach(net, SPEC)
    train(net, range(2), optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    states = []
    for other in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert len(attachments(other)) == 1
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        states.append(train(other, range(2, 4), optimizer=optimizer))
    close(states[1], states[0], 0.0)
    close(states[2], states[0], 0.0)


@pytest.mark.parametrize("when", ["backward", "accumulated"])
def test_the_value_is_shown_and_logged(when):
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    attached = attach(net, {"param:**": L2SP(WEIGHT, when=when)}, optimizer=optimizer)
    penalty = ByHand(net, ["head.weight"], 1.0)
    values = []
    for step in range(3):
        values.append(penalty().item())
        train(net, [step], optimizer=optimizer)
    scalars = attached.scalars()
    assert scalars["reg/head.weight/L2SP/penalty"] == pytest.approx(sum(values) / 3)
    row = next(row for row in attached.report() if row.site == "head.weight/L2SP")
    assert row.penalty == pytest.approx(sum(values) / 3)
    assert row.realized_rate == 1.0
    assert "penalty" in str(attached.report())


# Bad input ----------------------------------------------------------------------------------------


def test_refused():
    with pytest.raises(ValueError, match="weight must be >= 0, got -0.1"):
        L2SP(-0.1)
    net = make()
    with pytest.raises(
        SpecError, match=r"L2SP is for gradients of parameters: select them by 'param:\*\*"
    ):
        attach(net, {"head": L2SP(0.1)})
    with torch.device("meta"), pytest.raises(SpecError, match="has no values yet"):
        attach(nn.Sequential(nn.Linear(3, 3)), {"param:**": L2SP(0.1)})


def test_a_parameter_that_is_unfrozen_is_pulled_to_its_value_at_attach():
    net = nn.Linear(3, 2)
    net.bias.requires_grad_(False)
    attach(net, {"param:**": L2SP(0.5)})
    net(torch.ones(1, 3)).sum().backward()
    assert net.bias.grad is None

    net.bias.requires_grad_(True)
    start = net.bias.detach().clone()
    with torch.no_grad():
        net.bias += 1.0
    (net(torch.ones(1, 3)) * 0.0).sum().backward()
    assert torch.allclose(net.bias.grad, 0.5 * (net.bias.detach() - start))


@pytest.mark.parametrize("spec", [SPEC, ONCE], ids=["backward", "accumulated"])
def test_a_layer_that_is_replaced_is_told(spec):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach(model, spec, optimizer=optimizer)
    model.head = nn.Linear(8, 5).double()
    attached.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(HookWarning, match="head.weight/L2SP.*has changed between attach"):
        model(batch(0)).sum().backward()


@pytest.mark.parametrize("spec", [SPEC, ONCE], ids=["backward", "accumulated"])
def test_a_layer_of_another_shape_is_an_error(spec):
    model = make()
    attached = attach(model, spec, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    model.head = nn.Linear(8, 6).double()
    attached.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SiteError, match=r"head.weight/L2SP.* call attach after the layer is repl"):
        model(batch(0)).sum().backward()


def test_without_an_optimizer_it_is_told():
    net = make()
    attached = attach(net, ONCE)
    with pytest.warns(UserWarning, match="no optimizer is known"):
        train(net)
    assert {finding.kind for finding in attached.verify()} == {Kind.NO_OPTIMIZER}


LOADS = {
    "in place": lambda model, state: model.load_state_dict(state),
    "assigned": lambda model, state: model.load_state_dict(state, assign=True),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("spec", [SPEC, ONCE], ids=["backward", "accumulated"])
def test_weights_that_are_loaded_after_attach_are_told(load, spec):
    state = {name: value + 1 for name, value in make().state_dict().items()}
    model = make()
    attached = attach(model, spec, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    LOADS[load](model, state)
    text = "inner.weight/L2SP.*has changed between attach and the first forward"
    if load == "assigned":
        attached.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(HookWarning, match=text):
        model(batch(0)).sum().backward()
    model(batch(1)).sum().backward()  # once


@pytest.mark.parametrize("spec", [SPEC, ONCE], ids=["backward", "accumulated"])
def test_weights_with_their_values_at_attach_are_silent(spec):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach(model, spec, optimizer=optimizer)
    for p in model.parameters():
        p.data.copy_(p.detach().clone())  # as DistributedDataParallel does
    for epoch in range(2):
        attached.step(epoch)
        model(batch(epoch)).sum().backward()
        optimizer.step()

    # a resumed training
    other = make()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    resumed = attach(other, spec, optimizer=optimizer)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(attached.state_dict())
    other(batch(2)).sum().backward()
