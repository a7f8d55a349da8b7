"""Private names of torch: each is there today, and the package works without each of them."""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from dropblock_hooks import DropBlock2d, _torch, compiling, plan
from dropblock_hooks.sites.seeds import seeded

SOURCE = Path(_torch.__file__)
FINDERS = {"_of_c": "torch._C.{}", "find_private": "{}"}
FOREACH = ["_foreach_norm", "_foreach_mul_", "_foreach_sub_", "_foreach_copy_", "_foreach_zero_"]
OF_OBJECTS = {
    torch.nn.Module: [
        *("_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks"),
        *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
        *("_backward_hooks", "_backward_pre_hooks"),
    ],
    lambda: torch.ones(1): [
        *("_backward_hooks", "_post_accumulate_grad_hooks", "_cdata", "_is_view"),
    ],
    lambda: DTensor: ["_local_tensor"],
    lambda: torch.amp.GradScaler("cpu"): ["_scale"],
    lambda: torch.compiler: [_torch.COMPILING] + [_torch.EXPORTING] * (not compiling.TOO_OLD),
}


# names that only compiled code needs, and that torch before 2.9 may lack
OF_COMPILED_CODE = {"torch._C._autograd._top_saved_tensors_default_hooks"}


def names():
    """The paths that `_torch` looks up in torch."""
    found = [f"torch.{name}" for name in FOREACH]
    for node in ast.walk(ast.parse(SOURCE.read_text(encoding="utf-8"))):
        called = getattr(getattr(node, "func", None), "id", "")
        if called in FINDERS and isinstance(node.args[0], ast.Constant):
            found.append(FINDERS[called].format(node.args[0].value))
    unneeded = OF_COMPILED_CODE if compiling.TOO_OLD else set()
    return sorted(set(found) - unneeded)


def look_up(path):
    module, _, name = path.rpartition(".")
    if module.startswith("torch._C"):
        found = torch._C
        for part in path.split(".")[2:]:
            found = getattr(found, part)
        return found
    __import__(module)
    if not hasattr(sys.modules[module], name):  # a module that nothing has imported yet
        __import__(path)
    return getattr(sys.modules[module], name)


@pytest.mark.parametrize("path", names())
def test_this_torch_has_the_name(path):
    assert look_up(path) is not None


def test_this_torch_has_the_attributes():
    for make, attributes in OF_OBJECTS.items():
        made = make()
        assert [name for name in attributes if not hasattr(made, name)] == []


def test_a_missing_name_of_one_feature_is_told(monkeypatch):
    monkeypatch.delattr(torch._C, "_ForceDispatchKeyGuard")
    with (
        pytest.raises(_torch.MissingNameError, match="has no _ForceDispatchKeyGuard, which a comp"),
        _torch.recording_autograd(),
    ):
        pass
    bare = object()
    with pytest.raises(
        _torch.MissingNameError, match=r"Module\._forward_hooks, which attach needs"
    ):
        _torch.forward_hooks(bare)


@pytest.mark.parametrize("name", ["FakeTensorMode", "FakeCopyMode"])
def test_without_fake_tensors_a_plan_uses_tensors_with_values(monkeypatch, name):
    module = importlib.import_module("torch._subclasses.fake_tensor")
    monkeypatch.delattr(module, name)
    assert _torch.fake_mode() is None
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    planned = plan(model, {"1": DropBlock2d(0.1, 3)}, torch.ones(2, 3, 8, 8))
    assert not planned.problems
    assert [row.shape for row in planned.rows] == [(2, 4, 6, 6)]


