"""Presets: placements of papers on real models."""

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ByDepth,
    DropBlock2d,
    HookWarning,
    LinearSchedule,
    Spec,
    StepSchedule,
    StochasticDepth,
    WindowSchedule,
    ZeroGrad,
    attach,
    plan,
    presets,
)
from tests.cases import rest_slow


def images(n=2, edge=64):
    return torch.randn(n, 3, edge, edge)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
@pytest.mark.parametrize(("depth", "norms", "shortcuts"), rest_slow([(18, 8, 2), (50, 27, 2)]))
def test_drop_block_in_resnets(library, depth, norms, shortcuts):
    models = pytest.importorskip(library, reason="the ResNets are theirs")
    name = f"resnet{depth}"
    model = models.create_model(name) if library == "timm" else getattr(models.models, name)()
    spec = presets.drop_block_resnet(model, LinearSchedule(0.0, 0.2, epochs=5), 3)
    attached = attach(model, spec)
    on_norms = [site for site in attached if ".bn" in site.name]
    assert len(on_norms) == norms
    assert len(attached) == norms + shortcuts
    assert {site.name for site in attached} >= {"layer3.0.downsample", "layer4.0.downsample"}
    attached.step(4)
    for site in attached:
        assert site.rate == pytest.approx(0.05 if site.name.startswith("layer3") else 0.2)
    model(images(edge=128)).sum().backward()  # on smaller maps, a block of 3 is clipped
    assert attached.verify() == []
    assert Spec.from_yaml(spec.to_yaml()) == spec


@pytest.mark.slow
def test_a_resnet_compiles_with_the_compiler_of_the_system(monkeypatch, tmp_path):
    """The C++ code that inductor generates for the paper's placement must not crash gcc."""
    timm = pytest.importorskip("timm", reason="the ResNet is timm's")
    # a ResNet-50 repeats the code of these blocks more often, which takes twice as long
    model = timm.create_model("resnet26", num_classes=10)
    attached = attach(model, presets.drop_block_resnet(model, p=0.1))
    torch.compiler.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is compiled already
    compiled = torch.compile(model, backend="inductor", fullgraph=True)
    compiled(torch.randn(8, 3, 128, 128)).sum().backward()
    assert {(site.calls, site.active_calls) for site in attached} == {(1, 1)}
    assert all(p.grad.isfinite().all() for p in model.parameters())
    (finding,) = attached.verify()
    assert finding.kind == "clipped"  # blocks of 7x7 on maps of 4x4


def test_drop_block_needs_a_resnet(net):
    with pytest.raises(ValueError, match=r"Net has no layers 'layer3.\*.bn\[123\]' of a ResNet"):
        presets.drop_block_resnet(net)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop_path = nn.Identity()

    def forward(self, x):
        return x + self.drop_path(self.linear(x).relu())


RISING = {
    "stochastic_depth": lambda model, p: presets.stochastic_depth(model, p, torch.ones(2, 3)),
    "drop_path": lambda model, p: presets.drop_path(model, p, torch.ones(2, 3)),
}


@pytest.mark.parametrize("preset", RISING)
@pytest.mark.parametrize(
    ("p", "rates"),
    [
        (0.3, [0.0, 0.1, 0.2, 0.3]),
        (ByDepth(0.0, 0.3), [0.0, 0.1, 0.2, 0.3]),
        (ByDepth(0.3, 0.0), [0.3, 0.2, 0.1, 0.0]),
        (LinearSchedule(0.3, 0.6, 5), [0.0, 0.1, 0.2, 0.3]),
        (ByDepth(LinearSchedule(0.1, 0.6, 5), 0.4), [0.1, 0.2, 0.3, 0.4]),
    ],
    ids=repr,
)
def test_rates_rise_once_with_depth(preset, p, rates):
    model = nn.Sequential(nn.Linear(3, 4), *[Branch() for _ in range(4)])
    attached = attach(model, RISING[preset](model, p))
    assert [site.rate for site in attached] == pytest.approx(rates)


def test_by_stage():
    timm = pytest.importorskip("timm", reason="stages are timm's")
    spec = presets.by_stage(DropBlock2d(LinearSchedule(0.0, 0.4, epochs=3), 3), (-3, -2, -1))
    for name in ("resnet18", "test_mambaout", "test_efficientnet"):
        model = timm.create_model(name)
        attached = attach(model, spec)
        attached.step(2)
        assert [site.rate for site in attached] == pytest.approx([0.1, 0.25, 0.4])
        model(images(edge=96)).sum().backward()
        assert attached.verify() == []


def test_by_stage_takes_a_rate_that_rises_already_as_it_is():
    spec = presets.by_stage(DropBlock2d(ByDepth(0.1, 0.4), 3), (-3, -2, -1))
    assert spec.entries[0].regularizers == (DropBlock2d(ByDepth(0.1, 0.4), 3),)


