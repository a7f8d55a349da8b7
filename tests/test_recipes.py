"""The recipes of the documentation run, each as its user runs it, and are short."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.py"))
NEEDS = {
    **dict.fromkeys((path.stem for path in RECIPES), ("matplotlib", "sklearn")),
    **dict.fromkeys(
        ("feature_maps", "first_nan", "gradcam", "masks"), ("timm", "matplotlib", "sklearn")
    ),
    "in_tensorboard": ("tensorboard", "matplotlib", "sklearn"),
}
by_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def run(path, folder, monkeypatch):
    """The script in a folder of its own, for one epoch if it takes a number."""
    for package in NEEDS.get(path.stem, ()):
        pytest.importorskip(package)
    monkeypatch.setattr(sys, "argv", [str(path), str(folder), "1"])
    monkeypatch.chdir(folder)
    runpy.run_path(str(path), run_name="__main__")


def check_pictures(path, folder):
    """The recipe has made the pictures that are committed beside it, of their size."""
    image = pytest.importorskip("PIL.Image")
    committed = [p for p in path.parent.glob("*.png") if p.stem.partition("-")[0] == path.stem]
    assert committed
    for picture in committed:
        with image.open(folder / picture.name) as made, image.open(picture) as there:
            assert made.size == there.size
            low, high = made.convert("L").getextrema()
            assert high - low > 100


@by_recipe
def test_a_recipe_begins_with_its_text_and_its_picture_is_small(path):
    assert path.read_text(encoding="utf-8").startswith('"""')
    for picture in path.parent.glob(f"{path.stem}*.png"):
        assert picture.stat().st_size < 60_000


@by_recipe
def test_a_recipe_runs(path, tmp_path, monkeypatch, capsys):
    run(path, tmp_path, monkeypatch)
    assert capsys.readouterr().out
    check_pictures(path, tmp_path)
