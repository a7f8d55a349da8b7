"""The map of the package: which module imports which, how deep, and how long each is."""

import ast
import functools
from pathlib import Path

import pytest
import torch
from torch import nn

import dropblock_hooks
from dropblock_hooks import DropBlock2d, attach
from tests.test_scale import profiled

PACKAGE = Path(dropblock_hooks.__file__).parent


def modules():
    """The modules of the package, by name within it."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }


def imports(name, path):
    """The modules of the package that a module imports: anywhere in it, for types too."""
    known, folder = modules(), name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
        whole = ".".join(part for part in base if part)
        inside = [f"{whole}.{alias.name}".strip(".") for alias in node.names]
        only_modules = node.module is None and known.keys() >= set(inside)
        for found in inside if only_modules else (whole, *inside):
            if found in known:
                yield found
            elif f"{found}.__init__" in known:
                yield f"{found}.__init__"


def floors(arrows):
    """How many nodes the longest way along arrows has."""
    on_the_way = []

    @functools.cache
    def height(node):
        assert node not in on_the_way, f"a circle: {' -> '.join((*on_the_way, node))}"
        on_the_way.append(node)
        below = max((height(other) for other in arrows.get(node, ())), default=0)
        on_the_way.pop()
        return below + 1

    return max(map(height, arrows))


def graph():
    return {name: set(imports(name, path)) - {name} for name, path in modules().items()}


def test_no_circle_of_modules():
    inner = {name: found for name, found in graph().items() if not name.endswith("__init__")}
    floors({name: {other for other in found if other in inner} for name, found in inner.items()})


def test_the_folders_and_each_folder_have_at_most_13_floors():
    arrows, folders = graph(), {}
    for name, found in arrows.items():
        own = name.split(".")[0]
        folders.setdefault(own, set()).update(other.split(".")[0] for other in found)
    assert floors({own: below - {own} for own, below in folders.items()}) <= 13
    for folder in {name.split(".")[0] for name in arrows if "." in name}:
        inside = {n: found for n, found in arrows.items() if n.startswith(f"{folder}.")}
        assert floors({n: {o for o in found if o in inside} for n, found in inside.items()}) <= 13


def test_at_most_12_modules_beside_the_folders():
    assert sum("." not in name for name in modules()) <= 12


def test_no_module_over_350_lines():
    lines = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert {name: n for name, n in lines.items() if n > 350} == {}


def way(work, end):
    """The package's modules on the call stack, from the outside in, when `end` is first called."""
    found = []

    def see(frame, event, called):
        name = called.__name__ if event == "c_call" else frame.f_code.co_name
        if found or not event.endswith("call") or name != end:
            return
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                found.append(str(path.relative_to(PACKAGE).with_suffix("")))
            frame = frame.f_back

    profiled(work, see)
    assert found, f"{end} was not called"
    outside_in = found[::-1]
    return [m for m, before in zip(outside_in, [None, *outside_in], strict=False) if m != before]


@pytest.mark.parametrize("shape", [(2, 4, 8, 8), (8, 64, 14, 14)], ids=["dense", "positions"])
def test_the_ways_are_short_and_enter_no_module_twice(shape):
    model, x = nn.Sequential(nn.Identity()), torch.ones(shape)
    attached = []
    ways = [
        (
            lambda: attached.append(attach(model, {"0": DropBlock2d(0.1, 3)})),
            "register_forward_hook",
            3,
        ),
        (lambda: model(x), "rand", 5),
        (lambda: str(attached[0].report()), "share", 3),
        (lambda: str(attached[0].report()), "to_text", 2),
    ]
    for work, end, most in ways:
        taken = way(work, end)
        assert len(set(taken)) == len(taken) <= most, taken