@pytest.mark.parametrize(
    ("name", "edge", "blocks", "some"),
    rest_slow(
        [
            ("convnext_atto", 64, 12, "stages.3.blocks.1"),
            ("vit_tiny_patch16_224", 224, 12, "blocks.11"),
            ("resnet50", 64, 12, "layer1.1"),
            ("efficientnet_b0", 64, 9, "blocks.5.3"),
        ]
    ),
)
def test_stochastic_depth(name, edge, blocks, some):
    timm = pytest.importorskip("timm", reason="the models are timm's")
    model = timm.create_model(name)
    keys = list(model.state_dict())
    spec = presets.stochastic_depth(model, 0.2, images(edge=edge))
    attached = attach(model, spec)
    assert len(attached) == blocks
    assert some in [site.name for site in attached]
    assert [site.rate for site in attached] == pytest.approx(
        [0.2 * i / (blocks - 1) for i in range(blocks)]
    )
    model(images(edge=edge)).sum().backward()
    assert attached.verify() == []
    attached.remove()
    assert list(model.state_dict()) == keys


def test_stochastic_depth_of_a_model_of_ones_own(net):
    spec = presets.stochastic_depth(net, 0.3, images(edge=16))
    (entry,) = spec
    assert entry.selector.names == ("layer1.0", "layer1.1", "layer2.0", "layer2.1")
    assert entry.regularizers == (StochasticDepth(ByDepth(0.0, 0.3)),)
    with pytest.raises(ValueError, match="give example_input="):
        presets.stochastic_depth(net)
    with pytest.raises(ValueError, match="no forward of a copy ran"):
        presets.stochastic_depth(net, 0.3, torch.ones(1))


@pytest.mark.parametrize(
    ("name", "options", "branches"),
    rest_slow(
        [
            ("vit_tiny_patch16_224", {"img_size": 64, "depth": 3}, 6),
            ("efficientnet_b0", {}, 9),
        ]
    ),
)
def test_drop_path(name, options, branches):
    timm = pytest.importorskip("timm", reason="the models are timm's")
    model = timm.create_model(name, **options)
    spec = presets.drop_path(model, 0.1, images(edge=64))
    planned = plan(model, spec, images(edge=64))
    assert not planned.problems
    assert not any("sample" in str(line) for line in planned.warnings)
    attached = attach(model, spec)
    assert len(attached) == branches
    assert attached.sites[-1].rate == 0.1
    model(images(edge=64)).sum().backward()
    assert attached.verify() == []


def test_drop_path_where_it_can_not_be():
    timm = pytest.importorskip("timm", reason="the models are timm's")
    model = timm.create_model("vit_tiny_patch16_224", depth=3, drop_path_rate=0.1)
    with pytest.warns(HookWarning, match="DropPath"):
        attach(model, presets.drop_path(model))
    with pytest.raises(ValueError, match="ResNet has no layer drop_path"):
        presets.drop_path(timm.create_model("resnet18", layers=(1, 1, 1, 1)))


@pytest.mark.parametrize(
    ("rate", "half"),
    [
        (0.2, 0.1),
        (LinearSchedule(0.0, 0.2, 5, delay=1), LinearSchedule(0.0, 0.1, 5, delay=1)),
        (StepSchedule({0: 0.2, 3: 0.4}), StepSchedule({0: 0.1, 3: 0.2})),
        (WindowSchedule(0.2, 0, 5, 0.4), WindowSchedule(0.1, 0, 5, 0.2)),
        (ByDepth(LinearSchedule(0.0, 0.2, 5), 0.4), ByDepth(LinearSchedule(0.0, 0.1, 5), 0.2)),
    ],
)
def test_scaled(rate, half):
    assert presets.scaled(rate, 0.5) == half
    with pytest.raises(TypeError, match="must be a number or a schedule of this package"):
        presets.scaled(lambda t: 0.1, 0.5)


@pytest.mark.parametrize(
    "given", [nn.ReLU(), DropBlock2d, ZeroGrad()], ids=["model", "class", "no rate"]
)
def test_by_stage_takes_a_regularizer_first(given):
    with pytest.raises(TypeError, match="by_stage takes a regularizer with a rate and no model"):
        presets.by_stage(given)


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.position = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return x + self.fc2(self.fc1(x + self.position).relu())


def test_a_block_that_takes_the_input_of_the_model_is_found():
    model = nn.Sequential(Perceptron(), Perceptron())
    assert presets.residual_blocks(model, torch.randn(2, 8)) == ("0", "1")


def test_a_bias_is_no_branch():
    model = nn.Sequential(nn.Linear(8, 8), Perceptron(), Perceptron())
    assert presets.residual_blocks(model, torch.randn(2, 8)) == ("1", "2")
    with pytest.raises(ValueError, match="Sequential has no residual block that keeps its shape"):
        presets.stochastic_depth(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), 0.1, torch.randn(2, 8))
