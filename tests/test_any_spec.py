"""Any spec ends in an attachment or in a SpecError: soon, and with a message that can be read."""

import pickle
import time
import warnings

import pytest
from torch import nn

from dropblock_hooks import SpecError, attach
from tests.bad_specs import files, objects

LONGEST = 4_000
SECONDS = 1.0


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(model, spec):
    """The text of the error, or None; whatever else comes is a fault."""
    begin = time.process_time()
    try:
        attach(model, spec).remove()
        text = None
    except SpecError as error:
        text = str(error)
        assert len(text) <= LONGEST
        assert error.problems
        text.encode()  # it can be printed
        assert str(pickle.loads(pickle.dumps(error))) == text
    taken = time.process_time() - begin
    assert text is None or taken < SECONDS
    return text


def try_files(model, path, seed, n):
    texts = []
    for data, ending in files(seed, n):
        file = path.with_suffix(ending)
        file.write_bytes(data)
        try:
            texts.append(outcome(model, file))
        except BaseException as error:
            raise AssertionError(f"a file of {len(data)} bytes: {data[:2000]!r}") from error
    return texts


def try_objects(model, seed, n):
    texts = []
    for i, spec in enumerate(objects(seed, n)):
        try:
            texts.append(outcome(model, spec))
        except BaseException as error:
            raise AssertionError(f"object {i} of seed {seed}") from error
    return texts


def test_files(net, tmp_path, hook_count):
    texts = try_files(net, tmp_path / "spec.x", 0, 1500)
    assert 20 < texts.count(None) < 1000  # some are still specs
    assert hook_count(net) == 0


def test_objects(net, hook_count):
    texts = try_objects(net, 0, 500)
    assert 3 < texts.count(None) < 400
    assert hook_count(net) == 0


def many_modules():
    """A thousand modules, with long names."""
    block = lambda: nn.Sequential(*(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU()) for _ in range(3)))
    stages = {f"a_rather_long_name_of_a_stage_{i}": nn.Sequential(*(block() for _ in range(10))) for i in range(10)}
    return nn.ModuleDict({"encoder" * 8: nn.ModuleDict(stages)})


@pytest.mark.slow
def test_many_files(net, tmp_path):
    try_files(net, tmp_path / "spec.x", 1, 20_000)


@pytest.mark.slow
def test_many_objects(net):
    try_objects(net, 1, 5_000)


@pytest.mark.slow
def test_on_a_large_model(tmp_path):
    model = many_modules()
    try_files(model, tmp_path / "spec.x", 2, 500)
    try_objects(model, 2, 500)
