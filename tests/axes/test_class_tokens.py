"""Class tokens by the names that models give them: they stay, and the map behind them is found."""

import pytest
import torch
from torch import nn

from dropblock_hooks import DropBlock2d, SiteError, attach, gradcam

NAMES = [
    *("cls_token", "class_token", "reg_token", "register_tokens", "dist_token"),
    *("distillation_token", "class_embedding", "cls_register_token"),
]


class Tokens(nn.Module):
    """A ViT whose class token has a given name, and one axis or three."""

    def __init__(self, name, axes):
        super().__init__()
        self.patch_size, self.name = 2, name
        self.conv = nn.Conv2d(3, 8, 2, stride=2)
        self.register_parameter(name, nn.Parameter(torch.randn((1, 1, 8)[-axes:])))
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2)
        token = getattr(self, self.name).expand(len(x), 1, -1)
        return self.block(torch.cat([token, x], 1))


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_token_of_this_name_is_in_front_of_the_map(name, axes):
    torch.manual_seed(0)
    model, x = Tokens(name, axes), torch.randn(2, 3, 8, 12)
    bare = model(x)
    with attach(model, {"block": DropBlock2d(1.0, 3)}) as attached:
        y = model(x)
        assert attached.sites[0].map_size == (4, 6)
    assert torch.equal(y[:, 0], bare[:, 0])
    assert not y[:, 1:].any()


def vision(name, **config):
    transformers = pytest.importorskip("transformers", reason="the model is theirs")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 8, **config}
    torch.manual_seed(0)
    return getattr(transformers, f"{name}VisionModel")(
        getattr(transformers, f"{name}VisionConfig")(**sizes)
    )


@pytest.mark.parametrize("name", ["CLIP", "Blip", "MetaClip2"])
def test_vision_models_of_language_families(name):
    model, x = vision(name).train(), torch.randn(2, 3, 32, 32)
    layers = next(key for key, layer in model.named_modules() if isinstance(layer, nn.ModuleList))
    with attach(model, {f"{layers}.1": DropBlock2d(0.3, 2)}) as attached:
        model(pixel_values=x).last_hidden_state.sum().backward()
        assert attached.sites[0].map_size == (4, 4)
        assert attached.verify() == []


def test_gradcam_of_clip():
    model = vision("CLIP").eval()
    images = torch.randn(2, 3, 32, 32)
    layer = "encoder.layers.1.layer_norm1"  # behind it, the class token alone is read
    cam = gradcam(model, images, layer, target=lambda output: output.pooler_output.square().sum())
    assert cam.raw.shape == (2, 4, 4)


def test_a_token_behind_the_map_is_refused():
    class Llama4Vision(Tokens):
        def forward(self, x):
            x = self.conv(x).flatten(2).transpose(1, 2)
            token = self.class_embedding.expand(len(x), 1, -1)
            return self.block(torch.cat([x, token], 1))

    model = Llama4Vision("class_embedding", 1)
    attach(model, {"block": DropBlock2d(0.3, 3)})
    with pytest.raises(SiteError, match="its 25 tokens"):
        model(torch.randn(2, 3, 8, 12))
