"""torchvision's models, random weights: layers by name, for they have no ``feature_info``."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from dropblock_hooks import ClipGradNorm, DropBlock2d, DropBlock3d, Dropout2d, SpecError, attach
from tests.cases import rest_slow

torchvision = pytest.importorskip("torchvision", reason="the models are torchvision's")

CLASSIFIERS = [  # name, input, two layers, their layout and channels
    ("alexnet", 96, ("features.8", "features.10"), "NCHW", (256, 256)),
    ("convnext_tiny", 64, ("features.5", "features.7"), "NCHW", (384, 768)),
    ("densenet121", 64, ("features.denseblock3", "features.denseblock4"), "NCHW", (1024, 1024)),
    ("efficientnet_b0", 64, ("features.6", "features.7"), "NCHW", (192, 320)),
    ("googlenet", 96, ("inception4e", "inception5b"), "NCHW", (832, 1024)),
    ("inception_v3", 160, ("Mixed_6e", "Mixed_7c"), "NCHW", (768, 2048)),
    ("maxvit_t", 224, ("blocks.2", "blocks.3"), "NCHW", (256, 512)),
    ("mnasnet0_5", 64, ("layers.12", "layers.16"), "NCHW", (96, 1280)),
    ("mobilenet_v2", 64, ("features.17", "features.18"), "NCHW", (320, 1280)),
    ("mobilenet_v3_small", 64, ("features.11", "features.12"), "NCHW", (96, 576)),
    ("regnet_y_400mf", 64, ("trunk_output.block3", "trunk_output.block4"), "NCHW", (208, 440)),
    ("resnet18", 64, ("layer3.1", "layer4.1"), "NCHW", (256, 512)),
    ("shufflenet_v2_x0_5", 64, ("stage3", "stage4"), "NCHW", (96, 192)),
    ("squeezenet1_1", 64, ("features.10", "features.12"), "NCHW", (384, 512)),
    ("swin_t", 64, ("features.5", "features.7"), "NHWC", (384, 768)),
    ("vgg11", 64, ("features.15", "features.20"), "NCHW", (512, 512)),
    ("vit_b_16", 64, ("encoder.layers.encoder_layer_10", "encoder.ln"), "NLC", (768, 768)),
]
PLAIN = {"resnet18", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t"}
ARGUMENTS = {
    "vit_b_16": {"image_size": 64},
    "googlenet": {"init_weights": False},
    "inception_v3": {"init_weights": False, "aux_logits": False},
}


def outputs(y):
    if isinstance(y, torch.Tensor):
        return [y]
    return [t for t in (y.values() if isinstance(y, dict) else y) if isinstance(t, torch.Tensor)]


def test_every_family_of_classifiers_is_there():
    models = torchvision.models
    names = models.list_models(module=models)
    families = {models.get_model_builder(name).__module__ for name in names}
    assert {models.get_model_builder(case[0]).__module__ for case in CLASSIFIERS} == families
    assert len(families) == len(CLASSIFIERS)


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


@pytest.mark.slow
def test_a_detector_with_images_of_two_shapes():
    model = torchvision.models.get_model(
        "fasterrcnn_mobilenet_v3_large_320_fpn",
        weights=None,
        weights_backbone=None,
        min_size=128,
        max_size=256,
    )
    spec = {"15": DropBlock2d(0.2, 3), "16": DropBlock2d(0.2, 3)}
    attached = attach(model, spec, root="backbone.body")
    boxes = {"boxes": torch.tensor([[5.0, 5.0, 60.0, 60.0]]), "labels": torch.tensor([1])}
    for shape in ((3, 64, 64), (3, 64, 128)):
        losses = model.train()([torch.rand(shape) for _ in range(2)], [boxes, boxes])
        sum(losses.values()).backward()
    assert [site.map_size for site in attached.sites] == [(4, 8), (4, 8)]
    assert "4x8 (varies)" in str(attached)
    assert attached.sites[0].name == "15"


def test_a_segmenter_with_images_of_two_shapes():
    model = torchvision.models.get_model(
        "lraspp_mobilenet_v3_large", weights=None, weights_backbone=None
    )
    attached = attach(model, {"backbone.15": DropBlock2d(0.2, 3), "backbone.16": DropBlock2d(0.2)})
    for edge in (64, 128):
        model.train()(torch.randn(2, 3, edge, edge))["out"].square().mean().backward()
    assert [site.map_size for site in attached.sites] == [(8, 8)] * 2
    assert "8x8 (varies)" in str(attached)


@pytest.mark.parametrize(
    ("name", "layers", "layout", "sizes"),
    rest_slow(
        [
            ("swin3d_t", ("features.4", "features.6"), "NDHWC", [(4, 4, 4), (4, 2, 2)]),
            ("r3d_18", ("layer3.1", "layer4.1"), "NCDHW", [(2, 4, 4), (1, 2, 2)]),
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


@pytest.mark.slow
def test_a_video_model_of_tokens():
    model = torchvision.models.get_model("mvit_v1_b")
    attached = attach(
        model, {f"blocks.{i}": DropBlock3d(0.2, 2, index=0, layout="NLC") for i in (13, 15)}
    )
    model.train()(torch.randn(1, 3, 16, 224, 224)).square().mean().backward()
    for site, size in zip(attached.sites, [(8, 14, 14), (8, 7, 7)], strict=True):
        assert site.reader.last.layout == "NLC"
        assert site.reader.last.prefix == 1
        assert site.map_size == size
        assert abs(site.realized_rate - 0.2) < 0.02


def test_stages_of_a_classifier():
    with pytest.raises(SpecError, match=r"no module has it; name the layers \(conv1, .*layer4"):
        attach(torchvision.models.resnet18(), {"stage:-1": DropBlock2d(0.2, 3)})


SIZES = [(64, 96), (96, 96), (128, 160), (80, 112), (112, 64), (160, 192)]


@pytest.mark.slow
def test_a_compiled_segmenter_takes_maps_of_any_size_in_three_graphs():
    features = torchvision.models.mobilenet_v3_small(weights=None, dilated=True).features
    layers = {"3": "low", "12": "high"}
    backbone = torchvision.models._utils.IntermediateLayerGetter(features, layers)
    model = torchvision.models.segmentation.LRASPP(backbone, 24, 576, num_classes=4)
    spec = {
        "backbone.9": DropBlock2d(0.2, 5),
        "backbone.[68]": Dropout2d(0.1),
        "backbone.12.0": ClipGradNorm(1.0),
    }
    attached = attach(model, spec)
    torch._dynamo.reset()
    counters.clear()
    call = torch.compile(model, backend="eager", fullgraph=True)
    for height, width in SIZES:
        call(torch.randn(2, 3, height, width))["out"].square().mean().backward()
    assert counters["stats"]["unique_graphs"] <= 3
    assert attached["backbone.9/DropBlock2d"].map_size == (10, 12)
    assert all(site.active_calls == len(SIZES) for site in attached)


@pytest.mark.slow
def test_a_detector_with_a_compiled_backbone():
    backbone = torchvision.models.detection.backbone_utils.resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5
    )
    model = torchvision.models.detection.FasterRCNN(backbone, 3, min_size=96, max_size=200)
    attached = attach(model, {"layer3.1": DropBlock2d(0.2, 5)}, root="backbone.body")
    torch._dynamo.reset()
    counters.clear()
    model.backbone.body.compile(backend="eager", fullgraph=True)
    target = {"boxes": torch.tensor([[5.0, 5.0, 50.0, 50.0]]), "labels": torch.tensor([1])}
    for height, width in [(96, 96), (96, 128), (96, 160), (96, 190), (128, 96)]:
        images = [torch.rand(3, height, width) for _ in range(2)]
        sum(model(images, [target, target]).values()).backward()
    assert counters["stats"]["unique_graphs"] <= 3
    assert attached.sites[0].map_size == (8, 6)
