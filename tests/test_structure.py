"""The map of the package: which module imports which."""

import ast
import graphlib
from pathlib import Path

import dropblock_hooks

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


def test_no_circle_of_modules():
    graph = {name: set(imports(name, path)) for name, path in modules().items()}
    inner = {name: found for name, found in graph.items() if not name.endswith("__init__")}
    graphlib.TopologicalSorter(inner).prepare()
