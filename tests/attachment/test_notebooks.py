"""Notebooks: what is shown there, and a cell that is run twice."""

import re

import pytest

from dropblock_hooks import SpecError

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
