"""What all tests and doctests share."""

import gc
import os
import sys
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch import nn

import dropblock_hooks
from dropblock_hooks import registry
from tests.cases import covering_pairs

os.environ["COLUMNS"] = "100"  # printed tables are as wide as the terminal
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes for one kernel
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton kernels are run by an interpreter
torch.set_num_threads(1)  # the tensors are tiny, and a worker per core would only fight for cores
# Before any fake tensor: after one, torch starts the threads of devices that are not there in the
# first backward pass, and no forked process can go backward any more.
torch.ones((), requires_grad=True).backward()
modules_left_out = 0
# A seed for a device that is not there is kept for later, with the stack of its call.
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        device.manual_seed_all = lambda seed: None


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run all cases of tests marked every or pairwise, and those marked exhaustive",
    )


def pytest_collection_modifyitems(config, items):
    """Without --exhaustive, generators that have very many cases are sampled."""
    if config.getoption("--exhaustive"):
        return
    tests = defaultdict(list)
    for item in items:
        slow = item.get_closest_marker("slow") is not None
        tests[item.nodeid.partition("[")[0], slow].append(item)
    kept = {id(item) for (_, slow), cases in tests.items() for item in sampled(cases, slow)}
    left_out = [item for item in items if id(item) not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if id(item) in kept]


def sampled(cases, slow):
    """The slow cases of a test, or its others, without those that its marks leave out."""
    cases = [case for case in cases if case.get_closest_marker("exhaustive") is None]
    every = cases[0].get_closest_marker("every") if cases else None
    if every is not None:
        cases = cases[:: steps(*every.args, **every.kwargs)[slow]]
    if len(cases) > 1 and cases[0].get_closest_marker("pairwise") is not None:
        rows = [[(k, repr(v)) for k, v in case.callspec.params.items()] for case in cases]
        cases = [cases[i] for i in covering_pairs(rows)]
    return cases


def steps(slow=1, plain=1):
    """The arguments of the mark every, by whether a case is slow."""
    return {True: slow, False: plain}


@pytest.fixture(autouse=True)
def _what_was_loaded_is_not_searched(monkeypatch):
    """`plan` searches through all objects for fake tensors; leave out what modules hold.

    These are very many objects, once torch compiles. They stay left out, because nothing may thaw
    them.
    """
    global modules_left_out
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    if len(sys.modules) > modules_left_out + 50:
        gc.collect()
        gc.freeze()
        modules_left_out = len(sys.modules)


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _compiled_code_needs_torch_2_9(monkeypatch):
    """A test that compiles or exports is skipped where torch is too old for compiled sites."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9):
        return

    def skip(*args, **kwargs):
        pytest.skip("compiled sites need torch 2.9")

    for owner, name in ((torch, "compile"), (nn.Module, "compile"), (torch.export, "export")):
        monkeypatch.setattr(owner, name, skip)


@pytest.fixture(autouse=True)
def _guards_are_not_timed():
    """For its log, torch.compile measures how long the guards of each graph take.

    Before that, it empties the caches of the CPU, which takes as long as to compile a small graph.
    """
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        guards.profile_guard_manager = lambda *arguments: 0.0


@pytest.fixture(autouse=True, scope="session")
def _names_of_the_examples(doctest_namespace):
    """The public names, torch and nn, so that an example need not import them."""
    public = {name: getattr(dropblock_hooks, name) for name in dropblock_hooks.__all__}
    doctest_namespace.update(public, torch=torch, nn=nn)


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Every test begins with the same seeds."""
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def _examples_register_for_themselves(request, monkeypatch):
    """A class that an example registers is gone after it, so that it is not found by tests."""
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.setattr(registry, "_CLASSES", dict(registry._CLASSES))
