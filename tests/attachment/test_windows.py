"""What is reported of each epoch: sites that stop, parameters without gradient, idle models.

A *window* lies between two changes of the whole part of the epoch. ``step(t)`` closes the open
window where ``floor(t)`` differs from ``floor(epoch)``; a fraction (1.0 to 1.5) closes none. Only
the open window and the one that was closed last are kept, besides the totals since attaching.

- Realized rates (in `report`, `scalars` and `Site`), and what observers show, are those of the open
  window. Where no element was counted in it, they are those of the closed one.
- `verify` speaks of the open window. Where it has no training or active call, and the closed one
  has any call, `verify` speaks of the closed one.
- A step that closes a window warns of the sites that did nothing in it. It does not if a training
  forward met the attachment off (``enabled``, `paused`).
- A step warns of an epoch without any training if exactly one epoch has ended. It does not at the
  first step after attaching or loading, after a jump (1 to 5), or when time goes back.
- ``set`` and ``load_state_dict`` begin the counts of elements anew; ``set`` keeps those of calls.
- A gradient regularizer counts its elements in the backward. Between forward and backward its rate
  is still that of the closed window.
"""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    Attachment,
    ByDepth,
    ClipGradNorm,
    DropBlock2d,
    Dropout,
    Dropout2d,
    HookWarning,
    LinearSchedule,
    ScaleGrad,
    StepSchedule,
    attach,
    attachments,
)
from tests.cases import rest_slow
from tests.told import ids, told

IMAGE = torch.ones(2, 3, 16, 16)
RAMP = LinearSchedule(0.0, 0.4, epochs=5)


def train(call, x=IMAGE, steps=2):
    for _ in range(steps):
        call(x).square().mean().backward()


def evaluate(model, call=None, x=IMAGE):
    model.eval()
    with torch.no_grad():
        (model if call is None else call)(x)
    model.train()


