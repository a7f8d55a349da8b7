"""Penalties of activations: the gradients of ``loss + weight * penalty``, by autograd."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    ActivityL1,
    ActivityL2,
    ClampGrad,
    Dropout,
    Kind,
    LinearSchedule,
    SiteError,
    SpecError,
    StepSchedule,
    ZLoss,
    attach,
    functional,
)
from tests.cases import rest_slow
from tests.pair import one_process
from tests.sites.test_graph import calls_of_the_package

WEIGHT = 0.3


def z_loss(x):
    return torch.log(torch.exp(x).sum(-1)).square().mean()


PENALTIES = {
    "ZLoss": (ZLoss, z_loss, functional.z_loss),
    "ActivityL1": (ActivityL1, lambda x: x.abs().mean(), functional.activity_l1),
    "ActivityL2": (ActivityL2, lambda x: x.pow(2).mean(), functional.activity_l2),
}
each_penalty = pytest.mark.parametrize("name", PENALTIES)


def close(got, wanted, tolerance=1e-6):
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=tolerance, atol=tolerance)


def gradients(net):
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


class Collected:
    """The outputs of layers in a forward, by plain hooks."""

    def __init__(self, net, names):
        self.outputs = []
        for name in names:
            net.get_submodule(name).register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.outputs.append(output)

    def take(self):
        outputs, self.outputs = self.outputs, []
        return outputs


# The functions ------------------------------------------------------------------------------------


@each_penalty
@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 3, 7), (2, 3, 4, 7)], ids=str)
def test_the_function_in_float64(name, shape):
    make, formula, function = PENALTIES[name]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    wanted = formula(x)
    torch.testing.assert_close(function(x), wanted, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(wanted, x)
    mine, value = make(WEIGHT).penalty_gradient(x.detach())
    torch.testing.assert_close(mine, gradient, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(value, wanted.detach(), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(function, x)


def test_the_axis_of_z_loss():
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(functional.z_loss(x, 1), functional.z_loss(x.transpose(1, 2)))
    mine, _ = ZLoss(1.0, dim=1).penalty_gradient(x)
    other, _ = ZLoss(1.0).penalty_gradient(x.transpose(1, 2))
    torch.testing.assert_close(mine, other.transpose(1, 2))


def test_z_loss_of_large_and_masked_logits():
    x = torch.tensor([[1e4, -torch.inf, 0.0]], requires_grad=True)
    mine, value = ZLoss(1.0).penalty_gradient(x.detach())
    assert value == 1e8
    assert torch.equal(mine, torch.tensor([[2e4, 0.0, 0.0]]))


# Models -------------------------------------------------------------------------------------------


def resnet():
    models = pytest.importorskip("torchvision.models")
    net = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5)
    return net, (torch.randn(2, 3, 32, 32),), ("layer1", "layer3.0", "fc")


def vit():
    timm = pytest.importorskip("timm")
    net = timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5
    )
    return net, (torch.randn(2, 3, 16, 16),), ("blocks.0", "blocks.1.mlp.fc1", "head")


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=32,
        )
        self.llama = transformers.LlamaForCausalLM(config)

    def forward(self, ids):
        return self.llama(ids).logits


def llama():
    layers = ("llama.model.layers.0.mlp.gate_proj", "llama.model.norm", "llama.lm_head")
    return Llama(), (torch.randint(32, (2, 6)),), layers


@each_penalty
@pytest.mark.parametrize("model", [resnet, vit, llama], ids=lambda model: model.__name__)
def test_models_against_autograd(name, model):
    make, formula, _ = PENALTIES[name]
    torch.manual_seed(0)
    net, inputs, layers = model()
    net = net.double()
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    reference = copy.deepcopy(net)
    collected = Collected(reference, layers)

    attached = attach(net, {layer: make(WEIGHT) for layer in layers})
    net(*inputs).square().mean().backward()
    loss = reference(*inputs).square().mean()
    penalties = [formula(output) for output in collected.take()]
    (loss + WEIGHT * sum(penalties)).backward()

    close(gradients(net), gradients(reference))
    by_layer = {row.site.rpartition("/")[0]: row.penalty for row in attached.report()}
    wanted = {name: value.item() for name, value in zip(layers, penalties, strict=True)}
    assert by_layer == pytest.approx(wanted, rel=1e-9)
    assert not attached.verify()


# Training stacks ----------------------------------------------------------------------------------


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


def make_net(dtype=torch.float64):
    torch.manual_seed(1)
    return Net().to(dtype)


LAYERS = ("inner", "head")


def batches(parts, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(4, 3, 6, generator=generator, dtype=torch.float64).to(dtype)] * parts


def backward(call, parts=1, scaler=None, dtype=torch.float64, penalty=lambda: 0.0):
    """The backwards of one update; the loss is divided by their number."""
    for x in batches(parts, dtype):
        with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
            loss = call(x).float().square().mean() if scaler else call(x).square().mean()
            loss = (loss + penalty()) / parts
        (loss if scaler is None else scaler.scale(loss)).backward()


def reference(name, parts=1, scaler=None, dtype=torch.float64, weight=WEIGHT):
    _, formula, _ = PENALTIES[name]
    net = make_net(dtype)
    collected = Collected(net, LAYERS)

    def penalty():
        return weight * sum(
            formula(output.clone().float() if scaler else output.clone())
            for output in collected.take()
        )

    # an activation that a ReLU changes in place is no activation of this layer any more
    net.act.inplace = False
    backward(net, parts, scaler, dtype, penalty)
    return gradients(net)


@each_penalty
@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=str)
@pytest.mark.parametrize("parts", [1, 4])
def test_accumulation_and_checkpoints(name, use_reentrant, parts):
    net = make_net()
    net.use_reentrant = use_reentrant
    attached = attach(net, {layer: PENALTIES[name][0](WEIGHT / parts) for layer in LAYERS})
    backward(net, parts)
    close(gradients(net), reference(name, parts))
    assert [(s.calls, s.active_calls) for s in attached] == [(parts, parts)] * 2


@each_penalty
@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=str)
def test_fp16_with_a_grad_scaler(name, use_reentrant):
    """In units of the unscaled loss; both run in float16, so they differ by its rounding."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in range(2)]
    net = make_net(torch.float32)
    net.use_reentrant = use_reentrant
    attach(net, {layer: PENALTIES[name][0](WEIGHT) for layer in LAYERS}, grad_scaler=scalers[0])
    backward(net, 1, scalers[0], torch.float32)
    wanted = reference(name, 1, scalers[1], torch.float32)
    for key, gradient in wanted.items():
        difference = (gradients(net)[key] - gradient).norm() / gradient.norm()
        assert difference < 5e-3, key


