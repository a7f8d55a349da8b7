"""Grad-CAM on timm's models: against the grad-cam package, and on all families."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from dropblock_hooks import HookWarning, gradcam
from tests.cases import rest_slow
from tests.families import MEMBERS

timm = pytest.importorskip("timm", reason="the models are timm's")

METHODS = ["gradcam", "gradcam++", "layercam"]
CLASSES = [0, 4]  # whose maps are not all zeros, in each of the models


def first(x):
    return x


def last(x):
    """Swin's (N, H, W, C) as (N, C, H, W), as users of the package write it."""
    return x.permute(0, 3, 1, 2)


def tokens(x, height=6, width=6):
    """A ViT's tokens without the class token, as the package's documentation has it."""
    result = x[:, 1:, :].reshape(x.size(0), height, width, x.size(2))
    return result.transpose(2, 3).transpose(1, 2)


# model, options, layer, as (N, C, H, W)
MODELS = {
    "resnet": ("test_resnet", {}, "layer4.0", first),
    "convnext": ("test_convnext", {}, "stages.3", first),
    "swin": ("swin_tiny_patch4_window7_224", {"img_size": 96}, "layers.3", last),
    "vit": ("deit_tiny_patch16_224", {"img_size": 96, "depth": 4}, "blocks.3.norm1", tokens),
    "mambaout": ("test_mambaout", {}, "stages.3", last),
    "resnet_inner": ("test_resnet", {}, "layer3.0.bn1", first),
    "vit_earlier": ("deit_tiny_patch16_224", {"img_size": 96}, "blocks.8", tokens),
}
by_model = pytest.mark.parametrize("name", rest_slow(MODELS, ["resnet", "vit"]))


def built(name):
    torch.manual_seed(0)
    model, options, *rest = MODELS[name]
    made = timm.create_model(model, num_classes=7, **options).eval()
    for name, parameter in made.named_parameters():  # no zeros, and maps large beside rounding
        if parameter.ndim > 1:
            nn.init.trunc_normal_(parameter, std=parameter[0].numel() ** -0.5)
        elif "weight" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            nn.init.normal_(parameter, std=0.1)
    return made, torch.randn(2, 3, 96, 96), *rest


def unit(maps):
    """Each map from 0 to 1."""
    low = maps.min(axis=(1, 2), keepdims=True)
    return (maps - low) / ((maps - low).max(axis=(1, 2), keepdims=True) + 1e-7)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the package imports
@pytest.mark.parametrize("method", METHODS)
@by_model
def test_the_package_finds_the_same(name, method, monkeypatch):
    package = pytest.importorskip("pytorch_grad_cam", reason="grad-cam is the reference")
    from pytorch_grad_cam import base_cam

    def scaled_up(y, k):
        return 1e8 * y[..., k]  # so large that the package's epsilon of 1e-6 is nothing

    model, x, layer, reshape = built(name)
    model, x = model.double(), x.double()
    cam = gradcam(model, x, layer, lambda y: torch.stack([*map(scaled_up, y, CLASSES)]), method)
    scaled = []  # before it is resized

    def scale_cam_image(maps, target_size=None, scale=base_cam.scale_cam_image):
        scaled.append(scale(maps))
        return scale(maps, target_size)

    monkeypatch.setattr(base_cam, "scale_cam_image", scale_cam_image)
    kind = {"gradcam": "GradCAM", "gradcam++": "GradCAMPlusPlus", "layercam": "LayerCAM"}[method]
    module = model.get_submodule(layer)
    copied = module.register_forward_hook(lambda m, args, y: y.clone())
    whole = None if reshape is first else reshape
    with getattr(package, kind)(model, [module], reshape_transform=whole) as reference:
        # hooks put on later see the copy, which the layers behind must not change
        after = module.register_forward_hook(lambda m, args, y: y.clone())
        resized_map = reference(x, [partial(scaled_up, k=k) for k in CLASSES])
    copied.remove()
    after.remove()
    np.testing.assert_allclose(unit(cam.raw.numpy()), scaled[0], rtol=0, atol=1e-5)
    # it scales again what it has resized
    np.testing.assert_allclose(unit(cam.maps.numpy()), resized_map, rtol=0, atol=1e-3)


# all families, without a layer named

PLAIN = {
    "levit", "mambaout", "resnet", "vision_transformer",
}  # fmt: skip
GIVEN = {  # what these families do not tell
    "gemma4_vit": {"grid": (4, 4), "prefix_tokens": 0},
    "hiera": {"grid": (3, 3)},
    "levit": {"grid": (2, 2)},
}
HEAD_OF_ZEROS = {"hiera", "mlp_mixer", "sequencer"}  # as timm initializes them
DEFAULTS = {
    "beit": "blocks.11",
    "cait": "blocks.23",
    "coat": "parallel_blocks.5.norm12",
    "convnext": "stages.3",
    "crossvit": "blocks.2.fusion.1.norm1",
    "densenet": "features.norm5",
    "hrnet": "final_layer",
    "mambaout": "stages.3",
    "resnet": "layer4.0",
    "swin_transformer": "layers.3",
    "twins": "blocks.3.3",
    "vision_transformer": "blocks.5.norm1",
    "xcit": "blocks.11",
}


SPECIAL = GIVEN.keys() | HEAD_OF_ZEROS | DEFAULTS.keys()


def case(i, member):
    """Plain, slow, or with --exhaustive: families with values above are slow at most."""
    marks = [] if member.family in PLAIN else [pytest.mark.slow]
    if marks and member.family not in SPECIAL and i % 4:
        marks.append(pytest.mark.exhaustive)
    return pytest.param(member, marks=marks, id=member.family)


@pytest.mark.parametrize("member", [case(i, member) for i, member in enumerate(MEMBERS)])
def test_every_family_has_a_layer_to_look_at(member, hook_count):
    torch.manual_seed(0)
    model, x = member.build(), torch.randn(2, 3, member.size, member.size)
    options = GIVEN.get(member.family, {})
    if member.family in GIVEN:
        with pytest.raises(ValueError, match="no layer fits, of 12 tried.* say grid="):
            gradcam(model, x)
    if member.family in HEAD_OF_ZEROS:
        with pytest.raises(ValueError, match="the gradient is 0 at all places of its .*weights of"):
            gradcam(model, x, **options)
        for name, parameter in model.named_parameters():
            if "head" in name and parameter.ndim > 1:
                nn.init.normal_(parameter)
    hooks = hook_count(model)
    with warnings.catch_warnings():  # weights are random: the sum may be negative everywhere
        warnings.filterwarnings("ignore", "no position at layer", HookWarning)
        cam = gradcam(model, x, method="layercam", **options)
    assert cam.layer == DEFAULTS.get(member.family, cam.layer)
    assert cam.maps.shape == (2, member.size, member.size)
    assert cam.raw.isfinite().all()
    assert min(cam.raw.shape[1:]) > 1
    assert hook_count(model) == hooks