class Blocks(nn.Module):
    """As timm's: blocks that are called one by one when they are checkpointed."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        self.norm = nn.BatchNorm2d(4)
        self.unused = nn.Linear(4, 4)
        self.grad_checkpointing = False

    def set_grad_checkpointing(self, enable=True):
        self.grad_checkpointing = enable

    def forward_features(self, x):
        x = self.stem(x)
        if self.grad_checkpointing:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        else:
            x = self.blocks(x)
        return self.norm(x)

    def forward(self, x):
        return self.forward_features(x).mean((2, 3))


SPEC = {"stem": Dropout2d(0.1), "blocks": Dropout2d(0.2), "norm": [Dropout2d(0.3), ScaleGrad(0.5)]}


# --- Windows of the realized rate


def test_an_empty_window_shows_the_one_before_and_none_older():
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": Dropout(StepSchedule({0: 1.0, 1: 0.0}))})
    site, tag, x = attached.sites[0], "reg/0/Dropout/realized_rate", torch.ones(10)
    assert tag not in attached.scalars()
    attached.step(0)
    model(x)
    assert site.realized_rate == attached.scalars()[tag] == 1.0
    attached.step(1)
    assert site.realized_rate == site.expected_rate == 1.0, "the one just closed"
    evaluate(model, x=x)
    assert site.realized_rate == 1.0
    attached.step(1.5)
    assert site.realized_rate == 1.0
    with pytest.warns(HookWarning) as caught:
        attached.step(2)
    assert told(caught) == [(".", "not_trained")]
    assert site.realized_rate is site.expected_rate is None
    assert tag not in attached.scalars()
    assert site.total_realized_rate == 1.0
    model(x)
    assert (site.realized_rate, site.total_realized_rate) == (0.0, 0.5)


def test_a_site_that_is_not_active_has_no_realized_rate_in_the_scalars():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    attached = attach(model, {"*": Dropout(1.0)})
    tags = [f"reg/{name}/Dropout/realized_rate" for name in "01"]
    model(torch.ones(10))
    attached.step()
    assert [attached.scalars().get(tag) for tag in tags] == [1.0, 1.0], "the epoch before"
    model[1].eval()
    with pytest.warns(HookWarning, match="never active"):
        model(torch.ones(10))
    assert [attached.scalars().get(tag) for tag in tags] == [1.0, None]


def test_set_begins_a_window():
    call = model = nn.Sequential(nn.Identity(), nn.Identity())
    attached = attach(model, {"*": Dropout(0.3)})
    x = torch.ones(1000, requires_grad=True)
    first, second = attached.sites
    attached.step(0)
    call(x)
    attached.step(1)
    call(x)
    attached.set("0", p=0.0)
    assert first.realized_rate is first.expected_rate is None
    assert second.realized_rate > 0.2
    call(x)
    assert first.realized_rate == first.expected_rate == 0.0
    attached.step(2)
    assert first.realized_rate == 0.0, "what was counted since, closed"
    assert 0.15 < first.total_realized_rate < 0.25
    assert first.calls == first.active_calls == 3
    assert attached.verify() == []


def test_loading_goes_on_with_the_rate_of_the_epoch():
    call = model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": Dropout(0.5)})
    site, x = attached.sites[0], torch.ones(1000, requires_grad=True)
    call(x)
    attached.step(1)
    call(x)
    state = attached.state_dict()
    rate, total = site.realized_rate, site.total_realized_rate
    attached.step(2)
    call(x)
    attached.load_state_dict(state)
    assert (attached.epoch, site.calls) == (1, 2)
    assert (site.realized_rate, site.total_realized_rate) == (rate, total)
    assert [finding.kind for finding in attached.verify()] == ["not_run"]
    attached.step(1)
    call(x)
    assert site.realized_rate == 3 * site.total_realized_rate / 2 - (2 * total - rate) / 2
    assert (site.calls, site.active_calls, attached.verify()) == (3, 3, [])
    attached.step(2)
    call(x)
    assert abs(site.realized_rate - 0.5) < 0.1
    assert site._live.counter.read().window().total == 1000


# --- Sites that stop


def freeze_norm(model):
    model.norm.eval()


FREEZES = {
    "frozen": (freeze_norm, [("norm/Dropout2d", "never_active")]),
    "checkpointed": (Blocks.set_grad_checkpointing, [("blocks/Dropout2d", "never_called")]),
    "replaced": (
        lambda model: setattr(model, "norm", nn.BatchNorm2d(4)),
        [("norm/Dropout2d", "replaced"), ("norm/ScaleGrad", "replaced")],
    ),
}


@pytest.mark.parametrize("fault", FREEZES)
@pytest.mark.parametrize("at", ["start", "end"])
@pytest.mark.parametrize("validated", [False, True])
def test_a_site_that_stops_is_told_in_the_next_epoch_once(fault, at, validated):
    model = Blocks()
    attached = attach(model, SPEC)

    def epoch(i):
        if at == "start":
            attached.step(i)
        if validated and at == "end":
            evaluate(model)
            if i and fault == "frozen":
                model.norm.eval()
        train(model)
        if at == "end":
            attached.step()

    epoch(0)
    stop, wanted = FREEZES[fault]
    stop(model)
    with pytest.warns(HookWarning) as caught:
        epoch(1)
    of_gradient = [("norm/ScaleGrad", "never_active")]  # known at the end of the epoch
    frozen = fault == "frozen"
    assert told(caught) == wanted + (of_gradient if frozen and at == "end" else [])
    assert {site for site, _ in ids(attached.verify())} == {
        site for site, _ in wanted + (of_gradient if frozen else [])
    }
    if frozen and at == "start":
        with pytest.warns(HookWarning) as caught:
            epoch(2)
        assert told(caught) == of_gradient
    epoch(3 if at == "start" else 2)


@pytest.mark.parametrize("mode", ["bypassed", "compiled"])
def test_an_evaluation_does_not_stop_the_proof(mode):
    torch._dynamo.reset()
    model = Blocks()
    attached = attach(model, {"stem": Dropout2d(0.1), "unused": Dropout(0.1)})
    call = model.forward_features if mode == "bypassed" else torch.compile(model, backend="eager")
    attached.step(0)
    evaluate(model)
    if mode == "bypassed":  # the hook of the model is not called
        train(call)
    with pytest.warns(HookWarning) as caught:
        attached.step(1) if mode == "bypassed" else train(call)
    assert told(caught) == [("unused/Dropout", "never_called")]
    train(call)
    attached.step(2)


def test_a_pause_is_no_fault_and_does_not_stop_the_proof():
    model = Blocks()
    attached = attach(model, {**SPEC, "unused": Dropout(0.1)})
    attached.enabled = False
    for i in range(2):
        attached.step(i)
        train(model)
    attached.enabled = True
    attached.step(2)
    with pytest.warns(HookWarning) as caught:
        train(model)
    assert told(caught) == [("unused/Dropout", "never_called")]
    with attached.paused():
        evaluate(model)
    attached.step(3)


def test_verify_speaks_of_the_last_window(net):
    attached = attach(net, {"layer1.*": Dropout2d(0.1)})
    train(net)
    attached.step()
    assert attached.verify() == [], "the epoch just closed"
    evaluate(net)
    assert attached.verify() == [], "also behind a validation"
    net.layer1[0].eval()
    with pytest.warns(HookWarning) as caught:
        train(net)
    assert told(caught) == ids(attached.verify()) == [("layer1.0/Dropout2d", "never_active")]
    assert "3 times" in str(attached.verify()[0]), "one of them in the validation"
    attached.step()
    assert [site for site, _ in ids(attached.verify())] == ["layer1.0/Dropout2d"]
    with pytest.warns(HookWarning) as caught:
        attached.step()
    assert told(caught) == [(".", "not_trained")]
    assert [finding.kind for finding in attached.verify()] == ["not_run"]


# --- Parameters without gradient


def parameters_of(model, *names):
    return {f"param:{name}": ClipGradNorm(1.0) for name in names}


@pytest.mark.parametrize("names", [["unused.weight"], ["unused.bias", "stem.weight"]])
def test_a_parameter_that_the_forward_does_not_use(names):
    model = Blocks()
    spec = parameters_of(model, *names)
    attached = attach(model, spec)
    attached.step(0)
    train(model)
    wanted = [(f"{names[0]}/ClipGradNorm", "never_active")]
    assert ids(attached.verify()) == wanted
    with pytest.warns(HookWarning) as caught:
        attached.step(1)
    assert told(caught) == wanted
    train(model)
    attached.step(2)


def test_a_parameter_that_is_frozen_later_is_a_finding():
    model = Blocks()
    attached = attach(model, parameters_of(model, "stem.weight", "norm.weight"))
    attached.step(0)
    train(model)
    model.stem.requires_grad_(False)
    attached.step(1)
    train(model)
    assert ids(attached.verify()) == [("stem.weight/ClipGradNorm", "lost")]
    attached.step(2)


class Adapted(nn.Module):
    """Wraps a layer, freezes it, and trains a layer of its own instead, as adapters do."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.adapter = copy.deepcopy(layer).requires_grad_(True)

    def forward(self, x):
        return self.base_layer(x) + self.adapter(x)


