"""The code that inductor generates for DropBlock: how often it passes over the whole activation."""

import math
import re

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from dropblock_hooks import DropBlock2d, attach

LOOP = re.compile(r"^( *)for\(int64_t x\d+=static_cast<int64_t>\(0L\); x\d+<\D+64_t>\((\d+)L\)")


def loads_of_passes(code, numel):
    """For each loop nest in generated C++ over at least `numel` positions: its vector loads."""
    loads, nest, inside = [], [], False
    for line in code.splitlines():
        loop = LOOP.match(line)
        if loop:
            indent = len(loop[1])
            nest = [outer for outer in nest if outer[0] < indent] + [(indent, int(loop[2]))]
            inside = math.prod(edge for _, edge in nest) >= numel
            if inside:
                loads.append(0)
        elif inside:
            loads[-1] += len(re.findall(r"(?:loadu<?[^(]*|::from)\(", line))
    return loads


@pytest.mark.slow
def test_passes_over_the_activation():
    """Forward: bits out of words, count, product; backward: product. One load each, or with x."""
    torch._dynamo.reset()
    layer = nn.Identity()
    attach(layer, {".": DropBlock2d(0.1, 7)})
    call = torch.compile(layer, fullgraph=True)
    x = torch.randn(8, 64, 28, 28, requires_grad=True)
    _, (forward, backward) = run_and_get_code(lambda: call(x).backward(torch.ones_like(x)))
    passes = loads_of_passes(forward, x.numel())
    assert 1 <= len(passes) <= 3
    assert sum(passes) <= 4
    passes = loads_of_passes(backward, x.numel())
    assert len(passes) == 1
    assert sum(passes) <= 2
