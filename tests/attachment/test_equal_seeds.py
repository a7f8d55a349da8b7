"""Equal seeds of several ranks, whichever of them comes first."""

import itertools
import warnings

import pytest
import torch
from torch import distributed, nn

from dropblock_hooks import Dropout, HookWarning, attach

KEY = "dropblock_hooks/seed/0/1"  # of the first comparison, from rank 1


@pytest.fixture
def store(monkeypatch):
    """This process is rank 0 of two."""
    made = distributed.HashStore()
    monkeypatch.setattr("dropblock_hooks.diagnosis.ranks.world_size", lambda: 2)
    monkeypatch.setattr("dropblock_hooks.diagnosis.ranks._comparisons", itertools.count())
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed.distributed_c10d, "_get_default_store", lambda: made)
    return made


@pytest.mark.parametrize("first", [0, 1, 3])
def test_the_rank_that_comes_first_is_told_too(store, first):
    attached = attach(nn.Sequential(nn.ReLU()), {"0": Dropout(0.1)})
    for i in range(first):
        attached.step(i / 10)
    store.set(KEY, str(torch.initial_seed()))
    with pytest.warns(HookWarning, match="draw the same masks"):
        attached.step(0.9)
    attached.step(0.95)  # it is told once


def test_other_seeds_are_silent(store):
    attached = attach(nn.Sequential(nn.ReLU()), {"0": Dropout(0.1)})
    attached.step(0)
    store.set(KEY, str(torch.initial_seed() + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attached.step(0.1)
        attached.step(0.2)
    assert attached._run.seeds_compared


def test_a_later_attachment_does_not_read_the_seeds_of_an_earlier_one(store):
    first = attach(nn.Sequential(nn.ReLU()), {"0": Dropout(0.1)})
    store.set(KEY, str(torch.initial_seed() + 1))
    first.step(0)
    assert first._run.seeds_compared
    second = attach(nn.Sequential(nn.ReLU()), {"0": Dropout(0.1)})
    second.step(0)
    assert not second._run.seeds_compared
    store.set("dropblock_hooks/seed/1/1", str(torch.initial_seed()))
    with pytest.warns(HookWarning, match="draw the same masks"):
        second.step(0.1)