def test_a_layer_that_is_wrapped_and_frozen_is_told_after_the_first_epoch():
    model = Blocks()
    attached = attach(model, parameters_of(model, "stem.weight", "norm.weight"))
    model.stem = Adapted(model.stem)
    attached.step(0)
    train(model)
    with pytest.warns(HookWarning, match="attach after") as caught:
        attached.step(1)
    assert told(caught) == [("stem.weight/ClipGradNorm", "lost")]
    train(model)
    attached.step(2)


# --- Models that are not trained


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("at", ["start", "end"])
def test_an_epoch_in_which_another_model_is_trained(net, evaluated, at):
    attached = attach(net, {"layer1.*": Dropout2d(0.1)})
    other = copy.deepcopy(net)
    attachments(other)[0].remove()

    def epoch(i):
        if at == "start":
            attached.step(i)
        train(other)
        if evaluated:
            evaluate(net)
        if at == "end":
            attached.step()

    epoch(0)
    with pytest.warns(HookWarning) as caught:
        epoch(1)
    assert told(caught) == [(".", "not_trained")]
    message = str(caught[0].message)
    assert ("model.train()" if evaluated else "another model") in message
    assert ("torch.compile" in message) is not evaluated  # compiled code runs no forward of it
    epoch(2)


def jump(attached, other):
    attached.step(0)
    train(other)
    attached.step(5)


