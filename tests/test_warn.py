"""Warnings point at the user's line, however deep in a forward they arise."""

import inspect
import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import Dropout, HookWarning, Watchdog, attach


def test_a_warning_of_attach_names_the_line_of_attach():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.warns(HookWarning) as caught:
        attach(model, {"type:Linear": Dropout(0.1), "0": None})
    line = inspect.currentframe().f_lineno - 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_warning_inside_a_forward_names_the_line_that_called_the_model(depth):
    model = nn.Linear(2, 2)
    for _ in range(depth):
        model = nn.Sequential(model)
    attach(model, {"type:Linear": Watchdog("nonfinite")})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.full((1, 2), torch.nan))
        line = inspect.currentframe().f_lineno - 1
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line)]
