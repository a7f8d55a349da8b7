"""``watch`` measures some steps only, and names the causes that it named when it measured each one.

`CAUSES` has the layer and the rule of the first alert of each training, or None without an alert,
as a `Watchdog` gave it that measured each forward. The table was written once and stays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from dropblock_hooks import watch
from tests.observers.faulty import (
    ATTENTION,
    CLASSES,
    FAULTS,
    Code,
    Recurrent,
    batch_for,
    blank_first,
    both,
    cnn,
    code,
    cross_entropy,
    deep,
    equal_samples,
    fill,
    mlp,
    named,
    residual_mlp,
    squares,
    vit,
    written_out,
)

SGD = torch.optim.SGD
ADAM = torch.optim.Adam
FEWEST = 25  # of the 31 trainings
LATE = 54  # a step (from 0) between the looks at the forwards 32 and 64


@dataclass(frozen=True)
class Training:
    """A training with a fault.

    Attributes:
        name: the name of the fault.
        model: makes the model.
        spoil: makes a fault in the model, before the training.
        loss: of the output and the labels.
        batch: the inputs of a step.
        before: what happens before a step, to the model and the optimizer.
        optimizer: its class.
        lr: the learning rate.
        steps: the number of steps of each of two epochs.
        clears: whether gradients are cleared before each step.
    """

    name: str
    model: Callable[[], nn.Module]
    spoil: Callable[[Any], Any] = lambda model: None
    loss: Callable[[Any, Any], Any] = cross_entropy
    batch: Callable[[Any, int], Any] = lambda x, step: x
    before: Callable[[Any, Any, int], Any] = lambda model, optimizer, step: None
    optimizer: Any = SGD
    lr: float = 0.05
    steps: int = 70
    clears: bool = True

    def first_alert(self):
        """The first alert of the training; None without one."""
        torch.manual_seed(1)
        model = self.model()
        self.spoil(model)
        found = []
        optimizer = self.optimizer(model.parameters(), self.lr)
        with watch(model, action=found.append) as attached:
            for step in range(2 * self.steps):
                if found:
                    break  # the first one counts
                if step == self.steps:
                    attached.step()
                model.train()
                self.before(model, optimizer, step)
                x, target = batch_for(model)
                if self.clears:
                    optimizer.zero_grad()
                self.loss(model(self.batch(x, step)), target).backward()
                optimizer.step()
            attached.step()
        return found[0] if found else None


def late_batch(value, x, step):
    """Put a value into one sample of a late batch."""
    return x.index_fill(0, torch.tensor([3]), value) if step == LATE else x


def learning_rate_from(late, lr, model, optimizer, step):
    if step == late:
        optimizer.param_groups[0]["lr"] = lr


def rising_rate(model, optimizer, step):
    optimizer.param_groups[0]["lr"] *= 1.3


def once(change, late, model, optimizer, step):
    """Change the model before a step."""
    if step == late:
        change(model)


def log_of_zero_once(model):
    """A layer that takes a logarithm, whose input has a 0 in one forward."""
    calls = []

    def log(x):
        calls.append(0)
        x = x.square() + 1.0
        return (x * 0 if len(calls) == LATE + 1 else x).log()

    model.set_submodule("act2", Code(log))


def grown(model):
    torch._foreach_mul_([p.data for p in model.parameters()], 8.0)


def weighted_by_exp(model):
    attention = model.get_submodule(ATTENTION)
    attention.weigh = lambda s: s.exp() / s.exp().sum(-1, keepdim=True)


def in_half(x):
    return (60 * x.half()).square().float() / 3600


def copied(name):
    """A fault of `FAULTS` in a long training."""
    fault = next(fault for fault in FAULTS if fault.name == name)
    options = {key: getattr(fault, key) for key in ("spoil", "loss", "batch", "lr")}
    return Training(name, fault.model, **options)


TRAININGS = (
    # learning rates
    Training("diverges at once", mlp, loss=squares, lr=10.0),
    Training("a test of rising rates", mlp, loss=squares, lr=0.01, before=rising_rate),
    Training("a schedule that raises the rate late", mlp, loss=squares,
             before=partial(learning_rate_from, LATE, 10.0)),
    Training("a schedule that raises the rate in the second epoch", cnn, loss=squares,
             before=partial(learning_rate_from, 70, 1e4)),
    Training("Adam with a large rate", mlp, optimizer=ADAM, lr=3.0),
    Training("units that the rate killed", mlp, loss=squares, lr=2.0),
    # batches
    Training("NaN in an early batch", mlp, batch=lambda x, step: x * torch.nan if step == 6 else x),
    Training("NaN in a late batch", mlp, batch=partial(late_batch, torch.nan)),
    Training("Inf in a late batch", cnn, batch=partial(late_batch, torch.inf)),
    Training("huge values in a late batch", mlp, batch=partial(late_batch, 1e30)),
    Training("inputs of a wrong scale", lambda: mlp(nn.Tanh), batch=lambda x, step: 1e3 * x),
    Training("a blank sample divided by its norm", lambda: named(
             unit=Code(lambda x: x / x.norm(dim=1, keepdim=True)), **dict(mlp().named_children())),
             batch=blank_first),
    Training("BatchNorm of equal samples", lambda: named(fc1=nn.Linear(16, 16),
             bn1=nn.BatchNorm1d(16), act1=nn.ReLU(), head=nn.Linear(16, CLASSES)),
             batch=equal_samples),
    Training("one image in the whole batch", cnn, batch=equal_samples),
    # functions
    copied("logarithm of 0"),
    Training("logarithm of 0 in one late forward", mlp, log_of_zero_once),
    Training("exponential without its maximum", vit, both(weighted_by_exp,
             fill(f"{ATTENTION}.q.bias", 100.0), fill(f"{ATTENTION}.k.bias", 100.0))),
    Training("half precision overflows as weights grow", mlp, code("act2", in_half), loss=squares,
             lr=0.02),
    copied("root of 0"),
    Training("a loss of a written-out logarithm", mlp, loss=written_out),
    copied("attention mask of -inf alone in a row"),
    # units
    Training("dead from the start", mlp, fill("fc2.bias", -100.0)),
    Training("dead from a late step on", mlp, before=partial(
             once, fill("fc2.bias", -100.0), LATE)),
    Training("a sigmoid with large weights", lambda: mlp(nn.Sigmoid),
             lambda model: model.fc2.weight.data.mul_(1000)),
    # gradients
    Training("twelve sigmoids", lambda: deep(nn.Sigmoid)),
    Training("a wrong scale of the first weights", lambda: deep(nn.ReLU, 8.0), lr=1e-15),
    Training("branches that grow late", lambda: residual_mlp(scale=1.0), lr=1e-15,
             before=partial(once, grown, LATE)),
    Training("a recurrent net whose gradients explode", lambda: Recurrent(
             nn.RNN, nonlinearity="relu"), lambda model: model.rnn.weight_hh_l0.data.mul_(8.0)),
    Training("gradients that are never cleared", mlp, loss=squares, lr=0.02, clears=False),
    copied("detach between two blocks"),
    copied("no_grad around a block"),
)  # fmt: skip

CAUSES = {
    "diverges at once": ("fc2", "nonfinite"),
    "a test of rising rates": ("fc2", "nonfinite"),
    "a schedule that raises the rate late": ("act2", "nonfinite"),
    "a schedule that raises the rate in the second epoch": ("flat", "nonfinite"),
    "Adam with a large rate": ("act3", "dead"),
    "units that the rate killed": ("act3", "dead"),
    "NaN in an early batch": ("fc1", "nonfinite"),
    "NaN in a late batch": ("fc1", "nonfinite"),
    "Inf in a late batch": ("stem", "nonfinite"),
    "huge values in a late batch": ("fc2", "nonfinite"),
    "inputs of a wrong scale": ("act1", "saturated"),
    "a blank sample divided by its norm": ("unit", "nonfinite"),
    "BatchNorm of equal samples": ("fc1", "equal_inputs"),
    "one image in the whole batch": ("stem", "equal_inputs"),
    "logarithm of 0": ("act2", "nonfinite"),
    "logarithm of 0 in one late forward": ("act2", "nonfinite"),
    "exponential without its maximum": ("block1.attention.branch.attn", "nonfinite"),
    "half precision overflows as weights grow": ("act2", "nonfinite"),
    "root of 0": ("fc2", "nonfinite"),
    "a loss of a written-out logarithm": ("head", "nonfinite"),
    "attention mask of -inf alone in a row": ("block1.attention.branch.attn", "nonfinite"),
    "dead from the start": ("act2", "dead"),
    "dead from a late step on": ("act2", "dead"),
    "a sigmoid with large weights": ("act2", "saturated"),
    "twelve sigmoids": ("fc1", "vanishing"),
    "a wrong scale of the first weights": ("fc1", "exploding"),
    "branches that grow late": ("stem", "exploding"),
    "a recurrent net whose gradients explode": ("rnn", "nonfinite"),
    "gradients that are never cleared": ("fc1", "accumulating"),
    "detach between two blocks": ("block1.mlp.branch.fc2", "no_gradient"),
    "no_grad around a block": ("block1.branch.bn2", "no_gradient"),
}
BETWEEN = {  # NaN comes in a forward that is not measured, and the next update spreads it
    "diverges at once": (4, 8),
    "a test of rising rates": (16, 32),
    "a schedule that raises the rate late": (32, 64),
    "a schedule that raises the rate in the second epoch": (71, 98),
    "NaN in an early batch": (4, 8),
    "NaN in a late batch": (32, 64),
    "Inf in a late batch": (32, 64),
    "huge values in a late batch": (32, 64),
    "logarithm of 0 in one late forward": (32, 64),
}
NOT_NAMED = {  # of these, another layer is named than the one that made it
    "diverges at once",
    "a test of rising rates",
    "a schedule that raises the rate late",
    "a schedule that raises the rate in the second epoch",
    "huge values in a late batch",
    "logarithm of 0 in one late forward",
}
SLOW = {
    "a schedule that raises the rate in the second epoch",
    "Inf in a late batch",
}


def case(training):
    marks = [pytest.mark.slow] if training.name in SLOW else []
    return pytest.param(training, id=training.name, marks=marks)


@pytest.mark.parametrize("training", list(map(case, TRAININGS)))
def test_the_first_cause_is_that_of_measuring_each_forward(training):
    found = training.first_alert()
    cause = None if found is None else (found.layer, str(found.kind))
    assert (cause == CAUSES[training.name]) == (training.name not in NOT_NAMED), str(found)
    if training.name in BETWEEN:
        before, after = BETWEEN[training.name]
        assert f"came between forward {before} and forward {after}" in found.text
        assert "Go back to a checkpoint" in found.cure
    elif found is not None:
        assert "between forward" not in found.text


def test_almost_all_are_named():
    assert {training.name for training in TRAININGS} == CAUSES.keys()
    assert NOT_NAMED < BETWEEN.keys() < CAUSES.keys()
    assert len(CAUSES) - len(NOT_NAMED) >= FEWEST
