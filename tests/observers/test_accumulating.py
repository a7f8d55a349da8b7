"""Gradients that are never cleared, which ``watch`` names, and those that are kept on purpose."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import watch
from tests.cases import rest_slow
from tests.observers.faulty import (
    CLASSES,
    Recurrent,
    batch_for,
    cnn,
    cross_entropy,
    mlp,
    named,
    vit,
)
from tests.observers.test_updates import kinds_of

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def keep(optimizer):
    """Forget to clear the gradients."""


def to_none(optimizer):
    optimizer.zero_grad()


def in_place(optimizer):
    optimizer.zero_grad(set_to_none=False)


def train(model, optimizer, zero, steps=60, every=100, accumulate=1, **places):
    """The findings of a loop with code of the caller at its places.

    The places are ``begin`` (before the forward), ``middle`` (after it), and ``end`` (after the
    backward); `zero` comes after each update.
    """
    found = []

    def run(place):
        if place in places:
            places[place](optimizer)

    with watch(model, action=found.append, every=every):
        for step in range(steps):
            run("begin")
            x, target = batch_for(model)
            loss = cross_entropy(model(x), target)
            run("middle")
            loss.backward()
            run("end")
            if (step + 1) % accumulate == 0:
                optimizer.step()
                zero(optimizer)
    return found


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def clip(optimizer):
    nn.utils.clip_grad_norm_(parameters_of(optimizer), 0.1)


def clip_values(optimizer):
    nn.utils.clip_grad_value_(parameters_of(optimizer), 0.01)


def penalty(optimizer):
    sum(p.square().sum() for p in parameters_of(optimizer)).mul(1e-3).backward()


def with_scaler(model, optimizer, zero, steps=60):
    """A training with a GradScaler, which changes gradients in place."""
    found = []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with watch(model, action=found.append, grad_scaler=scaler):
        for _ in range(steps):
            x, target = batch_for(model)
            scaler.scale(cross_entropy(model(x), target)).backward()
            scaler.unscale_(optimizer)
            clip(optimizer)
            scaler.step(optimizer)
            scaler.update()
            zero(optimizer)
    return found


def cnn_without_biases():
    """A CNN whose convolutions have no biases, which would only get rounding errors."""
    model = cnn()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.bias = None
    return model


FAULTS = {  # the model, the optimizer, its options, and options of the training
    "SGD": (mlp, SGD, {"lr": 1e-3}, {}),
    "SGD with momentum": (cnn_without_biases, SGD, {"lr": 1e-3, "momentum": 0.9}, {}),
    "AdamW": (vit, ADAMW, {"lr": 1e-3}, {}),
    "fused AdamW": (mlp, ADAMW, {"lr": 1e-3, "fused": True}, {}),
    "AdamW of a loop": (mlp, ADAMW, {"lr": 1e-3, "foreach": False}, {}),
    "LSTM": (Recurrent, ADAM, {"lr": 1e-3}, {}),
    "clipping of norms": (mlp, SGD, {"lr": 1e-2}, {"end": clip}),
    "clipping of values": (mlp, SGD, {"lr": 1e-2}, {"end": clip_values}),
    "accumulation of 4": (mlp, SGD, {"lr": 1e-3}, {"accumulate": 4}),
    "accumulation of 8": (mlp, ADAM, {"lr": 1e-3}, {"accumulate": 8}),
    "each forward measured": (mlp, SGD, {"lr": 1e-3}, {"every": 1}),
    "looks at the end only": (mlp, SGD, {"lr": 1e-3}, {"every": None}),
    "a penalty of its own": (mlp, SGD, {"lr": 1e-3}, {"begin": penalty}),
}


@pytest.mark.parametrize("name", rest_slow(FAULTS, 6))
def test_gradients_that_are_never_cleared_are_named(name):
    make, optimizer, options, places = FAULTS[name]
    model = make()
    found = train(model, optimizer(model.parameters(), **options), keep, **places)
    (finding,) = [finding for finding in found if finding.kind == "accumulating"]
    count = len(list(model.parameters()))
    assert f"the gradients of {count} of the {count} trained parameters" in finding.text
    assert "optimizer.zero_grad() once per update" in finding.cure


def test_gradients_of_a_scaled_loss_that_are_never_cleared_are_named():
    model = mlp()
    found = with_scaler(model, SGD(model.parameters(), lr=1e-3), keep)
    assert kinds_of(found) == [("accumulating", "fc1")]


def test_a_second_optimizer_that_is_never_cleared_is_named():
    model = mlp()
    second = SGD(model.fc3.parameters(), lr=1e-3)
    others = [p for name, p in model.named_parameters() if not name.startswith("fc3")]

    def only_the_first(optimizer):
        second.step()
        optimizer.zero_grad()

    found = train(model, SGD(others, lr=1e-3), only_the_first)
    assert kinds_of(found) == [("accumulating", "fc3")]
    assert "2 of the 8 trained parameters, among them fc3.weight, fc3.bias," in found[0].text


def test_a_bias_that_is_never_cleared_is_named():
    model = mlp()

    def all_but_a_bias(optimizer):
        for p in model.parameters():
            if p is not model.head.bias:
                p.grad = None

    found = train(model, SGD(model.parameters(), lr=1e-3), all_but_a_bias)
    assert kinds_of(found) == [("accumulating", "head")]
    assert "1 of the 8 trained parameters, among them head.bias," in found[0].text


def test_the_number_of_updates_is_that_of_the_run():
    model = mlp()
    found = train(model, SGD(model.parameters(), lr=1e-3), keep, accumulate=4)
    assert "not cleared in 8 updates" in found[0].text


def test_the_finding_is_over_once_gradients_are_cleared():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-3)
    found = []
    with watch(model, action=found.append, every=50) as attached:
        for step in range(200):
            x, target = batch_for(model)
            cross_entropy(model(x), target).backward()
            optimizer.step()
            if step >= 100:
                optimizer.zero_grad()
        assert [finding.kind for finding in found] == ["accumulating"]
        assert not attached.alerts


# healthy trainings

HEALTHY = {
    "cleared after the update": (mlp, to_none, {}),
    "zeroed in place after the update": (mlp, in_place, {}),
    "cleared before the forward": (mlp, keep, {"begin": to_none}),
    "zeroed in place before the forward": (mlp, keep, {"begin": in_place}),
    "cleared between forward and backward": (cnn, keep, {"middle": to_none}),
    "zeroed in place between forward and backward": (cnn, keep, {"middle": in_place}),
    "clipped norms": (mlp, to_none, {"end": clip}),
    "clipped norms, zeroed in place": (mlp, in_place, {"end": clip}),
    "clipped values, zeroed in place": (mlp, in_place, {"end": clip_values}),
    "an accumulation of 4": (mlp, to_none, {"accumulate": 4}),
    "an accumulation of 4, zeroed in place": (mlp, in_place, {"accumulate": 4}),
    "an accumulation of 20, zeroed in place": (mlp, in_place, {"accumulate": 20, "steps": 90}),
    "an accumulation of 30": (mlp, to_none, {"accumulate": 30, "steps": 90}),
    "each forward measured": (mlp, in_place, {"every": 1}),
    "looks at the end only": (mlp, in_place, {"every": None, "accumulate": 4}),
    "a penalty with a backward of its own": (mlp, to_none, {"begin": penalty}),
    "a penalty between forward and backward": (mlp, to_none, {"middle": penalty}),
    "an LSTM, zeroed in place": (Recurrent, in_place, {}),
}


@pytest.mark.parametrize("fused", rest_slow([False, True]))
@pytest.mark.parametrize("name", rest_slow(HEALTHY, 9))
def test_gradients_that_are_cleared_are_no_fault(name, fused):
    make, zero, places = HEALTHY[name]
    model = make()
    optimizer = ADAMW(model.parameters(), lr=1e-3, fused=fused)
    assert not train(model, optimizer, zero, **places)


@pytest.mark.parametrize("zero", [to_none, in_place])
def test_gradients_of_a_scaled_loss_that_are_cleared_are_no_fault(zero):
    model = mlp()
    assert not with_scaler(model, SGD(model.parameters(), lr=1e-3), zero)


@pytest.mark.parametrize("zero", [to_none, in_place])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_weights_that_each_forward_writes_are_no_fault(zero, accumulate):
    model = mlp()

    @torch.no_grad()
    def normalize(module, inputs):
        module.weight.add_(1e-3 * torch.randn_like(module.weight))
        module.weight.div_(module.weight.norm(dim=1, keepdim=True))

    for layer in (model.fc1, model.fc2, model.fc3):
        layer.register_forward_pre_hook(normalize)
    optimizer = SGD(model.parameters(), lr=1e-3)
    assert not train(model, optimizer, zero, accumulate=accumulate)


@pytest.mark.parametrize("zero", [to_none, in_place])
def test_a_long_accumulation_with_written_weights_is_no_fault(zero):
    """Gradients are kept for 20 forwards, and the weights change in each of them."""
    model = mlp()

    @torch.no_grad()
    def add_noise(module, inputs):
        module.weight.add_(1e-3 * torch.randn_like(module.weight))

    model.fc2.register_forward_pre_hook(add_noise)
    assert not train(model, SGD(model.parameters(), lr=1e-3), zero, accumulate=20, steps=120)


@pytest.mark.parametrize("zero", rest_slow([to_none, in_place]))
@pytest.mark.parametrize("watched", ["generator", "critic"])
def test_optimizers_of_a_gan_are_no_fault(watched, zero):
    """The step of the generator adds to gradients of the critic that its update has used."""
    generator, critic = mlp(), named(fc=nn.Linear(CLASSES, 8), act=nn.GELU(), head=nn.Linear(8, 1))
    of_generator = SGD(generator.parameters(), lr=1e-3)
    of_critic = SGD(critic.parameters(), lr=1e-3)
    found = []
    with watch({"generator": generator, "critic": critic}[watched], action=found.append):
        for _ in range(120):
            zero(of_critic)
            fake = generator(torch.randn(8, 16))
            (critic(fake).mean() - critic(torch.randn(8, CLASSES)).mean()).backward()
            of_critic.step()

            zero(of_generator)
            critic(generator(torch.randn(8, 16))).mean().neg().backward()
            of_generator.step()
    assert not found


@pytest.mark.parametrize("zero", [to_none, in_place])
def test_closures_of_lbfgs_are_no_fault(zero):
    model = mlp(nn.Tanh)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=6)
    x, target = batch_for(model)

    def closure():
        zero(optimizer)
        loss = cross_entropy(model(x), target)
        loss.backward()
        return loss

    found = []
    with watch(model, "accumulating", action=found.append):
        for _ in range(20):
            optimizer.step(closure)
    assert not found


@pytest.mark.parametrize("zero", [to_none, in_place])
def test_parameters_without_a_gradient_in_some_steps_are_no_fault(zero):
    model = named(a=nn.Linear(16, CLASSES), b=nn.Linear(16, CLASSES))
    steps = iter(range(10**6))
    model.forward = lambda x: model.a(x) + (model.b(x) if next(steps) % 3 else 0)
    assert not train(model, SGD(model.parameters(), lr=1e-3), zero)


@pytest.mark.parametrize("zero", [to_none, in_place])
def test_frozen_parts_and_averages_are_no_fault(zero):
    model = mlp()
    model.fc1.requires_grad_(False)
    average = torch.optim.swa_utils.AveragedModel(model)

    def update_average(optimizer):
        average.update_parameters(model)

    optimizer = SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3)
    assert not train(model, optimizer, zero, middle=update_average)


@pytest.mark.parametrize("zero", [to_none, in_place])
def test_two_steps_of_sharpness_aware_minimization_are_no_fault(zero):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-3)
    found = []
    with watch(model, action=found.append):
        for _ in range(60):
            x, target = batch_for(model)
            cross_entropy(model(x), target).backward()
            shifts = [0.05 * p.grad for p in model.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), shifts)
            zero(optimizer)
            cross_entropy(model(x), target).backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), shifts)
            optimizer.step()
            zero(optimizer)
    assert not found


@pytest.mark.parametrize("zero", [to_none, in_place])
@pytest.mark.parametrize("unseen", ["paused", "evaluation"])
def test_backwards_that_no_watchdog_sees_are_no_fault(unseen, zero):
    """In each step, the first of two backwards meets cleared gradients, and is not measured."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-3)
    found = []
    with watch(model, action=found.append) as attached:
        for step in range(240):
            is_first = step % 2 == 0
            attached.enabled = not (is_first and unseen == "paused")
            model.train(not (is_first and unseen == "evaluation"))
            x, target = batch_for(model)
            cross_entropy(model(x), target).backward()
            if not is_first:
                optimizer.step()
                zero(optimizer)
    assert not found


