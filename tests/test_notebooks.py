"""The notebooks run, are stored with their outputs, and open in Colab."""

import base64
import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path, kind):
    """The texts of the cells of a kind, ``"code"`` or ``"markdown"``."""
    found = json.loads(path.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def outputs(path):
    """All outputs of a notebook."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [output for cell in cells for output in cell.get("outputs", ())]


@each_notebook
def test_each_cell_of_a_notebook_was_run_in_order(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code_cells = [cell for cell in cells if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code_cells]
    assert counts == list(range(1, len(code_cells) + 1)), "run docs/pictures/redraw.py"
    for cell in code_cells:
        shows = re.search(r"\bprint\(|^[\w.]+(?:\(.*\))?\Z", "".join(cell["source"]), re.MULTILINE)
        is_setup = cell is code_cells[0]
        assert bool(cell["outputs"]) or is_setup or not shows, cell["id"]


@each_notebook
def test_the_outputs_are_prints_and_results(path):
    kinds = {output["output_type"] for output in outputs(path)}
    assert kinds == {"stream", "execute_result"}
    assert {output.get("name", "stdout") for output in outputs(path)} == {"stdout"}  # no warning


@each_notebook
def test_a_notebook_has_small_pictures_and_a_thumbnail(path):
    data = [output["data"] for output in outputs(path) if "data" in output]
    pictures = [base64.b64decode(each["image/png"]) for each in data if "image/png" in each]
    assert pictures
    thumbnail = path.with_suffix(".png").read_bytes()
    assert all(len(picture) <= 100_000 for picture in [*pictures, thumbnail])
    image = pytest.importorskip("PIL.Image")
    with image.open(path.with_suffix(".png")) as there:
        assert there.size == (800, 340)


@each_notebook
def test_a_notebook_tells_nothing_about_where_it_was_run(path):
    notebook = json.loads(path.read_text("utf-8"))
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert [cell["metadata"] for cell in notebook["cells"]] == [{}] * len(notebook["cells"])
    texts = [text for output in outputs(path) for text in output.get("text", ())]
    for output in outputs(path):
        texts += output.get("data", {}).get("text/plain", [])
        texts += output.get("data", {}).get("text/html", [])
    assert not re.search(r"(?<![\w/])/(?:\w+/)+\w+|[A-Z]:\\|0x[0-9a-f]{6}|Warning", "".join(texts))


def test_no_notebook_has_the_title_of_a_page():
    titles = [cells(path, "markdown")[0].splitlines()[0] for path in NOTEBOOKS]
    pages = NOTEBOOKS[0].parents[1].rglob("*.md")
    titles += [page.read_text("utf-8").splitlines()[0] for page in pages]
    assert [title for title in titles if title.startswith("# ") and titles.count(title) > 1] == []


@each_notebook
def test_a_notebook_installs_the_package_and_opens_in_colab(path):
    assert cells(path, "code")[0].startswith('%pip install -q "dropblock-hooks')
    assert f"blob/main/docs/notebooks/{path.name})" in cells(path, "markdown")[0]


@pytest.mark.slow
@each_notebook
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    code_cells = cells(path, "code")[1:]
    for library in re.findall(r"^(?:from|import) (\w+)", "\n".join(code_cells), re.MULTILINE):
        pytest.importorskip(library, reason="the notebook uses it")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, code in enumerate(code_cells, 1):
        exec(compile(code, f"{path.name}, cell {number}", "exec"), names)
