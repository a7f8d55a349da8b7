"""Activation checkpointing: the same masks, gradients and counts as without it."""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from dropblock_hooks import (
    ClampGrad,
    ClipGradNorm,
    DropBlock2d,
    Dropout,
    Dropout2d,
    DropPath,
    HookWarning,
    LinearSchedule,
    attach,
)
from tests.cases import rest_slow
from tests.stacks import Stack, make_net, regularizers, train


def save_convolutions(ctx, op, *args, **kwargs):
    """Keeps the outputs of convolutions, and computes everything else again."""
    saved = op == torch.ops.aten.convolution.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


KINDS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, save_convolutions),
    },
}
CHECKPOINTED = Stack(memory="checkpointing")
CASES = [(name, kind) for name in regularizers() for kind in KINDS]
PLAIN = [
    (name, kind)
    for name, kind in CASES
    if "reentrant" in kind or name in ("DropBlock2d", "ClipGradNorm")
]


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
    [range(1), pytest.param(range(1, 20), marks=[pytest.mark.slow, pytest.mark.exhaustive])],
)
@pytest.mark.parametrize(("name", "kind"), rest_slow(CASES, PLAIN))
def test_gradients_and_counts_are_those_without(name, kind, seeds):
    for seed in seeds:
        difference, recounted = differences(regularizers()[name], kind, seed)
        assert difference <= 1e-5
        assert not recounted


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


class Passing(TorchDispatchMode):
    """Sees each operator and changes none, as a counter of operations does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize(
    "item", [Dropout(0.5), Dropout2d(0.5), DropBlock2d(0.3, 3), DropPath(0.5)], ids=str
)
def test_a_mode_around_the_forward_alone_does_not_change_the_mask(item, reentrant):
    """The tensor is so large that it is dropped in the sparse form on a CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1))
    attach(model, {"0": item})
    x = torch.randn(4, 3, 96, 96, requires_grad=True)
    gradients = []
    for mode in (contextlib.nullcontext(), Passing()):
        model.zero_grad()
        torch.manual_seed(1)
        with mode:
            y = checkpoint(model, x, use_reentrant=reentrant)
        y.square().sum().backward()
        gradients.append(model[0].weight.grad.clone())
    assert torch.equal(*gradients)


@pytest.fixture
def wrapping():
    return pytest.importorskip(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        reason="this torch has no checkpoint_wrapper",
    )


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["checkpoint", "offload", "both"])
def test_wrappers_of_layers_keep_the_names(wrapping, when, kind):
    """Attached before or after its layers are wrapped: the same names, masks and gradients."""

    def wrap(net):
        for i, block in enumerate(net.body):
            if kind != "checkpoint":
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
        assert set(attached.select("body.*")) == set(attached.sites[:4])
        counts = [(s.key, s.module_type, s.calls, s.active_calls) for s in attached.sites]
        gradients = [p.grad for p in net.parameters()]
        attached.remove()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
        return counts, gradients

    bare, wrapped = outcome("never"), outcome(when)
    assert wrapped[0] == bare[0]
    assert all(torch.equal(a, b) for a, b in zip(bare[1], wrapped[1], strict=True))


def test_a_new_forward_inside_a_backward_drops_at_the_rate_of_now():
    model, outputs = nn.Sequential(nn.Identity()), []
    attached = attach(model, {"0": Dropout(LinearSchedule(0.0, 0.4, epochs=2))})
    attached.step(0)
    x = torch.ones(3, requires_grad=True)
    y = model(x) * 1.0
    y.register_hook(lambda grad: outputs.append(model(torch.ones(200, 50))))
    attached.step(1)
    y.sum().backward()
    (seen,) = outputs
    # 10,000 values, of which a share of .4 is dropped, within 5 standard errors
    assert (seen == 0).float().mean().item() == pytest.approx(0.4, abs=0.025)


@pytest.mark.slow
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


def test_a_step_during_a_backward_is_told():
    model = nn.Sequential(nn.Linear(3, 3))
    attached = attach(model, {"0": Dropout(LinearSchedule(0.0, 0.5, epochs=2))})
    y = model(torch.ones(2, 3))
    y.register_hook(lambda grad: attached.step(1))
    with pytest.warns(HookWarning, match=r"step\(\) was called during a backward"):
        y.sum().backward()
