"""Kernels as a part of the graphs of torch.compile."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from dropblock_hooks import DropBlock2d, HookWarning, attach
from dropblock_hooks.functional import in_graph
from tests.cases import rest_slow
from tests.conftest import INTERPRETED, KERNEL_DEVICE

OURS = "dropblock_hooks."
DRAWN = ["draw", "grow", "finish"]
ITEMS = ["exact", "paper", "sample", "across"]


def traced(*arguments):
    """What the forward graph and the backward graph of a step with two sites call, in order."""
    pytest.importorskip("triton", reason="Triton comes with torch on Linux only")
    command = [sys.executable, "-m", "tests.functional.trace_kernels", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    forward, backward = result.stdout.strip().splitlines()
    return forward.split(), backward.split()


def kernels_in(calls):
    """The first words of their names, such as apply of ``_apply_flat_kernel``."""
    return [name.split("_")[1] for name in calls if name.endswith("_kernel")]


@pytest.mark.slow
@pytest.mark.parametrize("item", ITEMS)
def test_the_graph_calls_kernels_in_place_of_operators(item):
    forward, backward = traced(item, "plain", "static")
    assert kernels_in(forward) == DRAWN * 2
    assert kernels_in(backward) == []
    # the compiler fuses the operations that read the mask with those of the layers around
    assert forward.count("aten.where.self") == backward.count("aten.where.self") == 2
    assert not any(name.startswith(OURS) for name in forward + backward)
    assert forward.count("aten.copy.default") == 2  # of the counts


WATCHED = {
    "watch": (["largest", "alive", "note"], ["square", "note"]),
    "watch with rows": (["largest", "alive", "note"], ["square", "note"]),
    "activations": (["alive", "measure", "add"], []),
    "outliers": (["tails", "beyond", "branch", "add", "alive", "measure", "add"], []),
    "gradients": ([], ["measure", "add"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("item", WATCHED)
def test_the_graph_calls_the_kernels_of_observers(item):
    in_forward, in_backward = WATCHED[item]
    forward, backward = traced(item, "plain", "static")
    assert kernels_in(forward) == in_forward * 2
    assert kernels_in(backward) == in_backward * 2
    # what a kernel adds to a part of the state is in the new state
    added = (forward + backward).count("_add_kernel")
    assert (forward + backward).count("aten.select_scatter.default") >= added
    assert (forward + backward).count("aten.slice_scatter.default") >= added
    assert not any(name.startswith(OURS) for name in forward + backward)


@pytest.mark.slow
def test_a_recomputation_in_the_graph_draws_again_and_does_not_count():
    forward, backward = traced("paper", "checkpoints", "static")
    assert kernels_in(forward) == DRAWN * 2
    assert kernels_in(backward).count("draw") == 2
    assert forward.count("aten.copy.default") == 2
    assert "aten.copy.default" not in backward


@pytest.mark.slow
def test_a_batch_of_any_size_keeps_the_operators():
    forward, backward = traced("exact", "plain", "any")
    assert forward.count("dropblock_hooks.drop_blocks.default") == 2
    assert backward.count("dropblock_hooks.drop_blocks_again.default") == 2


def test_an_operator_that_can_not_be_traced_is_told_once_and_stays(kernels, monkeypatch):
    monkeypatch.setattr(in_graph, "_warned", set())

    def fail(*given, **options):
        raise RuntimeError("this kernel is too large")

    monkeypatch.setattr(torch.library, "wrap_triton", fail)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": DropBlock2d(0.3, 3)})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.rand(4, 4, 8, 8, requires_grad=True)
    with pytest.warns(HookWarning, match="kernels of drop_blocks.*too large") as told:
        y = compiled(x)  # which also compiles the backward
    y.sum().backward()
    names = [str(each.message).split(" into")[0] for each in told]
    assert len(names) == len(set(names))
    assert torch.equal(x.grad == 0, y == 0)
    assert attached.sites[0].calls == 1


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(("p", "calibration"), rest_slow([(0.3, "paper"), (0.1, "exact")]))
def test_a_compiled_step_on_a_gpu(p, calibration, channels_last, enabled, monkeypatch):
    monkeypatch.setattr(in_graph, "enabled", enabled)
    torch._dynamo.reset()
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    model = nn.Sequential(nn.Identity())
    attached = attach(model, {"0": DropBlock2d(p, 3, calibration=calibration)})
    compiled = torch.compile(model, fullgraph=True)
    masks = []
    for _ in range(3):
        x = torch.rand(16, 8, 14, 14, device=KERNEL_DEVICE) + 0.5
        x = x.to(memory_format=memory_format).requires_grad_()
        y = compiled(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        dropped = y == 0
        kept = ~dropped
        factor = x.numel() / kept.sum()
        torch.testing.assert_close(y[kept], (x * factor)[kept])
        torch.testing.assert_close(grad, kept * factor)
        masks.append(dropped)
    assert not torch.equal(masks[0], masks[1])
    assert all(0 < mask.float().mean() < 2 * p for mask in masks)
    (site,) = attached.sites
    assert site.calls == 3
    assert site.realized_rate == pytest.approx(float(torch.stack(masks).double().mean()), abs=1e-6)