def go_back(attached, other):
    attached.step(5)
    train(other)
    attached.step(4)


@pytest.mark.parametrize("use", [jump, go_back])
def test_what_is_no_epoch_without_training(net, use):
    other = copy.deepcopy(net)
    train(other)
    use(attach(net, {"layer1.*": Dropout2d(RAMP)}), other)


# --- Schedules that nobody moves


def leave(attached):
    with attached:
        pass


@pytest.mark.parametrize("leaves", [leave, Attachment.remove], ids=["with", "remove"])
@pytest.mark.parametrize("mode", rest_slow(["eager", "compiled"]))
def test_a_forgotten_step_is_told_at_the_end(net, leaves, mode):
    """Without any evaluation: by ``verify`` from the first forward on, and once when it ends."""
    attached = attach(net, {"layer1.*": Dropout2d(RAMP), "fc": Dropout(0.1)})
    torch._dynamo.reset()
    call = net if mode == "eager" else torch.compile(net, backend="eager", fullgraph=True)
    assert ids(attached.verify()) == [(".", "not_run")]
    train(call, steps=1)
    assert ids(attached.verify()) == [(".", "not_stepped")]
    assert "step() was never called" in attached.report().title
    with pytest.warns(HookWarning, match=r"still 0.0 in call 1 .*attached.step\(epoch\)") as caught:
        leaves(attached)
    assert told(caught) == [(".", "not_stepped")]
    attached.remove()  # once


FORGOTTEN_AND_STEPPED = """
import torch
from dropblock_hooks import Dropout, LinearSchedule, attach
kept = []
for name in ("forgotten", "stepped"):
    model = torch.nn.Sequential()
    model.add_module(name, torch.nn.Linear(2, 2))
    attached = attach(model, {name: Dropout(LinearSchedule(0.0, 0.5, epochs=3))})
    model(torch.ones(1, 2))
    kept += [model, attached]
attached.step(0)
"""


@pytest.mark.slow
def test_a_forgotten_step_is_told_at_the_end_of_the_process():
    code = [sys.executable, "-c", FORGOTTEN_AND_STEPPED]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    assert done.stderr.count("nobody has called step") == 1
    assert "forgotten/Dropout" in done.stderr
    assert "stepped/Dropout" not in done.stderr


def test_a_forgotten_step_names_a_site_whose_rate_moves(net):
    attached = attach(net, {"layer1.*": Dropout2d(ByDepth(0.0, RAMP))})
    train(net)
    [finding] = attached.verify()
    assert attached[-1].key in finding.text
    assert attached[0].key not in finding.text
    with pytest.warns(HookWarning, match="1/Dropout2d is still 0.0"):
        attached.remove()


@pytest.mark.parametrize("how", ["end", "middle", "step(0)", "constant", "constant schedule"])
def test_who_steps_is_not_told(net, how):
    rates = {"constant": ByDepth(0.1, 0.2), "constant schedule": LinearSchedule(0.1, 0.1, epochs=5)}
    attached = attach(net, {"layer1.*": Dropout2d(rates.get(how, RAMP))})
    if how == "step(0)":
        attached.step(0)
    for _ in range(3):
        train(net)
        if how == "middle":
            evaluate(net)
            train(net)
        evaluate(net)
        if how in ("end", "middle"):
            attached.step()
    assert attached.verify() == []
    attached.remove()


LATE = (
    r"^step\(0\) came after 4 training calls, and step\(1\) after 4 more: .*before the first batch"
)


@pytest.mark.parametrize("mode", rest_slow(["eager", "compiled"]))
def test_a_step_at_the_end_of_each_epoch_is_told_once(net, mode):
    """Then epochs 0, 1, 2 and 3 have the rates of epochs 0, 0, 1 and 2."""
    attached = attach(net, {"layer1.*": Dropout2d(RAMP), "fc": Dropout(0.1)})
    torch._dynamo.reset()
    call = net if mode == "eager" else torch.compile(net, backend="eager", fullgraph=True)
    train(call, steps=4)
    attached.step(0)
    assert attached.verify() == []
    train(call, steps=4)
    evaluate(net, call)
    with pytest.warns(HookWarning, match=LATE) as caught:
        attached.step(1)
    assert told(caught) == [(".", "not_stepped")]
    for epoch in (2, 3):
        train(call, steps=4)
        attached.step(epoch)
    train(call, steps=4)
    assert ids(attached.verify()) == [(".", "not_stepped")]
    for epoch in range(3):  # the fix, with the same attachment
        attached.step(epoch)
        train(call, steps=4)
    assert attached.verify() == []
    attached.remove()


