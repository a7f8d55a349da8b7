"""The operators of observers are what torch expects of operators, and run the eager code."""

import copy

import pytest
import torch
from torch import nn

from dropblock_hooks import ActivationStats, GradientStats, attach
from dropblock_hooks.sites.operator import observe, observe_gradient
from tests.cases import rest_slow

LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "NHWC view": lambda x: x.permute(0, 2, 3, 1),
    "expanded": lambda x: x[:, :1].expand(-1, 4, -1, -1),
}
TYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", rest_slow(TYPES), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_operators_pass_torchs_check(layout, dtype):
    x = LAYOUTS[layout](torch.randn(2, 4, 3, 3)).to(dtype)
    nothing = torch.tensor(-5)  # the number of no hook
    torch.library.opcheck(observe, (nothing, [x, x * 2], [x], "(0, 1)", True, True))
    torch.library.opcheck(observe, (nothing, [], [], "0", False, False))
    torch.library.opcheck(observe_gradient, (x, torch.tensor([-5, 3]), 0))


def compiled_and_eager(spec, backend="aot_eager", steps=3):
    """What the same observers have seen in compiled code and in eager mode."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(64, 2))
    seen = []
    for each, wrap in ((copy.deepcopy(model), None), (model, backend)):
        attached = attach(each, spec)
        run = torch.compile(each, backend=wrap, fullgraph=True) if wrap else each
        for n in range(steps):
            torch.manual_seed(n)
            run(torch.randn(4 + n, 3, 6, 6)).square().sum().backward()
        with attached.paused():
            run(torch.randn(4, 3, 6, 6)).sum().backward()
        seen.append(attached)
    return seen


def test_compiled_code_sees_what_eager_code_sees():
    spec = {"[0-4]": [ActivationStats(every=2), GradientStats(when="before")]}
    eager, compiled = (attached.report() for attached in compiled_and_eager(spec))
    assert [row.observed for row in compiled] == [row.observed for row in eager]
    assert [row.active_calls for row in compiled] == [row.active_calls for row in eager] == [3] * 10