def test_what_stands_in_for_a_name_gives_the_same(monkeypatch):
    tensors = [torch.randn(3), torch.randn(2, 2)]
    wanted = [x.norm().double() for x in tensors]
    for name in FOREACH:
        monkeypatch.delattr(torch, name)
    norms = _torch.foreach_norm(tensors, 2.0, torch.float64)
    assert [float(x) for x in norms] == pytest.approx([float(x) for x in wanted])
    copies = [x.clone() for x in tensors]
    _torch.foreach_mul_(copies, 2.0)
    _torch.foreach_sub_(copies, tensors)
    assert all(map(torch.allclose, copies, tensors))
    _torch.foreach_copy_(copies, [torch.ones(3), torch.ones(2, 2)])
    assert all(bool((x == 1).all()) for x in copies)
    _torch.foreach_zero_(copies)
    assert not any(map(torch.any, copies))

    class Plain(torch.nn.Module):
        def __getattribute__(self, name):
            if name in ("_modules", "_parameters") and hidden:
                raise AttributeError(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(_torch, "_is_alias", None)
    assert _torch.shares_memory(tensors[0], tensors[0][1:2].view(1)[:0]) is True
    assert _torch.shares_memory(tensors[0], tensors[1]) is False
    hidden = False
    model = Plain()
    assert _torch.children_of(model) == {}


EXAMPLE = '''
import importlib.abc, importlib.machinery, importlib.util, os, sys, traceback, warnings
import torch
import torch._dynamo  # each optimizer imports it, which takes longer than the rest of the example
from torch import nn

warnings.simplefilter("error")


def example():
    from dropblock_hooks import (
        ActivationStats, ClipGradNorm, DropBlock2d, LinearSchedule, StochasticDepth, attach
    )

    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    spec = {
        "0": [DropBlock2d(p=LinearSchedule(0.0, 0.1), block_size=3), ActivationStats()],
        "2": StochasticDepth(0.1),
        "param:**": ClipGradNorm(1.0, group=True),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach(model, spec, epochs=3, optimizer=optimizer)
    for epoch in range(3):
        attached.step(epoch)
        model(torch.randn(4, 3, 12, 12)).sum().backward()
        optimizer.step()
    str(attached)
    assert attached.verify() == []
    rates = [site.realized_rate for site in attached if site.name == "0"]
    attached.remove()
    assert 0.0 < rates[0] < 0.4


class Renamed(importlib.machinery.SourceFileLoader):
    """Loads `_torch`, which then looks for another name: torch itself needs its own one."""

    def get_code(self, fullname):
        text = self.get_data(self.path).decode()
        return compile(text.replace(NAMES[0], '"torch._missing"'), self.path, "exec")


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "dropblock_hooks._torch":
            return None
        return importlib.util.spec_from_loader(name, Renamed(name, SOURCE))


NAMES = []
sys.meta_path.insert(0, Finder())
for path in SPELLED:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            NAMES.append(SPELLED[path])
            example()
            result = "works"
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
            if type(error).__name__ != "MissingNameError":
                traceback.print_exc()
        print(path, result, sep="\\t", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
'''


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="each name is removed in a forked process")
def test_without_each_name_eager_code_works_or_says_what_is_missing():
    source = SOURCE.read_text(encoding="utf-8")
    spelled = {path: '"' + path.removeprefix("torch._C.") + '"' for path in names()}
    spelled |= {f"torch.{name}": f'"{name}"' for name in FOREACH}
    assert all(text in source for text in spelled.values())
    script = EXAMPLE.replace("SPELLED", json.dumps(spelled)).replace("SOURCE", repr(str(SOURCE)))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    results = dict(line.split("\t") for line in done.stdout.splitlines())
    assert results.keys() == set(names()), done.stderr[-3000:]
    bad = {
        path: result
        for path, result in results.items()
        if result != "works" and not result.startswith("MissingNameError: ")
    }
    assert bad == {}, done.stderr[-3000:]
    told = [path for path, result in results.items() if result != "works"]
    assert all(path.startswith("torch.utils._pytree.") for path in told), told


def test_the_generator_of_mps_is_seeded(monkeypatch):
    """`torch.mps` has one generator, and no list of them as other devices."""
    generator = torch.Generator()
    monkeypatch.setattr(torch.mps, "_get_default_mps_generator", lambda: generator)
    state = generator.get_state()
    draws = []
    for _ in range(2):
        with seeded(3, torch.device("mps")):
            draws.append(torch.rand(4, generator=generator))
    assert torch.equal(*draws)
    assert torch.equal(generator.get_state(), state)


def test_a_module_that_is_changed_at_its_import_may_be_looked_for_before(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "imported_later.py"
    file.write_text("raise ValueError('not now')")
    before = list(sys.meta_path)
    _torch._when_imported("imported_later", lambda module: setattr(module, "changed", True))
    assert importlib.util.find_spec("imported_later") is not None
    with pytest.raises(ValueError, match="not now"):
        importlib.import_module("imported_later")
    file.write_text("changed = False  # and a text of another length")
    importlib.invalidate_caches()
    module = importlib.import_module("imported_later")
    monkeypatch.delitem(sys.modules, "imported_later")
    assert module.changed
    assert sys.meta_path == before
