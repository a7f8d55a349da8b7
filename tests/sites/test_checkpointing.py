"""Activation checkpointing: the same masks, gradients and counts as without it."""

import contextlib
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
    ScaleGrad,
    StepSchedule,
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


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("change", ["step", "set", "paused", "enabled", "evaluation"])
def test_what_changes_before_the_backward_does_not_reach_the_recomputation(change, reentrant):
    def gradients(changes):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
        attached = attach(model, {"1": DropBlock2d(LinearSchedule(0.2, 0.9, epochs=2), 3)})
        x = torch.randn(2, 3, 9, 9, requires_grad=True)
        paused = attached.paused() if change == "paused" else contextlib.nullcontext()
        with paused:
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
            if not changes:
                y.square().sum().backward()
        if changes:
            if change == "step":
                attached.step(1)
            elif change == "set":
                attached.set("1/DropBlock2d", p=0.8)
            elif change == "enabled":
                attached.enabled = False
            elif change == "evaluation":
                model.eval()(x.detach())
                model.train()
            y.square().sum().backward()
        return [p.grad for p in model.parameters()]

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("rates", [(0.0, 0.5), (0.5, 0.0)])
def test_a_rate_that_leaves_or_reaches_0_before_the_backward(rates, reentrant):
    """On a shape that was seen at 0, where the regularizer need not run again."""

    def gradient(steps):
        model = nn.Sequential(nn.Identity())
        attached = attach(model, {"0": Dropout2d(StepSchedule({0: 0.0, 1: rates[0], 2: rates[1]}))})
        x = torch.ones(8, 8, 2, 2, requires_grad=True)
        model(x)
        attached.step(1)
        torch.manual_seed(0)
        y = checkpoint(lambda x: model(x).square(), x, use_reentrant=reentrant)
        if steps:
            attached.step(2)
        y.sum().backward()
        return x.grad

    assert torch.equal(gradient(True), gradient(False))
    assert bool((gradient(True) == 2).all()) == (rates[0] == 0)


def _paused(attached, model, x):
    with attached.paused(), torch.no_grad():
        model(x)


def _disabled_with_gradients(attached, model, x):
    attached.enabled = False
    model(x)


def _stepped(attached, model, x):
    attached.step(1)
    with torch.no_grad():
        model(x)


def _set(attached, model, x):
    for site in attached:
        if "p" in site.values:
            attached.set(site.key, p=0.9)
    model(x)


def _stepped_and_paused(attached, model, x):
    attached.step(1)
    _paused(attached, model, x)


def _seen_in_inference_mode(attached, model, x):
    attached.step(1)
    with attached.paused(), torch.inference_mode():
        model(x)


BETWEEN = [
    _paused,
    _disabled_with_gradients,
    _stepped,
    _set,
    _stepped_and_paused,
    _seen_in_inference_mode,
]
AMONG = {
    "blocks": DropBlock2d(LinearSchedule(0.3, 0.8, epochs=2), 3),
    "channels": Dropout2d(LinearSchedule(0.3, 0.8, epochs=2)),
    "gradient": ScaleGrad(2.0),
    "both": [Dropout(0.4), ClampGrad(-0.1, 0.1)],
}


@pytest.mark.parametrize("kind", [{"use_reentrant": True}, {"use_reentrant": False}])
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("name", AMONG)
def test_forwards_that_come_between_do_not_reach_the_recomputation(name, between, kind):
    """They are not in a checkpoint, so that the forward that runs again is another one."""

    def gradients(changes):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
        attached = attach(model, {"1": AMONG[name]})
        x = torch.randn(2, 3, 9, 9, requires_grad=True)
        y = checkpoint(model, x, **kind)
        if changes:
            state = torch.get_rng_state()
            between(attached, model, x.detach())
            torch.set_rng_state(state)
            attached.enabled = True  # what acts on gradients asks in the backward
        y.square().sum().backward()
        return [p.grad for p in model.parameters()]

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_after_a_forward_that_was_paused(reentrant):
    """The state of the last checkpointed forward holds, whatever was first."""

    def gradients(pauses):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
        attached = attach(model, {"1": Dropout2d(0.5)})
        x = torch.randn(2, 3, 9, 9, requires_grad=True)
        for paused in (True, False, True) if pauses else (False,):
            torch.manual_seed(1)
            attached.enabled = not paused
            if paused:
                with torch.no_grad():
                    model(x)
            else:
                kept = checkpoint(model, x, use_reentrant=reentrant)
        attached.enabled = True
        kept.square().sum().backward()
        return [p.grad for p in model.parameters()]

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)


@pytest.mark.parametrize("change", ["paused", "step"])
def test_a_checkpoint_that_turns_gradients_on_inside(change):
    """As models of forces do: nothing but the frames tells that it is a checkpoint."""

    def gradient(checkpoints):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        attached = attach(model, {"1": Dropout(StepSchedule({0: 0.1, 1: 0.9}))})
        x = torch.randn(4, 8, requires_grad=True)
        with attached.paused() if change == "paused" else contextlib.nullcontext():
            model(x)
        attached.step(1)
        torch.manual_seed(1)

        def run(h):
            with torch.enable_grad():
                return model(h)

        y = checkpoint(run, x, use_reentrant=True) if checkpoints else run(x)
        y.square().sum().backward()
        return x.grad

    torch.testing.assert_close(gradient(True), gradient(False), rtol=0, atol=0)


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