@pytest.mark.parametrize("before", [0, 1, 2, 3, 6, 40])
@pytest.mark.parametrize("fractions", [False, True], ids=["epochs", "fractions"])
def test_a_trial_before_the_training_is_no_late_step(net, before, fractions):
    attached = attach(net, {"layer1.*": Dropout2d(RAMP)})
    train(net, steps=before)
    for epoch in range(4):
        for batch in range(4):
            if fractions or not batch:
                attached.step(epoch + batch / 4 * fractions)
            train(net, steps=1)
        evaluate(net)
    assert attached.verify() == []
    attached.remove()


@pytest.mark.parametrize("rate", [0.1, StepSchedule({0: 0.1, 3: 0.2})], ids=["constant", "later"])
def test_a_late_step_that_changes_no_rate_is_not_told(net, rate):
    attached = attach(net, {"layer1.*": Dropout2d(rate)})
    for epoch in range(3):
        train(net)
        attached.step(epoch)
    train(net)
    assert attached.verify() == []
    attached.remove()


def test_a_second_step_within_epoch_0_is_no_late_step(net):
    attached = attach(net, {"layer1.*": Dropout2d(RAMP)})
    for epoch in (0, 0, 1, 1, 2):  # two loaders in each epoch
        attached.step(epoch)
        train(net)
    assert attached.verify() == []
    attached.remove()


def test_a_training_that_is_resumed_within_epoch_0_is_no_late_step(net):
    attached = attach(net, {"layer1.*": Dropout2d(RAMP)})
    attached.step(0)
    train(net)
    state = attached.state_dict()
    attached.remove()
    attached = attach(net, {"layer1.*": Dropout2d(RAMP)})
    attached.load_state_dict(state)
    for epoch in range(3):
        attached.step(epoch)
        train(net)
    assert attached.verify() == []
    attached.remove()


def test_a_trial_before_a_state_of_another_time_is_forgotten(net):
    attached = attach(net, {"layer1.*": Dropout2d(RAMP)})
    attached.step(3)
    state = attached.state_dict()
    attached.remove()
    attached = attach(net, {"layer1.*": Dropout2d(RAMP)})
    train(net, steps=4)
    attached.step(0)
    attached.load_state_dict(state)
    attached.step(0)
    train(net, steps=8)
    attached.step(1)
    assert attached.verify() == []
    attached.remove()


@pytest.mark.parametrize("jumps", [(3, 0), (2.5, 0)], ids=str)
def test_a_trial_before_a_jump_of_the_time_is_forgotten(net, jumps):
    attached = attach(net, {"layer1.*": Dropout2d(RAMP)})
    train(net, steps=4)
    for t in (0, *jumps):
        attached.step(t)
    train(net, steps=8)
    attached.step(1)
    assert attached.verify() == []
    attached.remove()


# --- Sets of sites


def test_set_by_class_and_by_depth(net):
    names = ["layer2.0", "layer1.0", "layer1.1"]
    both = [DropBlock2d(0.1, 3), Dropout2d(0.1), Dropout2d(0.2, at="input")]
    attached = attach(net, dict.fromkeys(names, both) | {"fc": ClipGradNorm(1.0)})
    before = [s.rate for s in attached.select(Dropout2d)]
    attached.set(DropBlock2d, p=ByDepth(0.0, 0.2))
    depth = {"layer1.0": 0.0, "layer1.1": 0.1, "layer2.0": 0.2}  # in model order
    assert {s.name: s.rate for s in attached.select(DropBlock2d)} == pytest.approx(depth)
    assert [s.rate for s in attached.select(Dropout2d)] == before
    attached.set("layer*.*", p=ByDepth(0.2, 0.0))
    assert all(s.rate == pytest.approx(0.2 - depth[s.name]) for s in attached.select("layer*.*"))
