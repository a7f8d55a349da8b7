"""What all tests and doctests share."""

import os

import numpy as np
import pytest
import torch
from torch import nn

import dropblock_hooks

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # one worker per core: more threads would only fight


@pytest.fixture(autouse=True)
def _names_of_the_examples(doctest_namespace):
    """The public names, torch and nn, so that an example need not import them."""
    public = {name: getattr(dropblock_hooks, name) for name in dropblock_hooks.__all__}
    doctest_namespace.update(public, torch=torch, nn=nn)


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Every test begins with the same seeds."""
    torch.manual_seed(0)
    np.random.seed(0)
