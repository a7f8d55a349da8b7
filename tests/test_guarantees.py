"""The page of guarantees names tests that exist, and each of its bullets names one."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
BULLETS = [line for line in PAGE.splitlines() if line.startswith("- ")]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)


@functools.cache
def functions_in(file):
    """The names of the test functions of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("file", "name"), NAMED, ids=str)
def test_a_named_test_exists(file, name):
    assert (ROOT / file).is_file()
    assert name in functions_in(file)


def test_each_guarantee_names_a_test():
    assert len(BULLETS) >= 40
    assert [bullet for bullet in BULLETS if "::test_" not in bullet] == []
