"""`plot_feature_maps`: what stands in the picture."""

import math

import numpy
import pytest
import torch

pytest.importorskip("matplotlib", reason="it draws")

from matplotlib.figure import Figure

from dropblock_hooks.plots import plot_feature_maps


def drawn(figure):
    (image,) = figure.axes[0].get_images()
    return image, [text.get_text() for text in figure.axes[0].texts]


def test_the_channels_are_spread_and_each_is_where_its_number_is():
    maps = torch.arange(1.0, 12.0).bfloat16()[:, None, None].expand(11, 6, 8).requires_grad_()
    figure = plot_feature_maps(maps.expand(2, 11, 6, 8), n=4, title="conv")
    assert isinstance(figure, Figure)
    image, numbers = drawn(figure)
    assert numbers == ["0", "3", "7", "10"]
    sheet = image.get_array()
    for text, number in zip(figure.axes[0].texts, numbers, strict=True):
        left, above = text.get_position()
        part = sheet[int(above) + 1 : int(above) + 7, int(left) : int(left) + 8]
        assert (numpy.asarray(part) == int(number) + 1).all()
    assert figure.axes[0].get_title() == "conv\n4 of 11 channels, 6 × 8"
    assert figure.axes[1].get_ylabel() == "activation"
    assert image.get_clim() == (1.0, 11.0)


def test_values_of_both_signs_have_colors_around_zero():
    maps = torch.zeros(2, 4, 4)
    maps[0, 0, 0], maps[1, 0, 0], maps[1, 1, 1] = -3.0, 1.0, math.nan
    image, numbers = drawn(plot_feature_maps(maps))
    assert numbers == ["0", "1"]
    assert image.get_clim() == (-3.0, 3.0)


def test_each_channel_on_its_own_scale():
    maps = torch.tensor([1.0, 100.0])[:, None, None].expand(2, 3, 3)
    image, _ = drawn(figure := plot_feature_maps(maps, own_scale=True))
    sheet = numpy.asarray(image.get_array())
    assert set(sheet[numpy.isfinite(sheet)]) == {1.0}
    assert figure.axes[1].get_ylabel() == "activation / largest of its channel"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.ones(4, 4), r"values must be a tensor \(C, H, W\) .*, got \(4, 4\)$"),
        ([1], "got list of 1"),
        (torch.full((1, 2, 2), math.nan), "finite numbers"),
        (torch.tensor([0, math.nan, 0]).view(3, 1, 1)[[1, 0, 1]], "no finite number"),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(ValueError, match=message):
        plot_feature_maps(values, n=1)
