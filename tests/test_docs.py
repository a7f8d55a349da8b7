"""The code of the pages runs: the blocks of a page in order, in one namespace.

What they print is what the page shows.
"""

import re
import sys
from pathlib import Path

import pytest

import dropblock_hooks

DOCS = Path(__file__).parents[1] / "docs"
GUIDE = DOCS / "guide"
PAGES = [
    *(DOCS / f"{name}.md" for name in ("observers", "retune", "specs", "SKILL")),
    *(page for page in sorted(GUIDE.glob("*.md")) if "```python" in page.read_text("utf-8")),
    *sorted((DOCS / "trainers").glob("*.md")),
]
# to compile, to train for longer, or to import libraries that the extra "test" lacks
SLOW = ("stacks", "observers", "fastai", "ignite", "peft", "skorch", "ultralytics")

# what trainers say of a tiny run, and libraries of their own insides
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "The '.*_dataloader' does not have many workers",
        "The number of training batches",
        "Starting from v1.9.0",
        "Checkpoint directory .* exists",
        "`isinstance.treespec, LeafSpec.` is deprecated",
        "GPU available but not used",
        "`torch.jit.* is deprecated",
        "`is_gradient_checkpointing` is deprecated",
    )
]


def blocks(page):
    """The Python of a page, each block at its own lines, as tracebacks show it.

    Blocks that begin with the name of a file are not part of it: the page imports that file.
    """
    text = page.read_text(encoding="utf-8")
    python = r"^```python\n(?!# \w+\.py\n)(.*?)^```"
    for found in re.finditer(python, text, re.DOTALL | re.MULTILINE):
        yield "\n" * text.count("\n", 0, found.start(1)) + found[1]


def save_files(page, folder):
    """Write the blocks whose first line names a file, such as ``# spec.yaml``."""
    named = r"^```\w+\n# (\w+)\.(\w+)\n(.*?)^```"
    for stem, ending, text in re.findall(named, page.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        (folder / f"{stem}.{ending}").write_text(text, "utf-8")
        sys.modules.pop(stem, None)  # of an earlier run


def wordings(text):
    """A text without what differs between machines: numbers, and how wide they are."""
    return re.sub(r"[ -]+", " ", re.sub(r"-?\d+(\.\d+)?(e[-+]\d+)?", "0", text))


def marked(page):
    """A case of the test below."""
    marks = [pytest.mark.slow] if page.stem in SLOW else []
    return pytest.param(page, marks=marks, id=page.stem)


@pytest.mark.parametrize("page", list(map(marked, PAGES)))
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys, own_registry):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    save_files(page, tmp_path)
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("YOLO_OFFLINE", "1")
    code = list(blocks(page))
    assert code
    for library in re.findall(
        r"^(?:from|import) (?:torch\.utils\.(?=tensorboard))?(\w+)", "".join(code), re.MULTILINE
    ):
        pytest.importorskip(library, reason="the page is about it")
    names: dict[str, object] = {"__name__": f"docs.{page.stem}"}
    for block in code:
        exec(compile(block, page, "exec"), names)
    printed = wordings(capsys.readouterr().out)
    for text in re.findall(r"^```text\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M):
        assert wordings(text) in printed


def test_the_schedules_have_the_values_of_the_table():
    text = (GUIDE / "schedules.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.*?)` \| (0\.[\d., ]+) \|$", text, re.MULTILINE)
    assert len(rows) == 5
    for schedule, values in rows:
        value = eval(schedule, vars(dropblock_hooks).copy())
        assert [round(value(epoch), 3) for epoch in range(5)] == eval(f"[{values}]")


PACKAGE = Path(dropblock_hooks.__file__).parent


def test_the_links_of_the_pages_exist():
    for page in [*DOCS.rglob("*.md"), DOCS.parent / "CONTRIBUTING.md"]:
        for path in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text(encoding="utf-8")):
            installed = PACKAGE.parent / path.removeprefix("../")  # which may be elsewhere
            assert (page.parent / path).exists() or installed.exists(), f"{page.name}: {path}"


def test_llms_txt_lists_every_page_with_a_line():
    text = (DOCS / "llms.txt").read_text(encoding="utf-8")
    assert re.match(r"# [\w-]+\n\n> \S", text)
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\): \S", text, re.MULTILINE)
    assert len(listed) == len(set(listed)) == text.count("\n- ")
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert set(listed) == pages
