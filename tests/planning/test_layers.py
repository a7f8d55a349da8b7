"""layers(model)."""

import subprocess
import sys

import torch
from torch import nn

from dropblock_hooks import Dropout, attach, layers


def test_layers(net):
    table = layers(net)
    assert [row.name for row in table] == [name for name, _ in net.named_modules()]
    assert table[1].type == "Conv2d"
    assert table[1].parameters == 8 * 3 * 9 + 8
    assert table[1].shape is None
    assert str(table).splitlines()[0].split() == ["name", "type", "parameters"]


def test_layers_with_an_example(net):
    attached = attach(net, {"stem": Dropout(0.5, active="always")})
    net.register_buffer("seen", torch.zeros(()))
    state = torch.get_rng_state()
    table = layers(net, torch.ones(2, 3, 16, 16))
    rows = {row.name: row for row in table}
    assert rows["stem"].shape == (2, 8, 8, 8)
    assert rows["layer1.0.act"].calls == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training
    assert attached.sites[0].calls == 0
    assert "2x8x8x8" in str(table)


def test_layers_of_odd_models():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.unused = nn.ReLU(), nn.Linear(2, 2)
            self.alias = self.act

        def forward(self, x, scale=1):
            return {"a": self.alias(self.act(x)) * scale, "b": None}

    rows = {row.name: row for row in layers(Odd(), {"x": torch.ones(2), "scale": 2})}
    assert rows[""].shape == "dict of 2"
    assert (rows["act"].calls, rows["act"].aliases) == (2, ("alias",))
    assert (rows["unused"].calls, rows["unused"].shape) == (0, None)
    assert layers(Odd(), (torch.ones(2), 3))[0].calls == 1
    assert layers(nn.Sequential(nn.Flatten()), torch.ones(2, 2))[0].shape == (2, 2)


def test_the_core_imports_neither_dynamo_nor_what_is_optional():
    optional = ("timm", "torchvision", "torch._dynamo", "pandas", "matplotlib")
    code = (
        "import sys, dropblock_hooks, dropblock_hooks.plots;"
        f"print([m for m in {optional} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
