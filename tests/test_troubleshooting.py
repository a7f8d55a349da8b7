"""docs/troubleshooting.md and the messages of the code agree.

Messages are the texts of findings, of warnings and of errors at a site. In the code these are all
strings of at least three words in functions that name a `Kind`, call ``warn`` or ``site.error``, or
are named ``_why``, and in constants that hold a `Kind`. A value in a message is "…" on the page.
Each message of the code must be on the page, and each message of the page must be in the code.
Errors of arguments need no entry, because they say what is allowed. Texts that are assigned to a
name ``cure`` or ``_CURES`` are not compared.
"""

import ast
import re
from pathlib import Path

import dropblock_hooks
from dropblock_hooks import Kind

PACKAGE = Path(dropblock_hooks.__file__).parent
PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def plain(text):
    return " ".join(text.replace("`", "").replace("\\", "").split())


def fragments(template):
    """The parts of a message between its values that have at least three words."""
    parts = [plain(part).strip(" .;)'") for part in re.split("[…:,(]", template)]
    return [part for part in parts if len(part.split()) >= 3]


def templates(tree):
    """The strings below a node, with "…" for values; not docstrings, and not cures."""
    if isinstance(tree, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in tree.values]
        return ["".join(parts)]
    if isinstance(tree, ast.Constant):
        return [tree.value] if isinstance(tree.value, str) else []
    targets = getattr(tree, "targets", [getattr(tree, "target", None)])
    if isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Constant):
        return []
    if any(getattr(target, "id", "") in ("cure", "_CURES") for target in targets):
        return []
    return [text for child in ast.iter_child_nodes(tree) for text in templates(child)]


def reports(node):
    """Whether a function or a constant makes a finding, a warning or an error of a site."""
    if getattr(node, "name", "").startswith("_why"):
        return True
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "Kind":
            return True
        if isinstance(each, ast.Call):
            called = ast.unparse(each.func)
            if called in ("warn", "tell") or re.search(r"\bsite\.error$", called):
                return True
    return False


def units(tree):
    """The functions, and the constants of modules, each once."""
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.ClassDef):
            yield from units(node)
        elif isinstance(node, ast.FunctionDef | ast.Assign | ast.AnnAssign):
            yield node


def trees():
    return [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]


def messages():
    """The fragments of all messages of the code."""
    nodes = (node for tree in trees() for node in units(tree) if reports(node))
    return {each for node in nodes for text in templates(node) for each in fragments(text)}


def test_each_message_of_the_code_is_on_the_page():
    page = plain(PAGE.replace("**", ""))
    found = messages()
    assert len(found) > 60
    assert sorted(each for each in found if each not in page) == []


def test_each_message_of_the_page_is_in_the_code():

    code = plain(" … ".join(text for tree in trees() for text in templates(tree)))
    shown = re.findall(r"\*\*(.+?)\*\*(?=: |\.|:\n)", PAGE, re.DOTALL)
    assert len(shown) > 60
    assert sorted(f for each in shown for f in fragments(plain(each)) if f not in code) == []


def test_each_kind_has_a_section():
    assert set(re.findall(r"^### ([a-z_]+)$", PAGE, re.MULTILINE)) - {"gradcam"} == set(Kind)
