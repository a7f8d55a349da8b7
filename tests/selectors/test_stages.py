"""Feature stages: which layer they mean, in every wrapper, and what is said where there is none."""

import pytest
import torch
from torch import nn

from dropblock_hooks import DropBlock2d, SpecError, attach
from dropblock_hooks.selectors.index import Index
from dropblock_hooks.selectors.stages import stage_target

timm = pytest.importorskip("timm", reason="stages are timm's")


def entries(*names, channels=8):
    return [
        {"module": name, "num_chs": channels, "reduction": 2 ** (i + 1)}
        for i, name in enumerate(names)
    ]


class Net(nn.Module):
    """Two stages of two layers in a container of some name, run one by one."""

    def __init__(self, container="stages", named=("stages.0", "stages.1")):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        stages = [nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)) for _ in range(2)]
        setattr(self, container, nn.ModuleList(stages))
        self.container = container
        self.feature_info = entries(*named)

    def forward(self, x):
        x = self.stem(x)
        for stage in getattr(self, self.container):
            for layer in stage:
                x = layer(x)
        return x


class Wrapped(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return next(self.children())(x)


def without_numbers(name):
    """A model of timm whose tensors take no memory."""
    with torch.device("meta"):
        return timm.create_model(name)


def target(model, number):
    return stage_target(Index(model), "stage", str(number)).name


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Net(), "stages.1.1"),
        (Net("blocks", ("block.0", "block.1")), "blocks.1.1"),  # as twins names its stages
        (Net("stages", ("block.0", "block.1")), "stages.1.1"),  # as mvitv2 does
        (Net(named=("stem2", "stages.1")), "stages.1.1"),  # beside one that does not exist
        (Wrapped(model=Net()), "model.stages.1.1"),
        (Wrapped(encoder=Net("blocks", ("block.0", "block.1"))), "encoder.blocks.1.1"),
    ],
)
def test_the_last_layer_that_is_called(model, expected):
    assert target(model, -1) == expected
    attached = attach(model, {"stage:-1": DropBlock2d(0.1, 3)})
    model(torch.randn(2, 3, 5, 5))
    assert attached.sites[0].calls == 1


def test_the_exact_name_counts_before_similar_names():
    """As in inception_resnet_v2, where ``repeat_1`` stands beside ``repeat.1``."""
    model = nn.Module()
    model.repeat = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1))
    model.repeat_1 = nn.Conv2d(8, 8, 1)
    model.feature_info = entries("repeat", "repeat_1")
    assert target(model, 1) == "repeat_1"


def test_entries_that_count_from_1_stop_no_other_selector():
    model = Net("blocks", ("block.1", "block.2"))
    attached = attach(model, {"stem": DropBlock2d(0.1, 3)})
    model(torch.randn(2, 3, 5, 5))
    assert attached.sites[0].calls == 1


@pytest.mark.parametrize(
    ("model", "selector", "message"),
    [
        (Net(), "stage:2", r"stage:2 is no stage of the model \(0: stages.0, stride 2; 1: s"),
        (without_numbers("tresnet_m"), "stage:0", "which the model does not have"),
        (Net(), "stage:last", "takes an integer, got 'last'"),
        (Net(named=("stem2", "stages.1")), "stage:0", "names 'stem2', which the model does not"),
        (Net("blocks", ("block.1", "block.2")), "stage:0", "names 'block.1', which the model does"),
        (Wrapped(a=Net(), b=Net()), "stage:0", "several submodules have it: a, b; .* root="),
        (nn.Sequential(nn.Conv2d(3, 8, 1)), "stage:0", r"no module has it; name the layers \(0\)"),
    ],
)
def test_what_is_no_stage(model, selector, message):
    with pytest.raises(SpecError, match=message):
        attach(model, {selector: DropBlock2d(0.1, 3)})


def test_features_of_a_model_are_regularized():
    model = timm.create_model("test_convnext", features_only=True)
    attached = attach(model, {"stage:-1": DropBlock2d(0.3, 1), "stage:-2": DropBlock2d(0.3, 1)})
    features = model.train()(torch.randn(2, 3, 64, 64))
    assert [site.calls for site in attached.sites] == [1, 1]
    assert 0.1 < (features[-1] == 0).double().mean() < 0.5


@pytest.mark.parametrize(
    ("name", "options", "ends"),
    [
        ("test_resnet", {}, ["layer4.0"]),
        ("test_vit", {}, ["model.blocks.5"]),
        ("twins_svt_small", {}, ["model.blocks.2.9", "model.blocks.3.3"]),
    ],
)
def test_names_in_models_that_give_features_only(name, options, ends):
    with torch.device("meta"):
        index = Index(timm.create_model(name, features_only=True, **options))
    found = [stage_target(index, "stage", str(i - len(ends))).name for i in range(len(ends))]
    assert found == ends
