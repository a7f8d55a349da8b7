"""Each name in backticks on the page about the architecture exists, and its code runs."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import dropblock_hooks

ROOT = Path(__file__).parents[1]
PACKAGE = Path(dropblock_hooks.__file__).parent
PAGE = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
SPANS = sorted(set(re.findall(r"`([^`\n]+)`", BLOCK.sub("", PAGE))))
OPTIONS = {'at="input"', 'when="accumulated"', "param:"}
"""Code of users, which other tests run."""
NEEDS_A_LIBRARY = (
    "integrations.lightning",
    "integrations.timm",
    "integrations.transformers",
    "integrations.ultralytics",
)


def package_names():
    """The objects that the modules of the package define or import, by name; with the modules."""
    names = {}
    for found in pkgutil.walk_packages([str(PACKAGE)], "dropblock_hooks."):
        local = found.name.removeprefix("dropblock_hooks.")
        if local.startswith(NEEDS_A_LIBRARY) or ".kernels" in found.name:
            continue
        module = importlib.import_module(found.name)
        for name, value in vars(module).items():
            is_own = str(getattr(value, "__module__", "")).startswith("dropblock_hooks")
            if is_own or name not in names:  # `Counter` is ours, and not that of collections
                names[name] = value
    return names


@pytest.fixture(scope="module")
def names():
    return package_names()


def has_member(cls, member):
    """Whether a class has a member: in the class, or as an attribute that a method assigns."""
    if hasattr(cls, member) or any(
        member in getattr(c, "__annotations__", {}) for c in cls.__mro__
    ):
        return True
    sources = [
        inspect.getsource(c) for c in cls.__mro__ if c.__module__.startswith("dropblock_hooks")
    ]
    return any(re.search(rf"self\.{member}\b[^=\n]*=", source) for source in sources)


def exists(text, names):
    """Whether a path, a module, a name of the package or a member of a class exists."""
    if "/" in text or text.endswith((".py", ".md", ".cfg")):
        places = (ROOT, PACKAGE, PACKAGE.parent)
        return any((place / text).exists() for place in places) or any(PACKAGE.rglob(text))

    name = re.sub(r"\(.*\)$", "", text.removeprefix("@"))
    first, _, member = name.partition(".")
    if not member:
        is_method = any(inspect.isclass(c) and name in vars(c) for c in names.values())
        return name in names or is_method
    return first in names and inspect.isclass(names[first]) and has_member(names[first], member)


@pytest.mark.parametrize("text", [span for span in SPANS if span not in OPTIONS])
def test_each_name_exists(text, names):
    assert exists(text, names), f"docs/ARCHITECTURE.md names `{text}`, which does not exist"


@pytest.mark.parametrize(
    "text", ["Site.entre", "placement", "sites/hook.py", "Nothing.at", "setup.py"]
)
def test_a_wrong_name_is_found(text, names):
    assert not exists(text, names)


def test_the_code_runs():
    (code,) = BLOCK.findall(PAGE)
    names = {"nn": importlib.import_module("torch.nn"), **vars(dropblock_hooks)}
    exec(code, names)
    names["attached"].remove()
