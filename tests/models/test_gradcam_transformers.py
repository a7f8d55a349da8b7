"""Grad-CAM on image classifiers of transformers, without a layer named."""

import pytest
import torch
from torch import nn
from torch.nn.functional import avg_pool2d

from dropblock_hooks import gradcam

transformers = pytest.importorskip("transformers", reason="the models are theirs")

TOKENS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 8,
}
WINDOWS = {
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 2, 2],
    "num_heads": [1, 2, 4],
    "window_size": 4,
}
POOLED = {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 2]}


def built(name, config):
    """A model with random weights, none of them 0, and images."""
    torch.manual_seed(0)
    settings = getattr(transformers, f"{name}Config")(num_labels=7, **config)
    model = getattr(transformers, f"{name}ForImageClassification")(settings)
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.trunc_normal_(parameter, std=parameter[0].numel() ** -0.5)
        elif "weight" in key or "scale" in key or "lambda" in key:
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            nn.init.normal_(parameter, std=0.1)
    images = avg_pool2d(torch.randn(4, 3, 64, 64), 3, stride=1, padding=1)
    return model.eval(), images


def correlation(maps, others):
    """The mean correlation of the maps of an image."""
    values = []
    for one, other in zip(maps.flatten(1), others.flatten(1), strict=True):
        values.append(float(torch.corrcoef(torch.stack([one, other]))[0, 1]))
    return sum(values) / len(values)


@pytest.mark.parametrize("name", ["Swin", "Swinv2"])
def test_swin_is_seen_at_its_last_stage(name):
    model, images = built(name, WINDOWS)
    swin = name.lower()
    cam = gradcam(model, images)
    assert cam.layer == f"{swin}.encoder.layers.2"
    block = gradcam(model, images, f"{swin}.encoder.layers.2.blocks.1", index=0)
    assert torch.equal(cam.maps, block.maps)
    norm = gradcam(model, images, f"{swin}.layernorm")  # the layer that the head reads
    assert correlation(cam.maps, norm.maps) > 0.9


@pytest.mark.parametrize(
    ("name", "config", "layer"),
    [
        ("Beit", TOKENS, ".2"),
        ("Beit", TOKENS | {"use_mean_pooling": False}, ".2.layernorm_before"),
        ("DeiT", TOKENS, ".2.layernorm_before"),
        ("ViT", TOKENS, ".2.layernorm_before"),
        ("PoolFormer", POOLED, ".3.1"),
        ("ConvNext", POOLED, ".stages.3"),
    ],
    ids=["mean of tokens", "class token of BEiT", "DeiT", "ViT", "tuple of maps", "maps"],
)
def test_the_last_block_or_the_norm_before_the_class_token(name, config, layer):
    model, images = built(name, config)
    cam = gradcam(model, images)
    assert cam.layer.endswith(layer)
    assert min(cam.raw.shape[1:]) > 1
