"""What all tests and doctests share."""

import numpy as np
import pytest
import torch
from torch import nn

import dropblock_hooks

torch.set_num_threads(1)  # the tensors are tiny, and a worker per core would only fight for cores


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