def test_an_evaluation_without_gradients_hides_no_fault():
    model = mlp()

    @torch.no_grad()
    def evaluate(optimizer):
        model.eval()
        model(batch_for(model)[0])
        model.train()

    found = train(model, SGD(model.parameters(), lr=1e-3), keep, begin=evaluate)
    assert kinds_of(found) == [("accumulating", "fc1")]


class Shared(nn.Module):
    """Three layers in checkpoints, of which two share their weight."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, 16)
        self.fc3.weight = self.fc2.weight
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.fc1(x)
        for layer in (self.fc2, self.fc2, self.fc3):
            x = x + checkpoint(layer, x, use_reentrant=True)
        return self.head(x)


def test_the_uncleared_gradient_of_a_shared_weight_is_named_once():
    model = Shared()
    (finding,) = train(model, SGD(model.parameters(), lr=1e-3), keep)
    assert "the gradients of 7 of the 7 trained parameters" in finding.text


@pytest.mark.parametrize("zero", [to_none, in_place])
def test_a_shared_weight_in_checkpoints_is_no_fault(zero):
    """The backward of each checkpoint adds to its gradient before that of the next begins."""
    model = Shared()
    assert not train(model, SGD(model.parameters(), lr=1e-3), zero)


def test_layers_without_an_optimizer_are_not_named():
    """Their gradients are kept, but no update uses them."""
    model = mlp()
    head = SGD(model.head.parameters(), lr=1e-3)
    assert not train(model, head, to_none)


def test_gradients_that_are_cleared_cost_nothing():
    """Without gradients that are kept, no forward is measured for this rule."""
    model = mlp()
    calls = {rules: measured(model, rules, to_none) for rules in ("accumulating", "nonfinite")}
    assert calls["accumulating"] == calls["nonfinite"]


@pytest.mark.slow
def test_accumulated_gradients_are_measured_a_few_times():
    """Runs in which no update comes begin at most 4 times, and have 32 forwards."""
    model = mlp()
    counts = []
    for rules in ("accumulating", "nonfinite"):
        count = measured(model, rules, to_none, steps=1000, accumulate=50)
        counts.append(count)
    longer = counts[0] - counts[1]
    assert 50 < longer < 4 * 32


def test_gradients_zeroed_in_place_are_measured_once():
    """The first run of 32 forwards shows zeros, and no other one begins."""
    model = mlp()
    longer = measured(model, "accumulating", in_place) - measured(model, "nonfinite", in_place)
    assert 20 < longer < 40


def measured(model, rules, zero, steps=300, accumulate=1):
    """The number of measured forwards."""
    optimizer = SGD(model.parameters(), lr=1e-3)
    total = 0
    with watch(model, rules, action=print) as attached:
        for step in range(steps):
            clock = attached._run.shared.get("Watchdog")
            total += clock is None or clock.measures
            x, target = batch_for(model)
            cross_entropy(model(x), target).backward()
            if (step + 1) % accumulate == 0:
                optimizer.step()
                zero(optimizer)
    return total
