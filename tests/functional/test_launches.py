"""How many kernels a site starts on a GPU, counted on a CPU with the form for GPUs.

An operator of torch counts as one kernel, and so does a Triton kernel. On a GPU, the backward of
the bare layer copies the gradient of the sum. A site that has a new gradient saves this copy, so a
site of gradients has one kernel less there than here.
"""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from dropblock_hooks import Dropout, attach, register
from dropblock_hooks.functional.kernels import launch
from experiments.overhead.launches import AT_A_LAYER, AT_A_PARAMETER, launches_of, operators_of


@pytest.fixture(autouse=True)
def _like_a_gpu(kernels, monkeypatch):
    start = launch.Launch.start

    def start_alone(*args):
        with _disable_current_modes():  # the interpreter calls operators of torch
            start(*args)

    monkeypatch.setattr(launch.Launch, "start", start_alone)


def started(spec):
    """What a step starts with these sites beyond that of the bare layer, by name."""
    x = torch.randn(8, 8, 14, 14)
    counts = []
    for attached in (spec, {}):
        model = nn.Sequential(nn.Conv2d(8, 8, 1))
        if attached:
            attach(model, attached)
        model(x).sum().backward()  # which allocates what stays
        counts.append(operators_of(lambda model=model: model(x).sum().backward()))
    counts[0].subtract(counts[1])
    return +counts[0]


@pytest.mark.parametrize(("item", "most"), AT_A_LAYER.items(), ids=repr)
def test_a_site_starts_few_kernels(item, most):
    names = started({"0": item})
    assert names.total() <= most, names


@pytest.mark.parametrize(("item", "most"), AT_A_PARAMETER.items(), ids=repr)
def test_a_site_of_a_parameter_starts_few_kernels(item, most):
    names = started({"param:0.weight": item})
    assert names.total() <= most, names


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
