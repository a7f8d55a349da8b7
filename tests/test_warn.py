"""Warnings point at the user's line, however deep in a forward they arise."""

import inspect
import site
import sysconfig
import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ActivationStats,
    Dropout,
    HookWarning,
    LinearSchedule,
    ScaleGrad,
    Watchdog,
    attach,
    sample,
)


def test_a_warning_of_attach_names_the_line_of_attach():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.warns(HookWarning) as caught:
        attach(model, {"type:Linear": Dropout(0.1), "0": None})
    line = inspect.currentframe().f_lineno - 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_warning_inside_a_forward_names_the_line_that_called_the_model(depth):
    model = nn.Linear(2, 2)
    for _ in range(depth):
        model = nn.Sequential(model)
    attach(model, {"type:Linear": Watchdog("nonfinite")})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.full((1, 2), torch.nan))
        line = inspect.currentframe().f_lineno - 1
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line)]


@pytest.mark.parametrize(
    "folder", [sysconfig.get_path("purelib"), site.getusersitepackages()], ids=["site", "user"]
)
def test_a_line_of_a_library_is_left_out(folder):
    code = compile("def call(model, x):\n    model(x)\n", f"{folder}/library.py", "exec")
    library = {}
    exec(code, library)
    model = nn.Sequential(nn.Linear(2, 2))
    attach(model, {"0": Watchdog("nonfinite")})
    with pytest.warns(HookWarning) as caught:
        library["call"](model, torch.full((1, 2), torch.nan))
    line = inspect.currentframe().f_lineno - 1
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line)]


def untrained():
    """A training of two epochs in evaluation mode; each line of it runs again in the next one."""
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    attached = attach(model, {"0": Dropout(0.1)})
    for epoch in range(2):
        attached.step(epoch)
        model(torch.ones(1, 2))
    attached.remove()


def shown(action, *filters):
    """How many warnings of three trainings are shown under these filters."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for item in filters:
            warnings.filterwarnings(action, **item)
        for _ in range(3):
            untrained()
    return len(caught)


HERE = {"module": __name__}
ELSEWHERE = {"module": "elsewhere"}
UNTRAINED = {"message": ".*was not trained", "category": HookWarning}


def test_each_training_in_a_loop_warns():
    assert shown("default") == 3


@pytest.mark.parametrize(
    ("action", "given", "number"),
    [
        ("default", {}, 3),
        ("always", {}, 3),
        ("once", {}, 1),
        ("ignore", {}, 0),
        ("ignore", HERE, 0),
        ("ignore", ELSEWHERE, 3),
        ("ignore", UNTRAINED, 0),
        ("ignore", {"category": DeprecationWarning}, 3),
    ],
)
def test_filters_of_the_user(action, given, number):
    assert shown(action, given) == number


@pytest.mark.parametrize("given", [{}, HERE, UNTRAINED], ids=["all", "module", "message"])
def test_a_filter_makes_an_error(given):
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filterwarnings("error", **given)
        with pytest.raises(HookWarning, match="was not trained"):
            untrained()


def test_a_long_training_repeats_nothing():
    """Warnings of the package itself are told once, whatever Python hides."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    spec = {"0": Dropout(LinearSchedule(0.1, 0.2)), "1": [ScaleGrad(0.5), ActivationStats()]}
    attached = attach(model, spec, epochs=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(8):
            attached.step(epoch)
            y = model[0](torch.ones(1, 2, requires_grad=True))
            y.register_hook(lambda grad, t=epoch: attached.step(t + 0.5))
            y.sum().backward()
        attached.remove()
    texts = [str(warning.message) for warning in caught]
    assert len(texts) > 2
    assert len(texts) == len(set(texts))


def test_a_call_in_a_loop_warns_once_for_its_line():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    attach(model, {"1": Dropout(0.5, active="always")})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            sample(_First(model), torch.ones(1, 2), 2)
    assert len(caught) == 1


class _First(nn.Module):
    """The first layer of a model, whose other layers it holds and does not call."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model[0](x)
