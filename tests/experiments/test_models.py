"""The model of a config: timm's or torchvision's, initialized by its seed alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.config import Config
from experiments.data import load_data
from experiments.models import ThreeChannels, prepare

SMALL = {"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8], "output_stride": 8}
CONFIG = Config(model_args=SMALL, train_images=20)


def weights(config):
    model, _ = prepare(config, load_data(config, Path("data")))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_weights_follow_from_seed_and_replica_alone():
    torch.manual_seed(1)
    before, one = torch.get_rng_state(), weights(CONFIG)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(one, weights(replace(CONFIG, lr=0.5, label_noise=0.5)))
    assert not torch.equal(one, weights(replace(CONFIG, seed=1)))
    assert not torch.equal(one, weights(replace(CONFIG, replica=1)))


def test_the_generators_of_gpus_are_left_to_the_masks(monkeypatch):
    def seeded(seed):
        pytest.fail("all GPUs of all processes would draw the same masks")

    data = load_data(CONFIG, Path("data"))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeded)
    prepare(CONFIG, data)


def test_torchvision_takes_gray_images_and_its_layers_keep_their_names():
    config = Config({"layer4.0": "Dropout2d(p=0.5)"}, model="torchvision:resnet18", train_images=20)
    model, attached = prepare(config, load_data(config, Path("data")))
    assert isinstance(model, ThreeChannels)
    assert [site.name for site in attached.sites] == ["layer4.0"]
    x = torch.rand(2, 1, 32, 32)
    model.eval()
    assert torch.equal(model(x), model.model(x.repeat(1, 3, 1, 1)))


def test_timm_makes_its_first_layer_for_the_channels():
    model, attached = prepare(CONFIG, load_data(CONFIG, Path("data")))
    assert attached is None
    assert next(m for m in model.modules() if isinstance(m, nn.Conv2d)).in_channels == 1
    assert model.training
    assert (
        int(next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)).num_batches_tracked)
        == 0
    )
