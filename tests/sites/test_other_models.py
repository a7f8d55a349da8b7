"""Compiled code of another model, or of another block, is never run for one with other hooks."""

import itertools
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from dropblock_hooks import ClampGrad, Dropout, attach
from tests.cases import rest_slow


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.layer(x) + 2)


class Net(nn.Module):
    """Equal blocks, with a break of the graph after each if asked."""

    def __init__(self, breaks=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.breaks = breaks

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


def whole(model):
    return torch.compile(model, backend="eager")


def in_place(model):
    model.compile(backend="eager")
    return model


def children(model):
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def step(model):
    return torch.compile(lambda x: model(x) * 1.0, backend="eager")


WAYS = [whole, in_place, children, step]
ORDERS = ["BA", "AB", "BAB", "ABA", "BBAA", "ABBA"]


@pytest.mark.pairwise
@pytest.mark.parametrize("order", rest_slow(ORDERS, ["BAB"]))
@pytest.mark.parametrize("breaks", rest_slow([False, True]), ids=["one graph", "graph breaks"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_bare_and_an_attached_model_in_one_process(way, breaks, order):
    torch._dynamo.reset()
    bare, model = Net(breaks), Net(breaks)
    attached = attach(
        model, {"blocks.1": [Dropout(0.5), ClampGrad(-1, 1)], "blocks.2": Dropout(1.0)}
    )
    calls = {"B": way(bare), "A": way(model)}
    x = torch.rand(4, 8)
    made = 0
    for arm, _ in itertools.product(order, range(2)):
        y = calls[arm](x)
        y.sum().backward()
        assert y.any() == (arm == "B")
        made += arm == "A"
        assert [site.calls for site in attached.sites] == [made] * 3
        assert attached.sites[0].active_calls == made
    assert attached.verify() == []


@pytest.mark.parametrize("every", [False, True], ids=["some blocks", "all blocks"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_blocks_that_are_compiled_one_by_one(backend, every):
    """Blocks with equal hooks share a graph, and each has its own rate and counts."""
    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(*(Block() for _ in range(12)))
    sites = range(12) if every else (3, 7)
    attached = attach(model, [(f"{i}.layer", Dropout(0.05 * (i + 1))) for i in sites])
    for block in model:
        block.compile(backend=backend, fullgraph=True)
    for _ in range(10):
        model(torch.rand(256, 8, requires_grad=True)).sum().backward()
    assert [site.active_calls for site in attached.sites] == [10] * len(sites)
    for i, site in zip(sites, attached.sites, strict=True):
        assert site.realized_rate == pytest.approx(0.05 * (i + 1), abs=0.02)
    assert counters["stats"]["unique_graphs"] == (1 if every else 2)
    assert attached.verify() == []


@pytest.mark.parametrize("first", rest_slow(["attached", "bare"], 0))
def test_a_model_that_is_attached_before_dynamo_is_imported(first):
    """The setting of dynamo is changed when it is imported, and `attach` imports it not."""
    code = f"""
        import sys
        import torch
        from torch import nn
        from dropblock_hooks import Dropout, attach

        bare, model = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
        attached = attach(model, {{"0": Dropout(1.0)}})
        assert "torch._dynamo" not in sys.modules
        calls = [torch.compile(each, backend="eager") for each in (bare, model)]
        x = torch.rand(3, 4)
        for call in calls if {first == "bare"} else calls[::-1]:
            call(x)
        assert calls[0](x).any()
        assert not calls[1](x).any()
        assert attached.sites[0].calls == 2
        assert torch._dynamo.config.skip_nnmodule_hook_guards is False
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
