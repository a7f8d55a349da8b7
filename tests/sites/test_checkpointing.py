"""Activation checkpointing: the same masks, gradients and counts as without it."""

import inspect
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from dropblock_hooks import (
    Applied,
    ClampGrad,
    ClipGradNorm,
    DropBlock2d,
    Dropout,
    Dropout2d,
    HookWarning,
    LinearSchedule,
    Regularizer,
    attach,
    register,
)
from tests.cases import rest_slow
from tests.stacks import Net, Stack, make_net, put_on, regularizers, train


def save_convolutions(ctx, op, *args, **kwargs):
    """Keeps the outputs of convolutions, and computes everything else again."""
    saved = op == torch.ops.aten.convolution.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


KINDS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "to the end": {"use_reentrant": False, "early_stop": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, save_convolutions),
    },
}
if "early_stop" not in inspect.signature(checkpoint).parameters:  # before torch 2.9
    del KINDS["to the end"]
CHECKPOINTED = Stack(memory="checkpointing")


def differences(regularizer, kind, seed):
    """Largest difference of a gradient from that without checkpointing, and of the counts."""
    plain = train(regularizer, Stack(), steps=1, seed=seed)
    again = train(regularizer, CHECKPOINTED, steps=1, seed=seed, checkpointing=KINDS[kind])
    assert plain.losses == again.losses
    largest = max(
        ((again.gradients[k] - g).abs().max() / (g.abs().max() + 1e-12)).item()
        for k, g in plain.gradients.items()
    )
    return largest, plain.counts != again.counts


@pytest.mark.parametrize(
    "seeds",
    [*rest_slow([range(1), range(1, 4)]), pytest.param(range(4, 20), marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regularizer", regularizers().values(), ids=regularizers())
def test_gradients_and_counts_are_those_without(regularizer, kind, seeds):
    for seed in seeds:
        difference, recounted = differences(regularizer, kind, seed)
        assert difference <= 1e-5
        assert not recounted


class PrivateGenerator(Regularizer):
    """Broken on purpose: a generator of its own, which no checkpoint restores."""

    def bind(self):
        return _Private()


class _Private:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, x, now) -> Applied:
        mask = torch.rand(x.shape, generator=self.generator) < 0.4
        return x.masked_fill(mask, 0.0), mask.sum()


@pytest.mark.parametrize("kind", KINDS)
def test_a_private_generator_fails_the_same_check(kind):
    wrong = [differences(PrivateGenerator(), kind, seed)[0] > 1e-5 for seed in range(5)]
    assert all(wrong)


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_gradients_accumulate_over_checkpoints(kind):
    net = make_net(Dropout2d(0.4))
    attached = put_on(net, [Dropout2d(0.4), ClipGradNorm(0.01)])

    def gradients(parts):
        torch.manual_seed(1)
        net.zero_grad()
        for part in parts:
            net(part).square().sum().backward()
        return [p.grad.clone() for p in net.parameters()]

    parts = net.example().chunk(2)
    plain = gradients(parts)
    net.checkpointing = KINDS[kind]
    for a, b in zip(plain, gradients(parts), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-8)
    assert [(s.calls, s.active_calls) for s in attached.sites] == [(4, 4), (4, 4)]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("early_stop", [True, False])
def test_the_whole_model_inside_one_checkpoint(reentrant, early_stop):
    net = make_net(DropBlock2d())
    attached = attach(net, {"body.*": [DropBlock2d(0.4, 3), ClipGradNorm(0.1)]})

    def gradients(call):
        torch.manual_seed(3)
        net.zero_grad()
        x = net.example().requires_grad_()
        call(x).square().sum().backward()
        return x.grad

    plain = gradients(net)
    with set_checkpoint_early_stop(early_stop):
        again = gradients(lambda x: checkpoint(net, x, use_reentrant=reentrant))
    assert torch.allclose(plain, again, rtol=1e-5)
    assert {(s.calls, s.active_calls) for s in attached.sites} == {(2, 2)}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_loses_the_random_state_is_told_once(reentrant):
    net = make_net(Dropout(0.5))
    attach(net, {"body.0": [Dropout(0.5), ClipGradNorm(1.0)], "body.1": Dropout(0.0)})
    net.checkpointing = {"use_reentrant": reentrant, "preserve_rng_state": False}
    with pytest.warns(HookWarning, match=r"body.0/Dropout: the gradients are wrong") as told:
        net(net.example()).sum().backward()
    assert len(told) == 1
    net(net.example()).sum().backward()


@pytest.fixture
def wrapping():
    return pytest.importorskip(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        reason="this torch has no checkpoint_wrapper",
    )


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["apply", "each", "offload", "twice"])
def test_wrappers_of_layers_keep_the_names(wrapping, when, kind):
    """Attached before or after its layers are wrapped: the same names, masks and gradients."""

    def wrap(net):
        if kind == "apply":
            wrapping.apply_activation_checkpointing(
                net, check_fn=lambda m: type(m).__name__ == "Block"
            )
            return
        for i, block in enumerate(net.body):
            if kind != "each":
                block = wrapping.offload_wrapper(block)
            if kind != "offload":
                block = wrapping.checkpoint_wrapper(block)
            net.body[i] = block

    spec = {
        "body.*": [DropBlock2d(0.4, 3), ClipGradNorm(0.1)],
        "body.0.conv": Dropout2d(0.3),
        "param:body.0.conv.weight": ClipGradNorm(1e-3),
    }

    def outcome(order):
        net = make_net(DropBlock2d())
        if order == "after":
            wrap(net)
        attached = attach(net, spec)
        if order == "before":
            wrap(net)
        torch.manual_seed(2)
        net(net.example()).square().sum().backward()
        assert attached.verify() == []
        assert set(attached["body.*"]) == set(attached.sites[:4])
        counts = [(s.key, s.module_type, s.calls, s.active_calls) for s in attached.sites]
        gradients = [p.grad for p in net.parameters()]
        attached.remove()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
        return counts, gradients

    bare, wrapped = outcome("never"), outcome(when)
    assert wrapped[0] == bare[0]
    assert all(torch.equal(a, b) for a, b in zip(bare[1], wrapped[1], strict=True))


def test_a_parameter_below_a_later_wrapper_is_followed(wrapping):
    """Its owner is never called: the model's own hook has to find it by name."""

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    model = nn.Sequential(Attends())
    attach(model, {"param:0.attention.out_proj.weight": ClipGradNorm(1e-3)})
    model[0] = wrapping.checkpoint_wrapper(model[0])
    inner = model[0]._checkpoint_wrapped_module.attention.out_proj
    inner.weight = nn.Parameter(inner.weight.detach().clone())
    model(torch.randn(3, 2, 8)).square().sum().backward()
    assert inner.weight.grad.norm() <= 1e-3 * (1 + 1e-5)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "convnext_atto"])
