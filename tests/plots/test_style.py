"""The style of the documentation's pictures reads on light and on dark pages; a user's own wins."""

import pytest
import torch
from torch import nn

from dropblock_hooks import ActivationStats, ClipGradNorm, Dropout, GradientStats, attach, plots

matplotlib = pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")
from matplotlib import style  # noqa: E402
from matplotlib.colors import to_rgb  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.text import Text  # noqa: E402

STYLE = "dropblock_hooks.plots.light_and_dark"


@pytest.fixture
def in_style():
    with style.context(STYLE):
        yield matplotlib.rcParams


def luminance(color):
    """The relative luminance of WCAG 2."""
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return sum(w * part for w, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def contrast(color, page):
    low, high = sorted([luminance(color), luminance(page)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", ["#ffffff", "#1e2129", "#000000"], ids=["white", "slate", "black"])
def test_text_and_lines_stand_out_from_the_page(page, in_style):
    for name in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color"):
        assert contrast(in_style[name], page) > 3.8, name
    colors = in_style["axes.prop_cycle"].by_key()["color"]
    assert len(colors) == len(set(colors)) == 10
    assert {color: contrast(color, page) for color in colors if contrast(color, page) < 2.9} == {}


def test_a_picture_is_transparent_and_has_two_dots_for_each_pixel(in_style, tmp_path):
    image = pytest.importorskip("PIL.Image")
    figure = Figure()
    figure.subplots().plot([1, 2])
    figure.savefig(tmp_path / "picture.png")
    with image.open(tmp_path / "picture.png") as made:
        assert made.size == (1600, 680)
        assert made.getchannel("A").getextrema() == (0, 255)


def pictures():
    """Every function that needs an attachment, with its picture."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    spec = {"0": [ActivationStats(), GradientStats()], "1": Dropout(0.5), "3": ClipGradNorm(1.0)}
    attached = attach(model, spec)
    x = torch.rand(2, 1, 8, 8)
    model(x).square().mean().backward()
    yield "gradients", plots.plot_gradient_flow(attached)
    yield "activations", plots.plot_activations(attached)
    yield "run", plots.plot_run(attached)
    yield "masks", plots.plot_masks(model, x)
    yield "maps", plots.plot_feature_maps(x)
    yield "overlay", plots.overlay(x[0, 0], x[0])


@pytest.mark.slow
def test_fonts_and_colors_are_those_of_the_users_style():
    names = "text.color", "axes.labelcolor", "xtick.color", "ytick.color"
    with matplotlib.rc_context({"font.size": 10}):
        usual = {name: fonts(figure)[0] for name, figure in pictures()}
    with matplotlib.rc_context({"font.size": 11, **dict.fromkeys(names, "#00ff00")}):
        for name, figure in pictures():
            sizes, colors = fonts(figure)
            assert colors == {"#00ff00"}, name
            assert sorted(sizes) == pytest.approx([1.1 * size for size in sorted(usual[name])]), (
                name
            )


def fonts(figure):
    """The sizes and the colors of the texts of a picture."""
    figure.draw_without_rendering()
    shown = [each for each in figure.findobj(Text) if each.get_visible() and each.get_text()]
    return {each.get_fontsize() for each in shown}, {each.get_color() for each in shown}


@pytest.mark.parametrize("layout", ["constrained", "none"])
def test_a_legend_covers_no_values_where_there_is_room_beside_them(layout):
    attached = attach(nn.Sequential(nn.Linear(2, 2)), {"0": GradientStats()})
    attached._base(torch.ones(1, 2)).sum().backward()
    figure = Figure(figsize=(8, 3), layout=layout)
    ax = figure.subplots()
    plots.plot_gradient_flow(attached, ax)
    figure.draw_without_rendering()
    legend = ax.get_legend().get_window_extent()
    is_beside = legend.x0 >= ax.get_window_extent().x1
    assert is_beside == (layout == "constrained")
    assert legend.x1 <= figure.bbox.x1
