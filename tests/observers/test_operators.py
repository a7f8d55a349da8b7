"""The operators of observers are what torch expects of operators, and run the eager code."""

import copy

import pytest
import torch
from torch import nn

from dropblock_hooks import ActivationStats, Capture, GradientStats, Watchdog, attach, watch
from dropblock_hooks.sites.observe_operator import observe, observe_gradient

LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "NHWC view": lambda x: x.permute(0, 2, 3, 1),
    "expanded": lambda x: x[:, :1].expand(-1, 4, -1, -1),
}
TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
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


@pytest.mark.parametrize(
    "kind", [ActivationStats(every=2), GradientStats(), GradientStats(when="before")], ids=repr
)
def test_compiled_code_sees_what_eager_code_sees(kind):
    eager, compiled = (attached.report() for attached in compiled_and_eager({"[0-4]": kind}))
    assert [row.observed for row in compiled] == [row.observed for row in eager]
    assert [row.active_calls for row in compiled] == [row.active_calls for row in eager] == [3] * 5


def test_a_watchdog_counts_in_compiled_code_as_in_eager_code():
    eager, compiled = compiled_and_eager({"**": Watchdog()})
    kept = [[site.bound.open["watched"] for site in each[Watchdog]] for each in (eager, compiled)]
    for name in ("calls", "differentiable", "grads"):
        ours, theirs = ([getattr(numbers, name) for numbers in each] for each in kept)
        assert ours == theirs


def test_pausing_and_removing_compile_nothing_anew():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    attached = attach(model, {"**": ActivationStats(every=1), "0": Capture(gradients=True)})
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.ones(2, 3)
    run(x).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True), attached.paused():
        run(x).sum().backward()
    assert [site.active_calls for site in attached] == [1] * len(attached)


def test_a_handle_is_on_the_cpu_wherever_it_is_made():
    model = nn.Sequential(nn.Linear(3, 3))
    with torch.device("meta"), torch.inference_mode():
        attached = attach(model, {"0": ActivationStats()})
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    run(torch.ones(2, 3)).sum().backward()
    with torch.inference_mode():
        run(torch.ones(2, 3))
    run(torch.ones(2, 3)).sum().backward()
    assert attached.report()[0].observed.calls == 3


def test_two_forwards_before_their_backwards():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    attached = attach(model, {"0": Capture(gradients=True, keep=None)})
    watch(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.ones(2, 3)
    first, second = run(x), run(2 * x)
    second.sum().backward()
    (3 * first.sum()).backward()
    grads = [record.grad for record in attached.captured()["0"]]
    for grad, given, factor in zip(grads, (x, 2 * x), (3, 1), strict=True):
        weight = model[2].weight.sum(0) * factor
        torch.testing.assert_close(grad, weight * (model[0](given) > 0))