def test_grad_checkpointing_of_timm(name):
    timm = pytest.importorskip("timm", reason="the models are timm's")
    options = {"img_size": 32} if name.startswith("vit") else {}
    model = timm.create_model(name, num_classes=3, **options)
    spec = {"stage:-1": [Dropout(0.3), ClipGradNorm(1.0)], "stage:-2": Dropout(0.2)}
    attached = attach(model, spec)
    x = torch.randn(2, 3, 32, 32)

    def gradients():
        torch.manual_seed(4)
        model.zero_grad()
        model(x).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    gradients()  # the batch norms' statistics move; gradients in training don't depend on them
    plain = gradients()
    model.set_grad_checkpointing(True)
    again = gradients()
    assert torch.allclose(plain, again, rtol=1e-4, atol=1e-6 * plain.abs().max())
    assert {(s.calls, s.active_calls) for s in attached.sites} == {(3, 3)}


def test_a_net_without_gradients_is_not_taken_for_a_recomputation():
    net = Net()
    attached = attach(net, {"body.*": Dropout2d(0.5)})
    with torch.no_grad():
        net(net.example())
    assert [s.active_calls for s in attached.sites] == [1, 1]


def test_a_step_during_a_backward_is_told():
    model = nn.Sequential(nn.Linear(3, 3))
    attached = attach(model, {"0": Dropout(LinearSchedule(0.0, 0.5, epochs=2))})
    y = model(torch.ones(2, 3))
    y.register_hook(lambda grad: attached.step(1))
    with pytest.warns(HookWarning, match=r"step\(\) was called during a backward"):
        y.sum().backward()


def test_what_draws_in_the_backward_needs_no_random_state_of_the_forward():
    class Noise(Regularizer):
        acts_on = "gradient"

        def apply(self, x, now):
            return x + torch.randn_like(x), None

    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
    attach(model, {"0": register(Noise)()})
    x = torch.ones(2, 3, requires_grad=True)
    checkpoint(model, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    assert x.grad is not None


class Checkpointed(nn.Module):
    """Hands its input on, in a checkpoint."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Identity()

    def forward(self, x):
        return checkpoint(self.layer, x * 1.0, use_reentrant=False)


@pytest.mark.slow
@pytest.mark.parametrize("drawn_as_in_eager", [True, False])
@pytest.mark.parametrize("name", ["DropBlock2d", "Dropout", "Dropout2d", "DropPath"])
def test_inductor_repeats_the_mask_of_the_forward(name, drawn_as_in_eager):
    model = Checkpointed()
    attach(model, {"layer": regularizers()[name]})
    x = (torch.rand(8, 4, 9, 9) + 0.5).requires_grad_()
    torch._dynamo.reset()
    with torch._inductor.config.patch(fallback_random=drawn_as_in_eager):
        y = torch.compile(model, fullgraph=True)(x)
        y.sum().backward()
    assert 0 < (y == 0).sum() < y.numel()
    assert torch.allclose(x.grad, y.detach() / x.detach())


def test_calls_of_a_compiled_block_in_a_reentrant_checkpoint():
    """The first pass of the checkpoint runs without gradients, and is the call."""
    torch._dynamo.reset()
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    attached = attach(block, {"0": ClampGrad(-0.1, 0.1)})
    call = torch.compile(block, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        x = torch.randn(4, 3, requires_grad=True)
        checkpoint(call, x * 1.0, use_reentrant=True).sum().backward()
    (site,) = attached.sites
    assert (site.calls, site.active_calls) == (3, 3)
    assert attached.verify() == []
    attached.step()
    torch._dynamo.reset()
