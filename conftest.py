"""What all tests and doctests share."""

import gc
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

import dropblock_hooks

torch.set_num_threads(1)  # the tensors are tiny, and a worker per core would only fight for cores


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive", action="store_true", help="of slow tests marked every(n), run all cases"
    )


def pytest_collection_modifyitems(config, items):
    """Of the slow cases of a test marked every(n), each n-th is kept: a generator has very many."""
    if config.getoption("--exhaustive"):
        return
    seen, left_out = Counter(), []
    for item in items:
        mark = item.get_closest_marker("every")
        if mark is not None and item.get_closest_marker("slow") is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                left_out.append(item)
            seen[test] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]


@pytest.fixture(autouse=True, scope="module")
def _what_was_loaded_is_not_searched():
    """Searches through all objects leave out what is there already: much, once torch compiles."""
    if len(gc.get_objects()) > 100_000:
        gc.collect()
        gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


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
