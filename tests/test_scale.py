"""What is done: a little at a site that is off, and for many sites as much as they are more.

Counted in calls of functions, not timed.
"""

import re
import sys

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ActivationStats,
    AdaGC,
    AdaptiveClipGrad,
    ClampGrad,
    ClipGradNorm,
    DropBlock2d,
    Dropout,
    Dropout2d,
    GradientStats,
    LinearSchedule,
    Retune,
    Watchdog,
    attach,
    attachments,
    builtin,
    capture,
    layers,
    plan,
)
from tests.cases import rest_slow

WAYS = {
    "one glob": lambda n: ["*.1"],
    "exact names": lambda n: [f"{i}.1" for i in range(n)],
    "globs that begin wild": lambda n: [f"**.{i}.1" for i in range(n)],
    "a type": lambda n: ["type:ReLU"],
    "parameters": lambda n: [f"param:{i}.0.weight" for i in range(n)],
}
SMALL, LARGE = 25, 100
CLIPS = [
    ClipGradNorm(1.0),
    ClipGradNorm(1.0, when="accumulated"),
    ClipGradNorm(1.0, group=True),
    AdaptiveClipGrad(group=True),
    AdaGC(),
]


def pairs(n, first=nn.Linear):
    return nn.Sequential(*(nn.Sequential(first(1, 1), nn.ReLU()) for _ in range(n)))


def regularizers(selectors):
    rate = LinearSchedule(0.0, 0.5, epochs=4)
    return {s: ClipGradNorm(1.0) if s.startswith("param:") else Dropout(rate) for s in selectors}


def calls(work):
    """How many functions are called, Python's and C's."""
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    profiled(work, see)
    return count


def profiled(work, see):
    """Do it, and show every call to `see`."""
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)


def growth(prepare):
    """By what the calls grow when sites and modules grow fourfold."""
    prepare(SMALL)()  # what is set up once
    counts = []
    for work in (prepare(SMALL), prepare(LARGE)):
        re.purge()
        counts.append(calls(work))
    return counts[1] / counts[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", rest_slow([nn.Linear, nn.Identity]))
def test_attach_is_linear(way, first):
    if "param" in way and first is nn.Identity:
        pytest.skip("no parameters")
    assert growth(lambda n: _attaching(pairs(n, first), WAYS[way](n))) < 4.5


def _attaching(model, selectors):
    return lambda: attach(model, regularizers(selectors))


def test_attach_to_many_layers_of_one_parent_is_linear():
    def prepare(n):
        return _attaching(nn.Sequential(*(nn.ReLU() for _ in range(n))), map(str, range(n)))

    assert growth(prepare) < 4.5


@pytest.mark.every(plain=2)  # the uses, on one of the models each
@pytest.mark.parametrize(
    "use",
    [
        lambda attached, model: attached.step(),
        lambda attached, model: str(attached.report()),
        lambda attached, model: attached.verify(),
        lambda attached, model: attached.scalars(),
        lambda attached, model: attached.load_state_dict(attached.state_dict()),
        lambda attached, model: attached.set("*.1", p=0.1),
        lambda attached, model: attached.select("*.1"),
        lambda attached, model: attachments(model),
        lambda attached, model: attached.remove(),
    ],
    ids=["step", "report", "verify", "scalars", "state", "set", "select", "find", "remove"],
)
@pytest.mark.parametrize("first", [nn.Linear, nn.Identity])
def test_an_attachment_is_linear(use, first):
    def prepare(n):
        model = pairs(n, first)
        attached = attach(model, regularizers(["*.1"]))
        attached.step(0)
        model(torch.ones(2, 1, requires_grad=True)).sum().backward()
        return lambda: use(attached, model)

    assert growth(prepare) < 4.5


def own_calls(model, x):
    """The package's functions that a warm forward calls, by name."""
    return own_calls_of(lambda: model(x))


def own_calls_of(work):
    """The package's functions that are called when something is done again, by name."""
    names = []

    def see(frame, event, argument):
        if event == "call" and frame.f_globals.get("__name__", "").startswith("dropblock_hooks."):
            names.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_name}")

    for _ in range(3):
        work()
    profiled(work, see)
    return names


