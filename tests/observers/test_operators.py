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


def test_compiled_code_sees_what_eager_code_sees():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(64, 2))
    reports = []
    for each, compiled in ((copy.deepcopy(model), False), (model, True)):
        spec = {"[0-4]": [ActivationStats(every=2), GradientStats(every=2, when="before")]}
        attached = attach(each, spec)
        run = torch.compile(each, backend="aot_eager", fullgraph=True) if compiled else each
        for n in range(3):
            torch.manual_seed(n)
            run(torch.randn(4 + n, 3, 6, 6)).square().sum().backward()
        with attached.paused():
            run(torch.randn(4, 3, 6, 6)).sum().backward()
        reports.append([(row.observed, row.active_calls) for row in attached.report()])
    assert reports[0] == reports[1]
    # gradients count where they are measured
    assert [calls for _, calls in reports[0]] == [3] * 5 + [2] * 5
