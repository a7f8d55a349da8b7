"""Tests, experiments and scripts use public names of the package, so that its inside can change.

Public are the names in ``dropblock_hooks.__all__``, and what the modules in `PUBLIC` show.
"""

import ast
import importlib
from pathlib import Path

import pytest

from tests.test_public import MODULES

ROOT = Path(__file__).parents[1]
PUBLIC = {
    *MODULES,
    "dropblock_hooks.cli",
    "dropblock_hooks.collect_env",
    "dropblock_hooks.integrations",
}
INTERNAL = [
    "experiments/overhead/launches.py",
    "tests/axes/layouts_table.py",
    "tests/axes/test_axes.py",
    "tests/axes/test_layouts.py",
    "tests/conftest.py",
    "tests/functional/compile_kernels.py",
    "tests/functional/conftest.py",
    "tests/functional/test_border.py",
    "tests/functional/test_in_graph.py",
    "tests/functional/test_kernels.py",
    "tests/functional/trace_kernels.py",
    "tests/functional/test_launches.py",
    "tests/functional/test_operators.py",
    "tests/functional/test_outlier_kernels.py",
    "tests/sites/test_memories.py",
    "tests/sites/test_together.py",
    "tests/sites/test_traced_functions.py",
    "tests/functional/test_disout.py",
    "tests/functional/test_sparse.py",
    "tests/observers/test_equal_inputs.py",
    "tests/observers/test_moments.py",
    "tests/observers/test_operators.py",
    "tests/observers/test_sampling.py",
    "tests/regularizers/test_gradients.py",
    "tests/selectors/test_kinds.py",
    "tests/selectors/test_select.py",
    "tests/selectors/test_stages.py",
    "tests/test_devices.py",
    "tests/test_findings.py",
    "tests/test_schedules.py",
    "tests/test_tables.py",
    "tests/test_torch.py",
    "tests/test_troubleshooting.py",
]
"""Files that import internals. Only those about kernels, about private names of torch, about the
table of messages, about the forwards that a Watchdog measures and about extensions of the package
may be added, because nothing public tells how many kernels were started or which forwards were
planned, or adds a kind of target.
"""

FOLDERS = ("experiments", "scripts", "tests", "docs/recipes")
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def internals(text):
    """What a text imports of the package that is not public."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found.update(imported(node.module, [alias.name for alias in node.names]))
        elif isinstance(node, ast.Import):
            found.update(each.name for each in node.names if each.name not in PUBLIC)
    return sorted(name for name in found if name.startswith("dropblock_hooks."))


def imported(module, names):
    """The imported names that are not public."""
    if module not in PUBLIC:
        return {f"{module}.{name}" for name in names}
    try:
        shown = getattr(importlib.import_module(module), "__all__", names)
    except ImportError:  # the library of the integration is not installed
        shown = names
    whole = {f"{module}.{name}" for name in names if name not in shown}
    return {name for name in whole if name not in PUBLIC}


@pytest.mark.parametrize("file", sorted({*FILES} - {*INTERNAL, "tests/test_imports.py"}))
def test_a_file_uses_public_names(file):
    assert internals((ROOT / file).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("file", INTERNAL)
def test_a_file_that_may_use_internals_does(file):
    assert internals((ROOT / file).read_text(encoding="utf-8")), f"take {file} out of INTERNAL"
