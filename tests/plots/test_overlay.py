"""The picture of a map over its image."""

import sys

import pytest
import torch

from dropblock_hooks import CAM
from dropblock_hooks.plots import overlay

MAP = torch.tensor([[0.0, 0.25], [0.5, 1.0]])
IMAGE = torch.rand(3, 8, 12)


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.parametrize(
    "image",
    [IMAGE, IMAGE.movedim(0, -1), IMAGE[:1], IMAGE[0], IMAGE.numpy(), IMAGE.double() * 9 - 4],
    ids=["CHW", "HWC", "1HW", "HW", "numpy", "normalized"],
)
def test_a_map_lies_over_its_image(image):
    figure = overlay(MAP, image)
    ax, bar = figure.axes
    below, above = ax.get_images()
    assert below.get_array().shape[:2] == (8, 12)
    assert (below.get_array().min(), below.get_array().max()) == (0, 1)
    assert above.get_array().tolist() == MAP.tolist()
    assert above.get_extent() == below.get_extent()
    assert ax.get_title() == "Grad-CAM"
    assert bar.get_ylabel() == "value of the map"
    assert above.get_clim() == (0, 1)
    figure.draw_without_rendering()


@pytest.mark.parametrize(
    ("cam_map", "image", "message"),
    [
        (MAP[None], IMAGE, r"cam_map must be one map .* as cam.maps\[0\], .*, got \(1, 2, 2\)"),
        (MAP, torch.rand(4, 8, 8), "image must have 1 or 3 channels"),
        (CAM(MAP[None], MAP[None], None), IMAGE, "cam_map must be .*, got CAM of 3"),
        (torch.full((3, 4), torch.nan), IMAGE, "cam_map must be .* of finite numbers"),
    ],
    ids=["maps", "channels", "CAM", "NaN"],
)
def test_bad_input(cam_map, image, message):
    with pytest.raises(ValueError, match=message):
        overlay(cam_map, image)


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'dropblock-hooks\[plot\]'"):
        overlay(MAP, IMAGE)
