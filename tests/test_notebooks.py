"""The notebooks run, are stored without outputs, and open in Colab."""

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


@each_notebook
def test_a_notebook_is_stored_without_outputs(path):
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


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
