"""The recipes of the documentation run, each as its user runs it, and are short."""

import math
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.cases import rest_slow

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.py"))
FOLDER = RECIPES[0].parent
NEEDS = {
    **dict.fromkeys((path.stem for path in RECIPES), ("matplotlib", "sklearn")),
    "early_late_dropout": ("timm", "matplotlib"),
    **dict.fromkeys(
        ("feature_maps", "first_nan", "gradcam", "masks"), ("timm", "matplotlib", "sklearn")
    ),
    "in_tensorboard": ("tensorboard", "matplotlib", "sklearn"),
}
SAMPLES = {"feature_maps": 200, "gradcam": 600}
"""How many samples of an epoch the recipes that train a ResNet use here."""
by_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def run(path, folder, monkeypatch, epochs=1):
    """Run a script in a folder of its own, for so many epochs if it takes a number.

    Return its variables.
    """
    for package in NEEDS.get(path.stem, ()):
        pytest.importorskip(package)
    matplotlib = pytest.importorskip("matplotlib")
    if path.stem in SAMPLES:
        in_any_order = torch.randperm
        monkeypatch.setattr(torch, "randperm", lambda n: in_any_order(n)[: SAMPLES[path.stem]])
    monkeypatch.setattr(sys, "argv", [str(path), str(folder), str(epochs)])
    monkeypatch.chdir(folder)
    with matplotlib.rc_context():  # a recipe chooses a style
        return runpy.run_path(str(path), run_name="__main__")


def check_pictures(path, folder):
    """The recipe has made the pictures that are committed beside it, of their size."""
    image = pytest.importorskip("PIL.Image")
    committed = [p for p in path.parent.glob("*.png") if p.stem.partition("-")[0] == path.stem]
    assert committed
    for picture in committed:
        with image.open(folder / picture.name) as made, image.open(picture) as there:
            assert made.size == there.size
            assert 1590 <= there.width <= 1610  # 800 pixels, at double resolution
            for of_one in (made.convert("RGBA"), there.convert("RGBA")):
                assert of_one.getchannel("A").getextrema() == (0, 255)
                low, high = of_one.convert("L").getextrema()
                assert high - low > 100


@by_recipe
def test_a_recipe_begins_with_its_text_and_its_picture_is_small(path):
    assert path.read_text(encoding="utf-8").startswith('"""')
    for picture in path.parent.glob(f"{path.stem}*.png"):
        assert picture.stat().st_size <= 150_000


QUICK = ("border", "first_nan", "overfitting")


@pytest.mark.parametrize(
    "path",
    rest_slow(RECIPES, [path for path in RECIPES if path.stem in QUICK]),
    ids=lambda path: path.stem,
)
def test_a_recipe_runs(path, tmp_path, monkeypatch, capsys):
    run(path, tmp_path, monkeypatch)
    assert capsys.readouterr().out
    check_pictures(path, tmp_path)


def test_the_factors_of_gradient_reversal_are_those_of_dann(tmp_path, monkeypatch):
    path = FOLDER / "gradient_reversal.py"
    factor = run(path, tmp_path, monkeypatch, epochs=4)["reversed_scale"]
    for update in range(5):
        progress = update / 4
        assert factor(update) == pytest.approx(-math.tanh(5 * progress))  # the same function


def test_the_rates_of_curriculum_dropout_are_those_of_the_paper(tmp_path, monkeypatch):
    path = FOLDER / "curriculum_dropout.py"
    rate = run(path, tmp_path, monkeypatch, epochs=2)["curriculum"]
    assert rate(0) == 0.0
    assert rate(0.2) == pytest.approx(0.5 * (1 - 1 / math.e))  # a tenth of the training
    assert rate(2) == pytest.approx(0.5, abs=1e-4)


def test_the_rates_of_early_and_late_dropout_are_those_of_the_paper(tmp_path, monkeypatch):
    found = run(FOLDER / "early_late_dropout.py", tmp_path, monkeypatch)
    early = found["EARLY"]
    assert [early(epoch) for epoch in (0, 25, 50, 299)] == pytest.approx([0.1, 0.05, 0.0, 0.0])
    early_depth = found["EARLY_DEPTH"]
    assert [early_depth(epoch) for epoch in (0, 25, 50)] == pytest.approx([0.5, 0.25, 0.0])
    late_depth = found["LATE_DEPTH"]
    assert [late_depth(epoch) for epoch in (0, 49, 50, 299)] == [0.0, 0.0, 0.4, 0.4]


@pytest.mark.slow
def test_gradual_unfreezing_moves_one_layer_more_in_each_epoch(tmp_path, monkeypatch):
    found = run(FOLDER / "gradual_unfreezing.py", tmp_path, monkeypatch, epochs=2)
    moved = [[update > 0 for update in updates] for updates in found["updates"]]
    assert moved == [[False, False, False, True], [False, False, True, True]]

    before = found["model"].state_dict()
    after = found["tuned"].state_dict()
    for layer, stays in {"0.1": True, "1.1": True, "2.1": False}.items():
        name = f"{layer}.running_mean"
        assert before[name].equal(after[name]) == stays, name


def test_each_parameter_has_its_bound(tmp_path, monkeypatch):
    found = run(FOLDER / "bounds_by_parameter.py", tmp_path, monkeypatch)
    rates = {name.partition("/")[0]: values for name, values in found["attached"].rates.items()}
    biases = {"min": -0.1, "max": 0.1}
    assert rates == {
        "rnn.weight_hh_l0": {"max_norm": 0.5},
        "head.weight": {"max_norm": 5.0},
        "rnn.bias_ih_l0": biases,
        "rnn.bias_hh_l0": biases,
        "head.bias": biases,
    }


def test_the_noise_of_a_router_has_the_variance_of_the_switch_transformer(tmp_path, monkeypatch):
    specs = run(FOLDER / "router_noise.py", tmp_path, monkeypatch)["specs"]
    p = specs["as Switch"]["router"].p
    assert p / (1 - p) == pytest.approx(0.01**2 / 3)  # of a uniform number in [1 - eps, 1 + eps]
