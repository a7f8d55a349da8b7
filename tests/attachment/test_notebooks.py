"""Notebooks: what is shown there, and a cell that is run twice."""

import re

import pytest
import torch
from torch import nn

from dropblock_hooks import ClipGradNorm, Dropout2d, SpecError, attach, layers, plan

CELL = """
from dropblock_hooks import attach, Dropout2d
attached = attach(model, {"layer1.*": Dropout2d(0.1)})
"""


def test_a_cell_that_is_run_twice_names_the_line_that_cures(net, hook_count):
    names = {"model": net}
    exec(CELL, names)
    hooks = hook_count(net)
    with pytest.raises(SpecError, match="a live Attachment.* on layer1.0") as refused:
        exec(CELL, names)
    assert hook_count(net) == hooks
    (line,) = re.findall("`(.*?)`", str(refused.value))
    exec(line, names)  # as it stands there, in a cell of its own
    assert hook_count(net) == 0
    exec(CELL, names)
    assert hook_count(net) == hooks


def test_all_that_prints_a_table_is_one_in_notebooks():
    model = nn.Sequential()
    model.add_module("<i>&", nn.Conv2d(2, 2, 3))
    spec, x = {"type:Conv2d": [Dropout2d(0.1), ClipGradNorm(1.0)]}, torch.ones(1, 2, 5, 5)
    planned, listed = plan(model, spec, x), layers(model, x)
    attached = attach(model, spec)
    for shown in (attached, attached.report(), planned, listed):
        page = shown._repr_html_()
        assert "&lt;i&gt;&amp;" in page
        assert "<i>" not in page
        assert "<script" not in page
    page = attached._repr_html_()
    assert page.count("<table>") == 2
    assert (
        page.count("<th>realized this epoch</th>") == page.count("<th>changed this epoch</th>") == 1
    )