@each_penalty
def test_the_scale_of_the_loss_in_float64(name):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    net = make_net()
    attached = attach(
        net, {layer: PENALTIES[name][0](WEIGHT) for layer in LAYERS}, grad_scaler=scaler
    )
    (x,) = batches(1)
    scaler.scale(net(x).square().mean()).backward()
    close({key: grad / 256.0 for key, grad in gradients(net).items()}, reference(name))
    assert attached.report()[0].penalty == pytest.approx(values_of(name)["inner"])


def values_of(name):
    net = make_net()
    collected = Collected(net, LAYERS)
    net.act.inplace = False
    net(batches(1)[0])
    return {
        layer: PENALTIES[name][1](y).item()
        for layer, y in zip(LAYERS, collected.take(), strict=True)
    }


@each_penalty
def test_distributed_data_parallel(name):
    net = make_net()
    attach(net, {layer: PENALTIES[name][0](WEIGHT) for layer in LAYERS})
    with one_process():
        backward(nn.parallel.DistributedDataParallel(net))
    close(gradients(net), reference(name))


def in_two_processes(rank):
    """The mean over the ranks of the gradients of ``loss + weight * penalty``."""
    for name in PENALTIES:
        net = make_net()
        attach(net, {layer: PENALTIES[name][0](WEIGHT) for layer in LAYERS})
        x = batches(1)[0] * (1 + rank)
        wrapped = nn.parallel.DistributedDataParallel(net)  # its reducer must live in the backward
        wrapped(x).square().mean().backward()

        wanted = make_net()
        wanted.act.inplace = False
        collected = Collected(wanted, LAYERS)
        for each in (1, 2):
            loss = wanted(batches(1)[0] * each).square().mean()
            penalties = [PENALTIES[name][1](output) for output in collected.take()]
            ((loss + WEIGHT * sum(penalties)) / 2).backward()
        close(gradients(net), gradients(wanted))


