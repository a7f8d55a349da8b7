"""Run the recipes and the notebooks, and store what they show: pictures, and the outputs of cells.

    pip install -e '.[timm,plot]' --group notebooks
    python docs/pictures/redraw.py [names, such as masks or nan; without, all]

A notebook also gets a thumbnail, its last picture.
"""

import base64
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

DOCS = Path(__file__).parents[1]
MOST_BYTES = {"recipes": 150_000, "notebooks": 100_000}  # of a picture
COLORS = (256, 128, 64)
THUMBNAIL = (800, 340)
WIDTH = {"COLUMNS": "100"}  # of tables, in columns


def small(png: bytes, most: int) -> bytes:
    """The picture with as many colors as fit into so many bytes.

    Raises:
        ValueError: if the smallest number of colors is not enough.
    """
    if len(png) <= most:
        return png
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    for colors in COLORS:
        file = io.BytesIO()
        quantized = picture.quantize(colors, Image.Quantize.FASTOCTREE)
        quantized.save(file, "PNG", optimize=True)
        if file.tell() <= most:
            return file.getvalue()
    raise ValueError(f"with {colors} colors, the picture has {file.tell()} bytes")


def thumbnail(png: bytes) -> bytes:
    """The picture in the middle of a transparent one, which has the shape of those of recipes."""
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    picture.thumbnail(THUMBNAIL)
    made = Image.new("RGBA", THUMBNAIL)
    left, top = ((a - b) // 2 for a, b in zip(THUMBNAIL, picture.size, strict=True))
    made.paste(picture, (left, top))
    file = io.BytesIO()
    made.save(file, "PNG", optimize=True)
    return file.getvalue()


def run_recipe(path: Path) -> None:
    """Run a recipe, and store its pictures beside it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "error", str(path), folder]
        subprocess.run(command, check=True, env=os.environ | WIDTH)
        for made in Path(folder).glob("*.png"):
            picture = small(made.read_bytes(), MOST_BYTES["recipes"])
            path.with_name(made.name).write_bytes(picture)


def run_notebook(path: Path) -> None:
    """Run a notebook, and store its outputs in it."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code_cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    pictures = []
    for number, (cell, outputs) in enumerate(zip(code_cells, executed(notebook), strict=True), 1):
        cell["execution_count"] = number
        cell["outputs"] = outputs
        for output in outputs:
            data = output.get("data", {})
            if "image/png" in data:
                picture = small(base64.b64decode(data["image/png"]), MOST_BYTES["notebooks"])
                pictures.append(picture)
                data["image/png"] = base64.b64encode(picture).decode()

    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(f"{text}\n", encoding="utf-8")
    path.with_suffix(".png").write_bytes(thumbnail(pictures[-1]))


def executed(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs of each code cell. The command that installs the package is left out.

    Raises:
        RuntimeError: if a cell writes to stderr, for example a warning.
    """
    import nbformat
    from nbclient import NotebookClient

    copied = nbformat.from_dict(notebook)
    for cell in copied.cells:
        lines = cell.source if isinstance(cell.source, list) else cell.source.splitlines(True)
        cell.source = "".join(line for line in lines if not line.startswith("%pip"))
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(
            copied, timeout=600, kernel_name="python3", record_timing=False, resources=resources
        )
        client.execute(env=os.environ | WIDTH)
    return [tidied(cell.outputs) for cell in copied.cells if cell.cell_type == "code"]


def tidied(outputs: list[Any]) -> list[dict[str, Any]]:
    """The outputs of a cell with all that was printed in one, and text as lists of lines."""
    kept: list[dict[str, Any]] = []
    for output in outputs:
        if output.get("name") == "stderr":
            raise RuntimeError(output["text"])
        if output["output_type"] == "stream":
            output["text"] = output["text"].splitlines(True)
            if kept and kept[-1]["output_type"] == "stream":
                kept[-1]["text"] += output["text"]
                continue
        for kind, value in output.get("data", {}).items():
            if kind.startswith("text/"):
                output["data"][kind] = value.splitlines(True)
        kept.append(output)
    return kept


if __name__ == "__main__":
    for folder, ending, run in (
        ("recipes", "py", run_recipe),
        ("notebooks", "ipynb", run_notebook),
    ):
        for path in sorted((DOCS / folder).glob(f"*.{ending}")):
            if path.stem in (sys.argv[1:] or [path.stem]):
                print(f"--- {path.name}", flush=True)
                run(path)
