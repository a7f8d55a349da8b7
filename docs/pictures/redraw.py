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
        quantized = picture.quantize(colors, Image.Quantize.FASTOCTREE)
        made = as_png(quantized)
        if len(made) <= most:
            return made

    raise ValueError(f"with {colors} colors, the picture has {len(made)} bytes")


def as_png(picture: Image.Image) -> bytes:
    """The bytes of the file of a picture."""
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()


def thumbnail(png: bytes) -> bytes:
    """The picture in the middle of a transparent one, which has the shape of those of recipes."""
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    picture.thumbnail(THUMBNAIL)

    made = Image.new("RGBA", THUMBNAIL)
    left = (made.width - picture.width) // 2
    top = (made.height - picture.height) // 2
    made.paste(picture, (left, top))
    return as_png(made)


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
    outputs_of_cells = executed(notebook)
    last_picture = b""
    for number, cell in enumerate(code_cells):
        cell["execution_count"] = number + 1
        cell["outputs"] = outputs_of_cells[number]

        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                picture = base64.b64decode(data["image/png"])
                last_picture = small(picture, MOST_BYTES["notebooks"])
                data["image/png"] = base64.b64encode(last_picture).decode()

    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(f"{text}\n", encoding="utf-8")
    path.with_suffix(".png").write_bytes(thumbnail(last_picture))


def executed(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs of each code cell. The command that installs the package is left out.

    Raises:
        RuntimeError: if a cell writes to stderr, for example a warning.
    """
    import nbformat
    from nbclient import NotebookClient

    copied = nbformat.from_dict(notebook)
    for cell in copied.cells:
        lines = [line for line in cell.source if not line.startswith("%pip")]
        cell.source = "".join(lines)

    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(
            copied,
            timeout=600,
            kernel_name="python3",
            record_timing=False,  # no times in the metadata
            resources=resources,
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

        data = output.get("data", {})
        for kind, value in data.items():
            if kind.startswith("text/"):
                data[kind] = value.splitlines(True)
        kept.append(output)
    return kept


def main(names: list[str]) -> None:
    """Run the recipes and notebooks of these names, or all."""
    recipes = sorted((DOCS / "recipes").glob("*.py"))
    notebooks = sorted((DOCS / "notebooks").glob("*.ipynb"))
    for path in [*recipes, *notebooks]:
        if names and path.stem not in names:
            continue
        print(f"--- {path.name}", flush=True)
        if path.suffix == ".py":
            run_recipe(path)
        else:
            run_notebook(path)


if __name__ == "__main__":
    main(sys.argv[1:])