@pytest.mark.slow
def test_two_processes(tmp_path):
    from tests.pair import run_pair

    run_pair(tmp_path, "tests.regularizers.test_penalties", ["in_two_processes"])


COMPILED = [*itertools.product(PENALTIES, ["unscaled", "scaled"], ["aot_eager", "inductor"])]
SOON = [("ZLoss", "scaled", "aot_eager")]


@pytest.mark.pairwise
@pytest.mark.parametrize(("name", "loss", "backend"), rest_slow(COMPILED, SOON))
def test_compiled(name, loss, backend):
    """One graph for all weights, and no Python in a warm step."""
    scaled = loss == "scaled"
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    scale = 256.0 if scaled else 1.0
    net = make_net()
    ramp = LinearSchedule(0.0, WEIGHT, epochs=4)
    spec = {layer: PENALTIES[name][0](ramp) for layer in LAYERS}
    attached = attach(net, spec, grad_scaler=scaler)
    torch._dynamo.reset()
    counters.clear()
    call = torch.compile(net, backend=backend, fullgraph=True)

    def step():
        net.zero_grad()
        loss = call(batches(1)[0]).square().mean()
        (scaler.scale(loss) if scaled else loss).backward()
        return {key: grad / scale for key, grad in gradients(net).items()}

    for epoch in range(4):
        attached.step(epoch)
        close(step(), reference(name, weight=attached.sites[0].rate))
    assert counters["stats"]["unique_graphs"] == 1
    assert not calls_of_the_package(step)
    assert [(s.calls, s.active_calls) for s in attached] == [(5, 5)] * 2
    wanted = values_of(name)
    assert {row.site.split("/")[0]: row.penalty for row in attached.report()} == pytest.approx(
        wanted
    )
    with attached.paused():
        close(step(), reference(name, weight=0.0))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", rest_slow(PENALTIES))
def test_a_scaler_without_a_tensor_of_its_scale_works_compiled(name):
    """Then an operator runs Python in the graph."""

    class Scaler:
        def get_scale(self):
            return 8.0

    net = make_net()
    attach(net, {layer: PENALTIES[name][0](WEIGHT) for layer in LAYERS}, grad_scaler=Scaler())
    torch._dynamo.reset()
    (torch.compile(net, backend="aot_eager")(batches(1)[0]).square().mean() * 8.0).backward()
    close({key: grad / 8.0 for key, grad in gradients(net).items()}, reference(name))
    torch._dynamo.reset()


# What is counted, shown and logged ----------------------------------------------------------------


@each_penalty
def test_the_value_is_counted_shown_and_logged(name):
    net = make_net()
    make, formula, _ = PENALTIES[name]
    attached = attach(net, {"head": make(StepSchedule({0: WEIGHT, 1: 0.0}))})
    (x,) = batches(1)
    values = []
    for factor in (1.0, 2.0):
        net(x * factor).square().mean().backward()
        with torch.no_grad(), attached.paused():
            values.append(float(formula(net(x * factor))))
    (row,) = attached.report()
    assert row.penalty == pytest.approx(sum(values) / 2)
    assert row.realized_rate == 1.0
    assert row.mean_norm is None
    assert "penalty" in str(attached.report())
    key = f"reg/head/{name}/"
    assert attached.scalars()[f"{key}penalty"] == pytest.approx(sum(values) / 2)
    assert attached.scalars()[f"{key}weight"] == WEIGHT

    attached.step(1)  # with a weight of 0 the value is still measured
    net.zero_grad()
    net(x).square().mean().backward()
    assert attached.scalars()[f"{key}penalty"] == pytest.approx(values[0])
    assert attached.scalars()[f"{key}realized_rate"] == 0.0
    close(gradients(net), reference(name, weight=0.0))


