"""The code of the pages runs: the blocks of a page in order, in one namespace.

What they print is what the page shows.
"""

import ast
import inspect
import itertools
import re
import sys
from pathlib import Path

import pytest
import torch

import dropblock_hooks
from tests.classes import own_classes

DOCS = Path(__file__).parents[1] / "docs"
GUIDE = DOCS / "guide"
PAGES = [
    *(DOCS / f"{name}.md" for name in ("observers", "retune", "specs", "SKILL")),
    *(page for page in sorted(GUIDE.glob("*.md")) if "```python" in page.read_text("utf-8")),
    *sorted((DOCS / "trainers").glob("*.md")),
]
# to compile, to train for longer, or to import libraries that the extra "test" lacks
SLOW = (
    *("examples", "fastai", "gradients", "ignite", "observers", "peft"),
    *("skorch", "stacks", "tasks", "timm", "ultralytics"),
)

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
    monkeypatch.setenv("COLUMNS", "104")
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


def unseparated(code):
    """The lines that follow an indented block without an empty line.

    At the prompt of Python, an empty line ends the block. Without it, the next line is an error.
    """
    lines = code.splitlines()
    found = []
    for statement, following in itertools.pairwise(ast.parse(code).body):
        decorators = getattr(following, "decorator_list", [])
        first_line = min(node.lineno for node in [following, *decorators])
        between = lines[statement.end_lineno : first_line - 1]
        if hasattr(statement, "body") and all(between):
            found.append(lines[first_line - 1])
    return found


def test_a_line_after_a_block_without_an_empty_line_is_found():
    code = "for i in range(2):\n    print(i)\nprint(2)\n"
    assert unseparated(code) == ["print(2)"]
    assert unseparated(code.replace("\nprint", "\n# then\nprint")) == ["print(2)"]
    assert unseparated(code.replace("\nprint", "\nelse:\n    pass\n\nprint")) == []


def test_the_code_of_the_pages_can_be_pasted_at_a_prompt():
    pages = [*DOCS.rglob("*.md"), DOCS.parent / "README.md", DOCS.parent / "experiments/README.md"]
    found = {}
    for page in pages:
        for code in re.findall(
            r"^```python[^\n]*\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
        ):
            lines = unseparated(code)
            if lines:
                found[page.name] = lines
    assert found == {}


def test_the_schedules_have_the_values_of_the_table():
    text = (GUIDE / "schedules.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.*?)` \| (0\.[\d., ]+) \|$", text, re.MULTILINE)
    named = {schedule.partition("(")[0] for schedule, _ in rows}
    without_a_row = {"ByDepth", "ConstantSchedule"}  # which have one value in all epochs
    missing = own_classes(dropblock_hooks.Schedule).keys() - named - without_a_row
    assert not missing, f"add rows to the table in docs/guide/schedules.md: {missing}"
    for schedule, values in rows:
        value = eval(schedule, vars(dropblock_hooks).copy())
        assert [round(value(epoch), 3) for epoch in range(5)] == eval(f"[{values}]")


def test_the_first_arguments_of_other_libraries_are_those_of_the_page():
    ops = pytest.importorskip("torchvision.ops", reason="the page is about it")
    layers = pytest.importorskip("timm.layers", reason="the page is about it")
    text = (GUIDE / "migrating.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| rate \| `(\w+)` \| `(\w+)` \| `(\w+)` \|", text, re.MULTILINE)
    classes = [dropblock_hooks.DropBlock2d, layers.DropBlock2d, ops.DropBlock2d]
    functions = [
        dropblock_hooks.functional.drop_block2d,
        layers.drop_block_2d,
        ops.drop_block2d,
    ]
    for rate, cls, function in zip(row, classes, functions, strict=True):
        assert list(inspect.signature(cls).parameters)[:2] == [rate, "block_size"]
        assert list(inspect.signature(function).parameters)[1:3] == [rate, "block_size"]
    assert row[0] == row[2]
    assert "Our class has the same name and the same first two arguments" in text


def clipped_training(by_hook, unscales):
    """The weights after a training in which all gradients are clipped by their common norm."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    clip = {"param:**": dropblock_hooks.ClipGradNorm(0.05, group=True)}
    if by_hook:
        dropblock_hooks.attach(model, clip, optimizer=optimizer, grad_scaler=scaler)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(6, 8)).square().mean()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        if not by_hook:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("unscales", [True, False], ids=["with unscale_", "without unscale_"])
def test_clip_grad_norm_is_replaced_as_the_page_says(unscales):
    weights = clipped_training(by_hook=True, unscales=unscales)
    torch.testing.assert_close(weights, clipped_training(by_hook=False, unscales=True))


PACKAGE = Path(dropblock_hooks.__file__).parent


def test_the_links_of_the_pages_exist():
    for page in [*DOCS.rglob("*.md"), DOCS.parent / "CONTRIBUTING.md"]:
        for path in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text(encoding="utf-8")):
            installed = PACKAGE.parent / path.removeprefix("../")  # which may be elsewhere
            assert (page.parent / path).exists() or installed.exists(), f"{page.name}: {path}"


def test_no_line_of_a_paragraph_begins_with_a_comment():
    """In CommonMark, Markdown in the rest of such a line is shown as it is."""
    root = DOCS.parent
    for page in [*DOCS.rglob("*.md"), root / "README.md", root / "experiments/README.md"]:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"^(?:\s*[-*] )?<!--.*?-->[ \t]*\S.*", text, re.MULTILINE), page


def test_llms_txt_lists_every_page_with_a_line():
    text = (DOCS / "llms.txt").read_text(encoding="utf-8")
    assert re.match(r"# [\w-]+\n\n> \S", text)
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\): \S", text, re.MULTILINE)
    assert len(listed) == len(set(listed)) == text.count("\n- ")
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert set(listed) == pages
