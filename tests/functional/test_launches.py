"""How many kernels a site starts on a GPU, counted on a CPU with the form for GPUs.

An operator of torch counts as one kernel, and so does a Triton kernel. On a GPU, the backward of
the bare layer copies the gradient of the sum. A site that has a new gradient saves this copy, so a
site of gradients has one kernel less there than here.
"""

import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from dropblock_hooks import Dropout, SkipUpdate, attach, register
from dropblock_hooks.functional import foreach
from dropblock_hooks.functional.kernels import launch
from experiments.overhead.launches import (
    AT_A_LAYER,
    AT_A_NORM,
    AT_A_PARAMETER,
    AT_AN_EMBEDDING,
    AT_AN_UPDATE,
    launches_of,
    operators_of,
)

SKIPPED = 8  # the most kernels of an update that SkipUpdate skips
FURTHER_PART = 19  # the most that each further part of the values of an entry adds


@pytest.fixture(autouse=True)
def _like_a_gpu(kernels, monkeypatch):
    start = launch.Launch.start

    def start_alone(*args):
        with _disable_current_modes():  # the interpreter calls operators of torch
            start(*args)

    monkeypatch.setattr(launch.Launch, "start", start_alone)


def of_step(model, x):
    """What a forward and a backward start, by name."""
    model(x).sum().backward()  # which allocates what stays
    return operators_of(lambda: model(x).sum().backward())


def started(spec, make_layer=lambda: nn.Conv2d(8, 8, 1), x=None):
    """What a step starts with these sites beyond that of the bare layer, by name."""
    x = torch.randn(8, 8, 9, 9) if x is None else x
    model = nn.Sequential(make_layer())
    attach(model, spec)
    counts = of_step(model, x)
    counts.subtract(of_step(nn.Sequential(make_layer()), x))
    return +counts


def of_update(spec, number_of_layers):
    """What a step of the optimizer starts, by name."""
    layers = [nn.Linear(8, 8) for _ in range(number_of_layers)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if spec:
        attach(model, spec, optimizer=optimizer)
    for _ in range(2):  # the first one allocates what stays
        model(torch.randn(4, 8)).sum().backward()
        counts = operators_of(optimizer.step)
    return counts


@pytest.mark.parametrize(("item", "most"), AT_A_LAYER.items(), ids=repr)
def test_a_site_starts_few_kernels(item, most):
    names = started({"0": item})
    assert names.total() <= most, names


@pytest.mark.parametrize(("item", "most"), AT_A_PARAMETER.items(), ids=repr)
def test_a_site_of_a_parameter_starts_few_kernels(item, most):
    names = started({"param:0.weight": item})
    assert names.total() <= most, names


@pytest.mark.parametrize(("item", "most"), AT_AN_EMBEDDING.items(), ids=repr)
def test_a_site_of_an_embedding_starts_few_kernels(item, most):
    ids = torch.randint(0, 20, (8, 16))
    names = started({"0": item}, lambda: nn.Embedding(20, 32), ids)
    assert 0 < names.total() <= most, names


@pytest.mark.parametrize(("item", "most"), AT_A_NORM.items(), ids=repr)
def test_a_site_of_a_norm_starts_few_kernels(item, most):
    names = started({"0": item}, lambda: nn.BatchNorm2d(8))
    assert names.total() <= most, names


@pytest.mark.parametrize(("item", "most"), AT_AN_UPDATE.items(), ids=repr)
def test_an_update_starts_the_same_kernels_for_any_number_of_parameters(item, most):
    started = []
    for number_of_layers in (1, 6):
        names = of_update({"param:**": item}, number_of_layers)
        names.subtract(of_update({}, number_of_layers))
        started.append(+names)
    assert started[0].total() == started[1].total()
    assert started[1].total() <= most, started[1]


@pytest.mark.filterwarnings("ignore:.*left out an update of the optimizer")
def test_an_update_that_is_skipped_starts_few_kernels():
    names = of_update({"param:**": SkipUpdate(max_norm=1e-9)}, 6)
    assert names.total() <= SKIPPED, names


@pytest.mark.parametrize("item", AT_AN_UPDATE, ids=repr)
def test_many_values_are_parts(item, monkeypatch):
    for parts in (2, 3, 6):
        monkeypatch.setattr(foreach, "MOST_ELEMENTS", 6 // parts * (8 * 8 + 8))
        names = of_update({"param:**": item}, 6)
        names.subtract(of_update({}, 6))
        most = AT_AN_UPDATE[item] + (parts - 1) * FURTHER_PART
        assert 0 < (+names).total() <= most, +names


def test_the_page_has_these_numbers():
    page = Path(__file__).parents[2] / "docs" / "guide" / "stacks.md"
    budgets = defaultdict(set)
    for numbers in (AT_A_LAYER, AT_A_PARAMETER, AT_AN_EMBEDDING, AT_A_NORM, AT_AN_UPDATE):
        for item, most in numbers.items():
            budgets[type(item).__name__].add(most)

    rows = re.findall(r"^\| (`.+) \| (\d+) \|$", page.read_text("utf-8"), re.MULTILINE)
    assert len(rows) > 10
    assert f"it starts {SKIPPED} kernels" in page.read_text("utf-8")
    assert f"starts up to {FURTHER_PART} more kernels" in page.read_text("utf-8")
    for classes, number in rows:
        for name in re.findall(r"`(\w+)", classes):
            assert int(number) in budgets[name], name


def test_the_count_sees_a_kernel_that_is_not_needed(own_registry):
    @register
    class Wasteful(Dropout):
        def apply(self, x, now):
            return super().apply(x + 0, now)

    assert started({"0": Wasteful(0.1)}).total() == started({"0": Dropout(0.1)}).total() + 1


def test_a_launch_of_triton_counts():
    x = torch.randn(8, 8, 14, 14)
    bare = launches_of(lambda: x * 2, x.device)
    assert bare == 1
    model = nn.Identity()
    attach(model, {".": Dropout(0.1)})
    model(x)  # which allocates what stays
    names = operators_of(lambda: model(x))
    assert names["a Triton kernel"] == 1
    assert launches_of(lambda: model(x), x.device) == names.total()