@each_penalty
def test_evaluation_and_removal(name):
    net = make_net()
    plain = net(batches(1)[0])
    attached = attach(net, {"head": PENALTIES[name][0](WEIGHT)})
    assert torch.equal(net(batches(1)[0]), plain)
    net.eval()
    backward(net)
    close(gradients(net), reference(name, weight=0.0))
    attached.remove()
    net.train()
    net.zero_grad()
    backward(net)
    close(gradients(net), reference(name, weight=0.0))


@each_penalty
def test_beside_other_regularizers_of_the_layer(name):
    """In the order of the list: the gradient that is clamped has that of the penalty in it."""
    make, formula, _ = PENALTIES[name]
    for order in ("before", "after"):
        net = make_net()
        pair = [make(WEIGHT), ClampGrad(-0.01, 0.01)]
        attach(net, {"head": [Dropout(0.0), *(pair if order == "before" else pair[::-1])]})
        (x,) = batches(1)
        output = net(x)
        output.square().mean().backward()
        leaf = output.detach().requires_grad_()
        penalty = WEIGHT * torch.autograd.grad(formula(leaf), leaf)[0]
        loss = torch.autograd.grad(leaf.square().mean(), leaf)[0]
        if order == "before":
            wanted = (loss + penalty).clamp(-0.01, 0.01)
        else:
            wanted = loss.clamp(-0.01, 0.01) + penalty
        torch.testing.assert_close(net.head.bias.grad, wanted.sum((0, 1)), rtol=1e-6, atol=1e-9)


class Fused(Net):
    """Computes the cross entropy with the weight of its head, which it does not call."""

    def forward(self, x):
        return self.body(self.stem(x)) @ self.head.weight.mT


def test_a_fused_cross_entropy_is_told():
    net = Fused().double()
    attached = attach(net, {"head": ZLoss(1e-4)})
    with pytest.warns(UserWarning, match="never called.*as a fused cross entropy does"):
        net(batches(1)[0]).square().mean().backward()
    (finding,) = attached.verify()
    assert finding.kind == Kind.NEVER_CALLED
    assert "switch the fused function off" in finding.cure


# Bad input ----------------------------------------------------------------------------------------


@each_penalty
def test_bad_arguments(name):
    make = PENALTIES[name][0]
    with pytest.raises(ValueError, match="weight must be >= 0, got -1"):
        make(-1)
    with pytest.raises(ValueError, match="weight must be >= 0, got LinearSchedule"):
        make(LinearSchedule(0.0, -1.0, epochs=3))
    with pytest.raises(ValueError, match=f"{name} adds to the loss of a training: it takes no act"):
        make(1.0, active="always")
    with pytest.raises(SpecError, match=f"{name} penalizes activations: leave out param:"):
        attach(make_net(), {"param:head.weight": make(1.0)})
    with pytest.raises(TypeError, match="must be a floating-point tensor, got torch.int64"):
        PENALTIES[name][2](torch.ones(3, dtype=torch.int64))


def test_an_axis_that_is_not_there():
    with pytest.raises(ValueError, match=r"dim=2 is not an axis of a tensor of shape \(3, 4\)"):
        functional.z_loss(torch.ones(3, 4), 2)
    net = make_net()
    attach(net, {"head": ZLoss(1.0, dim=3)})
    with pytest.raises(SiteError, match=r"head/ZLoss on Linear 'head': dim=3 is not an axis"):
        backward(net)
