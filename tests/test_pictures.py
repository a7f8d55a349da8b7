"""The scripts of docs/pictures run, and make the pictures that are committed."""

import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
NEEDS = {"hero": ("timm", "torchvision", "matplotlib", "sklearn"), "terminal": ("timm",)}
FEWER = {"hero": ("160_000 // size**2", "16_000 // size**2")}
"""What a script measures, and as much of it as gives curves that look the same."""
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("hero", "terminal")]
scripts = pytest.mark.parametrize("name", ["diagram", *SLOW])


def wordings(text):
    """A text without measured numbers, which differ between machines."""
    return re.sub(r"-{3,}| +|\d*\.\d+", " ", text)


def text_of(name):
    """The script, which measures fewer samples where this shows no difference."""
    text = (PICTURES / f"{name}.py").read_text(encoding="utf-8")
    if name not in FEWER:
        return text
    before, after = FEWER[name]
    assert text.count(before) == 1
    return text.replace(before, after)


@scripts
def test_a_script_makes_the_committed_picture(name, tmp_path):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package, reason="the picture shows it")
    command = [sys.executable, "-c", text_of(name), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PICTURES)
    assert done.returncode == 0, done.stderr
    assert done.stdout

    made = sorted(tmp_path.iterdir())
    committed = sorted(PICTURES.glob(f"{name}*.svg")) + sorted(PICTURES.glob(f"{name}*.png"))
    assert [path.name for path in made] == [path.name for path in committed]
    for path in made:
        if path.suffix == ".svg":
            before = (PICTURES / path.name).read_text(encoding="utf-8")
            assert wordings(path.read_text(encoding="utf-8")) == wordings(before)
        else:
            check_image(path, PICTURES / path.name)


def check_image(made, committed):
    """The pictures have the same size, are transparent, and differ by little."""
    image = pytest.importorskip("PIL.Image")
    with image.open(made) as new, image.open(committed) as old:
        assert new.size == old.size == (2800, 1120)
        assert old.mode == "RGBA"
        assert old.getchannel("A").getextrema() == (0, 255)
        small = [picture.resize((70, 28)).convert("L").tobytes() for picture in (new, old)]
    differences = [abs(a - b) for a, b in zip(*small, strict=True)]
    assert sum(differences) / len(differences) < 5


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*.[ps][nv]g")), ids=lambda path: path.name)
def test_a_picture_is_small(path):
    assert path.stat().st_size < 300_000


def test_the_terminal_shows_the_whole_story_in_twelve_seconds():
    text = (PICTURES / "terminal.svg").read_text(encoding="utf-8")
    assert "12s" in text
    for part in ("dropblock-hooks plan", "realized", "Call model.train() before training."):
        assert part in text


@pytest.fixture
def redraw():
    """The script that runs recipes and notebooks, and a picture of many colors."""
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.effect_noise((400, 300), 80).convert("RGBA").save(file, "PNG")
    return runpy.run_path(str(PICTURES / "redraw.py")), file.getvalue()


def test_a_large_picture_gets_fewer_colors(redraw):
    script, picture = redraw
    image = pytest.importorskip("PIL.Image")
    small = script["small"]
    assert small(picture, len(picture)) == picture
    made = small(picture, 100_000)
    assert len(made) <= 100_000 < len(picture)
    with image.open(io.BytesIO(made)) as there:
        assert there.size == (400, 300)
    with pytest.raises(ValueError, match="64 colors"):
        small(picture, 1_000)


def test_a_thumbnail_has_the_shape_of_a_recipes_picture(redraw):
    script, picture = redraw
    image = pytest.importorskip("PIL.Image")
    with image.open(io.BytesIO(script["thumbnail"](picture))) as made:
        assert made.size == (800, 340)
        assert made.getchannel("A").getbbox() == (200, 20, 600, 320)  # in the middle


def test_the_outputs_of_a_cell_are_joined_and_warnings_are_errors(redraw):
    tidied = redraw[0]["tidied"]

    def printed(text, name="stdout"):
        return {"output_type": "stream", "name": name, "text": text}

    (made,) = tidied([printed("a\nb\n"), printed("c")])
    assert made == printed(["a\n", "b\n", "c"])
    with pytest.raises(RuntimeError, match="UserWarning: x"):
        tidied([printed("UserWarning: x", "stderr")])
