"""The rules of Watchdog, each on a made pathology; when it looks, and what it does."""

import copy
import inspect
import math
import pickle
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    SpecError,
    Watchdog,
    WatchdogError,
    attachments,
    watch,
)
from tests.cases import rest_slow
from tests.told import ids


def plain_net(depth, activation, gain=1.0, width=16):
    """A deep net without shortcuts, its weights `gain` times those that keep lengths."""
    layers = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.normal_(linear.weight, std=gain / math.sqrt(width))
        layers += [linear, activation()]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def trained(model, steps=12, size=(8, 16), lr=1e-3):
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(size)).square().mean().backward()
        optimizer.step()


def found_in(model, rules, steps=12, size=(8, 16), lr=1e-3, **options):
    """What is found in a short training, by layer and rule."""
    found = []
    with watch(model, rules, action=found.append, **options) as attached:
        trained(model, steps, size, lr)
        attached.step()
    return [(each.layer, each.kind) for each in found]


class Detached(nn.Module):
    """Two branches of which one is cut off."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        return self.a(x) + self.b(x).detach()


def dead():
    model = plain_net(3, nn.ReLU)
    nn.init.constant_(model[2].bias, -100.0)
    return model


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: plain_net(12, nn.Tanh, 0.05), ("0", "vanishing")),
        (lambda: plain_net(12, nn.ReLU, 8.0), ("0", "exploding")),
        (dead, ("3", "dead")),
        (lambda: plain_net(2, nn.Sigmoid, 100.0), ("1", "saturated")),
        (lambda: plain_net(2, lambda: nn.Hardtanh(-3, 3), 100.0), ("1", "saturated")),
        (Detached, ("b", "no_gradient")),
    ],
)
def test_each_rule_fires_and_is_silent_on_a_healthy_net(make, expected):
    torch.manual_seed(0)
    rule = expected[1]
    assert found_in(make(), rule, lr=1e-12)[0] == expected
    healthy = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh(),
                            nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 3))  # fmt: skip
    assert found_in(healthy, rule) == []


@pytest.mark.parametrize(
    ("grows_at", "cure"), [(0, "Start with smaller weights"), (12, "lower the learning rate")]
)
def test_the_cure_of_exploding_gradients_is_chosen_by_what_was_seen(grows_at, cure):
    torch.manual_seed(0)
    model, found = plain_net(12, nn.ReLU), []
    with watch(model, "exploding", every=12, action=found.append):
        for step in range(25):
            if step == grows_at:
                torch._foreach_mul_([p.data for p in model.parameters()], 8.0)
            model(torch.randn(8, 16)).sum().backward()
    assert len(found) == 1
    assert cure in found[0].cure


def test_dead_channels_of_tokens_are_told_and_positions_of_zeros_are_not():
    model = nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 3))
    x = torch.randn(8, 6, 16)
    assert found_in(model, "dead", size=x.shape) == []
    nn.init.zeros_(model[0].bias)
    found = []
    with watch(model, "dead", action=found.append):  # 74 positions are padding
        for _ in range(12):
            model(torch.nn.functional.pad(x, (0, 0, 0, 74))).sum().backward()
    assert found == []
    nn.init.constant_(model[0].bias[:38], -100.0)
    assert found_in(model, "dead", size=x.shape, lr=0.0) == [("1", "dead")]


def broken(every=None, action="warn"):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    attached = watch(model, action=action, every=every)
    with torch.no_grad():
        model[1].weight[0, 0] = math.nan
    return model, attached


def test_it_is_told_once_and_again_after_it_has_gone():
    found = []
    model, attached = broken(action=found.append)
    for healthy in (False, False, True, False):
        with torch.no_grad():
            model[1].weight[0, 0] = 0.0 if healthy else math.nan
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
        attached.step()
    assert [(each.layer, each.epoch) for each in found] == [("1", 0), ("1", 3)]
    assert ids(found) == [("1/Watchdog", "nonfinite")] * 2
    assert "Not finite now: parameter 'weight' of 1. Go back" in found[0].cure


def test_a_rule_tells_once_for_each_layer():
    model, found = dead(), []
    attached = watch(model, "dead", action=found.append)
    for _ in range(2):
        trained(model, lr=1e-12)
        attached.step()
    trained(model, 3)  # too few to judge by: what was found holds
    attached.step()
    trained(model, lr=1e-12)
    attached.step()
    assert ids(found) == [("3/Watchdog", "dead")] == ids(attached.verify())
    assert "100%" in found[0].text


def test_it_looks_at_the_forwards_1_2_4_8_and_every_nth_and_raises():
    looks = []
    for forward in range(1, 17):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        attached = watch(model, action="raise", every=7)
        for _ in range(forward - 1):
            model(torch.eye(2, 4))
        nn.init.constant_(model[1].weight, math.nan)
        if forward in (1, 2, 4, 7, 8, 14, 16):
            with pytest.raises(WatchdogError, match="NaN") as raised:
                model(torch.eye(2, 4))
            looks += ids(raised.value.findings)
            assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
        else:
            model(torch.eye(2, 4))
            assert ids(attached.verify()) == [("1/Watchdog", "nonfinite")]  # and tells nothing
            assert str(attached).endswith(str(attached.alerts[0]))
    assert looks == [("1/Watchdog", "nonfinite")] * 7


def test_it_looks_when_its_block_ends_unless_an_error_ended_it():
    found = []
    for error in (None, KeyError):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        nn.init.constant_(model[1].weight, math.nan)
        with suppress(KeyError), watch(model, action=found.append, every=None):
            model(torch.ones(2, 4))
            if error:
                raise error
        assert not attachments(model)
    assert [each.layer for each in found] == ["1"]


def test_the_first_cause_is_named_and_tells_its_effects():
    model = plain_net(4, nn.ReLU)
    nn.init.constant_(model[4].bias, -100.0)
    nn.init.constant_(model[6].bias, -100.0)
    model.append(nn.Linear(3, 3))  # never called
    model.forward = model[:-1].forward
    found = []
    with watch(model, action=found.append):
        trained(model, lr=0.0)
    kinds = [(each.layer, each.kind) for each in found]
    assert kinds == [("5", "dead"), ("9", "no_gradient"), ("8", "no_update")]
    assert "Likely effects of it: dead at 7; no_gradient at 6, 4, 2, 0" in found[0].text
    assert "vanishing" not in found[0].text  # gradients of exactly 0 do not vanish


def test_the_weight_is_not_blamed_that_a_step_has_spoiled():
    class Ratio(nn.Linear):
        def forward(self, x):
            return super().forward(x) / (x - x).sum()

    model, found = nn.Sequential(nn.Linear(4, 4), Ratio(4, 4), nn.Linear(4, 2)), []
    with watch(model, "nonfinite", action=found.append, every=0):
        trained(model, steps=2, size=(8, 4))
    assert [each.layer for each in found] == ["1"]
    assert "division by 0" in found[0].cure
    assert "Go back to a checkpoint" in found[0].cure


def test_an_error_of_the_action_stops_the_training_after_the_step():
    def action(alert):
        raise KeyError("somewhere")

    model, attached = broken(action=action)
    model(torch.ones(2, 4))
    with pytest.raises(KeyError, match="somewhere"):
        attached.step()
    assert attached.epoch == 1


@pytest.mark.parametrize("overflows", [3, 20])
@pytest.mark.parametrize("given", [True, False])
def test_overflows_of_a_known_scaler_are_silent_while_it_can_recover(overflows, given):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler, found = torch.amp.GradScaler("cpu"), []
    attached = watch(model, action=found.append, grad_scaler=scaler if given else False)
    for i in range(22):
        bad = math.inf if i < overflows else 1.0
        optimizer.zero_grad()
        scaler.scale(model(torch.eye(2, 4)).square().sum() * bad).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    attached.step()
    assert bool(found) == (overflows == 20 or not given)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = nn.ModuleDict({"inner": inner, "head": nn.Linear(4, 2)})
    found = []
    attached = watch(model, "nonfinite", action=found.append)
    with torch.no_grad():
        inner[1].weight[0, 0] = 1e38
    x = torch.ones(2, 4, requires_grad=True)
    y = checkpoint(inner, x, use_reentrant=reentrant)
    (model["head"](y / 1e30).sum() * 1e30).backward()
    model.zero_grad()
    attached.step()
    assert [each.layer for each in found] in (["inner.1"], [])
    assert attached["inner.1/Watchdog"].calls == 1


@pytest.mark.parametrize("direction", rest_slow(["backward", "forward"]))
def test_compiled(direction):
    class Root(torch.nn.Module):
        def forward(self, x):
            bad = x - x
            return (bad / bad if direction == "forward" else bad.sqrt()) + x

    model = nn.Sequential(nn.Linear(4, 4), Root(), nn.Linear(4, 2))
    found = []
    attached = watch(model, "nonfinite", action=found.append)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        run(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
    attached.step()
    assert [each.layer for each in found] == ["1" if direction == "forward" else "0"]


def test_frozen_layers_are_meant_to_have_no_gradient():
    model, found = plain_net(3, nn.ReLU), []
    for layer in model[:3]:
        layer.requires_grad_(False)
    attached = watch(model, "no_gradient", action=found.append)
    trained(model)
    attached.step()
    assert found == []


def test_it_copies_and_leaves():
    model = nn.Sequential(nn.Linear(4, 2))
    found = []
    attached = watch(model, action="raise")
    twin = copy.deepcopy(model)
    with pytest.raises(WatchdogError, match="Check the inputs"):
        twin(torch.full((1, 4), math.nan))
    attached.step()
    attached.remove()
    assert not found
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rules": "nonfinit"},
            r"rules must be one of .*got 'nonfinit' \(closest: nonfinite",
        ),
        ({"action": "stop"}, "action must be 'warn', 'raise' or a function, got 'stop'"),
        ({"every": -1}, "every must be an integer >= 0"),
        ({"at": "input"}, "at must be 'output', got 'input'"),
    ],
)
def test_bad_input(fields, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Watchdog(**fields)


def test_the_table_and_errors_of_watch_say_all_layers():
    model = nn.Sequential(*[nn.ReLU() for _ in range(4)])
    attached = watch(model)
    assert "5 sites all layers/Watchdog" in str(attached)
    with pytest.raises(SpecError, match="all layers: an earlier attach has put Watchdog on"):
        watch(model)


def test_the_options_that_watch_names_have_the_defaults_of_a_watchdog():
    named = inspect.signature(watch).parameters
    fields = inspect.signature(Watchdog).parameters
    shared = named.keys() & fields.keys()
    assert shared == {"rules", "action", "every", "keep"}
    for name in shared:
        assert named[name].default == fields[name].default, name
