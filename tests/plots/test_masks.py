"""The picture of what is dropped."""

import pytest
import torch
from torch import nn

from dropblock_hooks import ClampGrad, DropBlock2d, Dropout, Dropout2d, LinearSchedule, attach
from dropblock_hooks.plots import plot_masks

pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")


def net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3, padding=1)
    )


def titles(figure):
    return [ax.get_title() for ax in figure.axes if ax.get_title()]


@pytest.mark.parametrize("at", ["output", "input"])
def test_a_row_for_each_layer_and_the_share_of_all_its_channels(at):
    model, x = net(), torch.rand(2, 3, 32, 32)
    attached = attach(model, {"1": DropBlock2d(0.3, 5, at=at), "3": Dropout2d(0.5)})
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    figure = plot_masks(model, x, channels=3)
    figure.draw_without_rendering()
    found = titles(figure)
    assert found[:3] == ["channel 0", "channel 1", "channel 2"]
    shares = [float(title.split(": ")[1]) for title in found if title.startswith("dropped")]
    assert shares[0] == pytest.approx(0.3, abs=0.15)
    assert shares[1] in [pytest.approx(i / 6, abs=0.005) for i in range(1, 6)]  # of 6 channels
    assert all(site.calls == 0 for site in attached)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "layer", "size"),
    [
        ("swin_tiny_patch4_window7_224", "layers.1.blocks.0", "8x8"),
        ("vit_tiny_patch16_224", "blocks.0", "4x4"),
    ],
)
def test_maps_of_any_layout(name, layer, size):
    timm = pytest.importorskip("timm", reason="the model is timm's")
    model = timm.create_model(name, img_size=64)
    attach(model, {layer: Dropout(0.3)})
    figure = plot_masks(model, torch.rand(1, 3, 64, 64), channels=2)
    assert size in figure.axes[0].texts[0].get_text()


def test_what_is_dark_is_what_is_dropped():
    model, x = nn.Sequential(nn.Identity()), torch.ones(1, 3, 20, 20)
    attach(model, {"0": DropBlock2d(0.4, 5)})
    figure = plot_masks(model, x * torch.linspace(0, 1, 20), "0", channels=3)
    *shown, share = [ax.get_images()[0].get_array() for ax in figure.axes[:4]]
    grey = torch.linspace(0, 1, 20).expand(20, 20)
    dark = torch.stack([(torch.as_tensor(image.data) < 0.5 * grey)[:, 1:] for image in shown])
    assert torch.allclose(dark.float().mean(0), torch.as_tensor(share.data)[:, 1:])
    assert dark.any()


def test_a_mask_is_seen_on_black_pixels():
    model = nn.Sequential(nn.Identity())
    attach(model, {"0": DropBlock2d(0.4, 5)})
    figure = plot_masks(model, torch.eye(20).expand(1, 3, 20, 20), "0", channels=3)
    *shown, share = [torch.as_tensor(ax.get_images()[0].get_array().data) for ax in figure.axes[:4]]
    is_black = torch.eye(20) == 0
    dark = torch.stack([image < 0.2 for image in shown]).float().mean(0)
    assert torch.allclose(dark[is_black], share[is_black])


@pytest.mark.parametrize(
    "spec",
    [
        {"0": ClampGrad(-1, 1)},
        {"0": DropBlock2d(LinearSchedule(0.0, 0.1, 5), 3)},
        {"4": Dropout(0.5)},
    ],
    ids=["gradients", "a rate of 0", "no map"],
)
def test_where_there_is_nothing_to_draw(spec):
    model = nn.Sequential(*net(), nn.Flatten(), nn.Linear(6 * 16 * 16, 2))
    attach(model, spec)
    with pytest.raises(RuntimeError, match="nothing to draw"):
        plot_masks(model, torch.rand(1, 3, 32, 32))


def test_an_image_is_needed():
    model = nn.Sequential(nn.Identity())
    attach(model, {"0": Dropout(0.5)})
    with pytest.raises(ValueError, match="x must hold an image"):
        plot_masks(model, (torch.rand(4, 3), torch.rand(0, 3, 8, 8)))
    with pytest.raises(ValueError, match="image must have 1 or 3 channels"):
        plot_masks(model, torch.rand(1, 2, 8, 8))