# Limits with room for clear code. They are for work that grows, not for a function more.
@pytest.mark.parametrize(
    ("regularizer", "training", "most"),
    [
        (DropBlock2d(0.1, 7), True, 35),
        (DropBlock2d(0.1, 7, normalize="sample"), True, 35),
        (DropBlock2d(0.1, (3, 7), calibration="paper"), True, 37),
        (Dropout2d(0.1), True, 25),
        (ClampGrad(-1, 1), True, 13),
        (DropBlock2d(0.0, 7), True, 8),
        (Dropout2d(0.0, at="input"), True, 12),
        (DropBlock2d(0.1, 7), False, 3),
    ],
    ids=repr,
)
def test_functions_called_in_a_forward(regularizer, training, most):
    """What the constructor has proved is not checked again."""
    model = nn.Sequential(nn.ReLU()).train(training)
    attach(model, {"0": regularizer})
    names = own_calls(model, torch.randn(8, 64, 14, 14, requires_grad=True))
    assert len(names) <= most, names
    assert not [name for name in names if name.split(".")[1] == "checks"]


@pytest.mark.parametrize("observer", [Watchdog(), ActivationStats(), GradientStats()], ids=repr)
def test_functions_called_for_a_call_that_is_not_measured(observer):
    """The hook only counts it. The hook of the model does as much for any number of layers."""

    def names_of(n):
        model = nn.Sequential(*(nn.Identity() for _ in range(n)))
        attached = attach(model, {"*": observer})
        x = torch.ones(2, 3, requires_grad=True)
        for _ in range(5):  # the first gradients decide which of the next ones are measured
            model(x).sum().backward()
        names = own_calls(model, x)  # of the ninth forward
        assert {site.calls for site in attached} == {9}
        return names

    few, many = names_of(10), names_of(30)
    assert len(many) - len(few) <= 2 * 20, many


@pytest.mark.parametrize(("regularizer", "most"), [(CLIPS[0], 7), (CLIPS[1], 2)], ids=repr)
def test_functions_called_for_a_parameter_in_a_forward(regularizer, most):
    names = []
    for n in (SMALL, LARGE):
        model = pairs(n)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        attach(model, {"param:**.weight": regularizer}, optimizer=optimizer)
        names.append(own_calls(model, torch.ones(2, 1)))
    assert len(names[1]) - len(names[0]) <= most * (LARGE - SMALL), names[0]


@pytest.mark.parametrize("regularizer", CLIPS[1:], ids=repr)
def test_an_update_calls_no_function_for_a_parameter(regularizer):
    names = []
    for n in (SMALL, LARGE):
        model = pairs(n)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        attach(model, {"param:**.weight": regularizer}, optimizer=optimizer)
        model(torch.ones(2, 1)).sum().backward()
        names.append(own_calls_of(optimizer.step))
    assert len(names[0]) > 10
    assert len(names[0]) == len(names[1]), names[0]


@pytest.mark.parametrize(
    "use",
    [
        lambda model, spec: attach(model, spec),
        lambda model, spec: attach(model, spec, example_input=torch.ones(1, 4)),
        lambda model, spec: plan(model, spec, torch.ones(1, 4)),
        lambda model, spec: builtin(model),
        lambda model, spec: layers(model),
        lambda model, spec: capture(model, torch.ones(1, 4), "0"),
    ],
    ids=["attach", "attach with an example", "plan", "builtin", "layers", "capture"],
)
def test_a_model_is_indexed_once(use):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    spec = {"1": Retune(0.1), "0": Dropout(0.1), "param:*.weight": ClampGrad(-1)}
    indexed = 0

    def see(frame, event, argument):
        nonlocal indexed
        indexed += event == "call" and frame.f_code.co_qualname == "Index.__init__"

    profiled(lambda: use(model, spec), see)
    assert indexed == 1
