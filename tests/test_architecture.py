"""Each name on the page about the architecture, and in the docstring of a module, exists.

The code of the page runs.
"""

import ast
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
PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
SPAN = re.compile(r"`+([^`\n]+)`+")
STRING = re.compile(r"\"(\w+)\"")
DOTTED = re.compile(r"(?<![\w./])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
OTHERS = {"Name", "feature_info", "figure", "plot", "tensor", "timm", "torch", "train"}
"""What names of other libraries, of files and of placeholders begin with."""


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


def defined_in(body):
    """The names that the statements of a module or a class define or import."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.If | ast.Try):
            yield from defined_in([*node.body, *node.orelse])
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from names_of_target(target)
        elif isinstance(node, ast.AnnAssign):
            yield from names_of_target(node.target)


def names_of_target(target):
    """The names in a target of an assignment, which may be a tuple."""
    parts = ast.walk(target)
    return [part.id for part in parts if isinstance(part, ast.Name)]


def parameters_in(body):
    """The names of the parameters of functions and methods."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield from (parameter.arg for parameter in parameters)
        elif isinstance(node, ast.ClassDef):
            yield from parameters_in(node.body)


def members_of(cls, classes):
    """The members of a class: its own, those that its methods assign, and those of its bases."""
    yield from defined_in(cls.body)
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
    for base in cls.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from members_of(classes[base.id], classes)


def full_names(trees):
    """The names of all modules, of what they define, and of the members of classes."""
    classes = {}
    for tree in trees.values():
        found = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        classes.update({cls.name: cls for cls in found})

    for path, tree in trees.items():
        yield path
        for name in defined_in(tree.body):
            yield f"{path}.{name}"
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                for member in members_of(node, classes):
                    yield f"{path}.{node.name}.{member}"


def known_names(trees):
    """All names of the package, each in all forms that a text may use.

    For example `sites.board.Board.write`, `board.Board.write`, `Board.write` and `write`.
    """
    known = set()
    for tree in trees.values():
        known.update(parameters_in(tree.body))

    for name in full_names(trees):
        parts = name.split(".")
        known.update(".".join(parts[i:]) for i in range(len(parts)))
    return known


def unknown_in(text, known):
    """The names in a docstring that look like names of the package, and are unknown.

    Names stand in backticks, or they are dotted and begin with a module or class of the package.
    """
    spans = [span for span in SPAN.findall(text) if PATH.fullmatch(span)]
    names = [span for span in spans if span.partition(".")[0] not in OTHERS]
    for name in DOTTED.findall(SPAN.sub("", text)):
        owner = name.partition(".")[0] + "."
        if any(other.startswith(owner) for other in known):
            names.append(name)
    return [name for name in names if name.removesuffix("()") not in known]


@pytest.fixture(scope="module")
def trees():
    """The parsed modules by path. `sites` is the path of the ``__init__`` of this folder."""
    parsed = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        path = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        parsed[path.removesuffix(".__init__")] = ast.parse(file.read_text(encoding="utf-8"))
    return parsed


@pytest.fixture(scope="module")
def known(trees):
    """The names that a docstring may use: also words in strings, such as values of options."""
    sources = [file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")]
    words = {word for source in sources for word in STRING.findall(source)}
    return known_names(trees) | words


def test_the_names_in_the_docstrings_of_modules_exist(trees, known):
    unknown = {}
    for path, tree in trees.items():
        names = unknown_in(ast.get_docstring(tree) or "", known)
        if names:
            unknown[path] = names
    assert unknown == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`sites.bord` calls `attachment.place`.", ["sites.bord"]),
        ("`Board.writes` is one copy, as is `Board.write`.", ["Board.writes"]),
        ("``attach`` calls `no_such_function` with `p`.", ["no_such_function"]),
        ("See sites.compiled.red and sites.compiled.", ["sites.compiled.red"]),
        ("``attachment.place.NOOKS`` of ``torch.library``", ["attachment.place.NOOKS"]),
        ("`LiveSite.acts` calls `kernels.moments.measure` in `Watchdog.bind()`.", []),
        ("The gradients, e.g. x.grad, and a param.ndim of torch.Tensor", []),
        ("`Watchdog.binds()` and ``python -m dropblock_hooks``", ["Watchdog.binds()"]),
    ],
)
def test_a_wrong_name_in_a_docstring_is_found(text, expected, known):
    assert unknown_in(text, known) == expected
