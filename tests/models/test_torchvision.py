"""torchvision's models, random weights: layers by name, for they have no ``feature_info``."""

import pytest
import torch

from dropblock_hooks import DropBlock2d, DropBlock3d, SpecError, attach
from tests.cases import rest_slow

torchvision = pytest.importorskip("torchvision", reason="the models are torchvision's")

CLASSIFIERS = [  # name, input, two layers, their layout and channels
    ("googlenet", 96, ("inception4e", "inception5b"), "NCHW", (832, 1024)),
    ("inception_v3", 160, ("Mixed_6e", "Mixed_7c"), "NCHW", (768, 2048)),
    ("maxvit_t", 224, ("blocks.2", "blocks.3"), "NCHW", (256, 512)),
    ("mobilenet_v3_small", 64, ("features.11", "features.12"), "NCHW", (96, 576)),
    ("resnet18", 64, ("layer3.1", "layer4.1"), "NCHW", (256, 512)),
    ("shufflenet_v2_x0_5", 64, ("stage3", "stage4"), "NCHW", (96, 192)),
    ("squeezenet1_1", 64, ("features.10", "features.12"), "NCHW", (384, 512)),
    ("swin_t", 64, ("features.5", "features.7"), "NHWC", (384, 768)),
    ("vit_b_16", 64, ("encoder.layers.encoder_layer_10", "encoder.ln"), "NLC", (768, 768)),
]
PLAIN = {"resnet18", "shufflenet_v2_x0_5", "squeezenet1_1"}
ARGUMENTS = {
    "vit_b_16": {"image_size": 64},
    "googlenet": {"init_weights": False},
    "inception_v3": {"init_weights": False, "aux_logits": False},
}


def outputs(y):
    if isinstance(y, torch.Tensor):
        return [y]
    return [t for t in (y.values() if isinstance(y, dict) else y) if isinstance(t, torch.Tensor)]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "size", "layers", "layout", "channels"),
    rest_slow(CLASSIFIERS, [case for case in CLASSIFIERS if case[0] in PLAIN]),
)
def test_a_classifier(name, size, layers, layout, channels, hook_count):
    model = torchvision.models.get_model(name, **ARGUMENTS.get(name, {}))
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        bare = outputs(model.eval()(x))
    attached = attach(model, {layer: DropBlock2d(0.2, 3) for layer in layers})
    with torch.no_grad():
        assert all(map(torch.equal, outputs(model.eval()(x)), bare))
    shapes = []
    for layer in layers:
        model.get_submodule(layer).register_forward_hook(
            lambda module, args, output: shapes.append(output.shape)
        )
    sum(y.square().mean() for y in outputs(model.train()(x))).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    for site, shape, n in zip(attached.sites, shapes, channels, strict=True):
        assert site.layout == layout
        assert shape[1 if layout == "NCHW" else -1] == n
        assert site.active_calls == 1
        drawn = shape.numel() // 9  # at most so many blocks, of which none is half
        assert abs(site.realized_rate - 0.2) < 4 * (0.16 / drawn) ** 0.5 * 3
    attached.remove()
    assert hook_count(model) == len(layers)


@pytest.mark.parametrize(
    ("name", "layers", "layout", "sizes"),
    rest_slow(
        [
            ("r3d_18", ("layer3.1", "layer4.1"), "NCDHW", [(2, 4, 4), (1, 2, 2)]),
            ("swin3d_t", ("features.4", "features.6"), "NDHWC", [(4, 4, 4), (4, 2, 2)]),
        ]
    ),
)
def test_a_video_model(name, layers, layout, sizes):
    model = torchvision.models.get_model(name)
    attached = attach(model, {layer: DropBlock3d(0.2, 2) for layer in layers})
    edge = 64 if name == "swin3d_t" else 32
    model.train()(torch.randn(2, 3, 8, edge, edge)).square().mean().backward()
    assert [site.layout for site in attached.sites] == [layout] * 2
    assert [site.map_size for site in attached.sites] == sizes
    assert all(abs(site.realized_rate - 0.2) < 0.06 for site in attached.sites)


def test_stages_of_a_classifier():
    with pytest.raises(SpecError, match=r"no module has it; name the layers \(conv1, .*layer4"):
        attach(torchvision.models.resnet18(), {"stage:-1": DropBlock2d(0.2, 3)})
