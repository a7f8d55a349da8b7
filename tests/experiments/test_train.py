"""A run: paired with the others of its seed, its rates as scheduled, its errors told at once."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from timm.models.resnet import ResNet
from torch import Tensor, nn

from dropblock_hooks import SpecError
from experiments.data import Split
from experiments.report import summarize
from experiments.study import Run, read_study
from experiments.train import Config, evaluate, prepare, train

QUICK = Path(__file__).parents[2] / "experiments" / "configs" / "quick.yaml"
SMALL = {"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8], "output_stride": 8}
TINY = Config(model_args=SMALL, train_images=60, batch_size=20, epochs=3, threads=1, seed=5)
RAMP = {"LinearSchedule": {"start": 0.0, "stop": 0.5, "epochs": 3}}
SPECS = {
    "none": None,
    "dropout": {"layer[234].0": {"Dropout2d": {"p": 0.5}}},
    "dropblock": {"layer[234].0": {"DropBlock2d": {"p": RAMP, "block_size": 3}}},
}


class Inputs:
    """What a training ResNet is given, and with which weights it starts."""

    def __init__(self) -> None:
        self.batches: list[Tensor] = []
        self.weights: list[Tensor] = []

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if isinstance(module, ResNet) and module.training:
            self.weights = self.weights or [p.detach().clone() for p in module.parameters()]
            self.batches.append(args[0].clone())


def watched(config: Config) -> tuple[Inputs, list[float]]:
    inputs = Inputs()
    handle = nn.modules.module.register_module_forward_pre_hook(inputs)
    try:
        return inputs, train(config).loss
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["dropout", "dropblock"])
def test_conditions_of_one_seed_are_paired(name):
    bare, bare_loss = watched(TINY)
    torch.rand(3)
    other, other_loss = watched(replace(TINY, spec=SPECS[name]))
    assert len(bare.batches) == len(other.batches) == 9
    assert all(map(torch.equal, bare.batches, other.batches))
    assert all(map(torch.equal, bare.weights, other.weights))
    assert bare_loss[1:] != other_loss[1:]  # what was attached did something
    # the ramp starts at 0: until it rises, losses and so labels are the same to the bit
    assert (bare_loss[0] == other_loss[0]) == (name == "dropblock")


def test_batches_are_the_training_set_in_another_order_each_epoch():
    images = prepare(TINY)[0].train_images
    inputs, _ = watched(TINY)
    epochs = [torch.cat(inputs.batches[i : i + 3]) for i in (0, 3, 6)]
    for epoch in epochs:
        assert torch.equal(epoch.flatten(1).sum(1).sort()[0], images.flatten(1).sum(1).sort()[0])
    assert not torch.equal(epochs[0], epochs[1])


def test_seeds_differ_in_everything():
    one, _ = watched(TINY)
    other, _ = watched(replace(TINY, seed=6))
    assert not torch.equal(one.batches[0], other.batches[0])
    assert not torch.equal(one.weights[0], other.weights[0])


def test_a_run_repeats_and_leaves_the_global_generator_alone():
    config = replace(TINY, spec=SPECS["dropout"])
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = train(config)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    other = train(config)
    assert replace(one, seconds=0) == replace(other, seconds=0)


def test_on_epoch_is_called_after_each_epoch():
    epochs: list[int] = []
    train(TINY, epochs.append)
    assert epochs == [0, 1, 2]


def share_variance(p: float, size: int = 4, block: int = 3) -> float:
    """Variance of a plane's dropped share under exact calibration, by listing all seed sets."""
    starts = list(itertools.product(range(size - block + 1), repeat=2))
    chosen = np.array(list(itertools.product([0, 1], repeat=len(starts))))
    shares = np.zeros(len(chosen))
    for row, seeds in enumerate(chosen):
        plane = np.zeros((size, size), dtype=bool)
        for (i, j), seed in zip(starts, seeds, strict=True):
            plane[i : i + block, j : j + block] |= bool(seed)
        shares[row] = plane.mean()

    def weights(gamma: float) -> np.ndarray:
        return np.prod(np.where(chosen, gamma, 1 - gamma), axis=1)

    gamma = brentq(lambda g: weights(g) @ shares - p, 0, 1, xtol=1e-12)
    return float(weights(gamma) @ shares**2 - p**2)


def test_rates_of_the_quick_study_follow_its_schedule():
    """Nominal rates equal the formula; realized ones lie within z = 4.5, of 120, or 4, of one."""
    config = read_study(QUICK).conditions["DropBlock2d"]
    channels = [8, 32, 32, 32]
    small = {**config.model_args, "channels": channels}
    config = replace(config, model_args=small, train_images=100, threads=1)
    result = train(config)

    formula = np.array([0.5 * epoch / 39 for epoch in range(40)])
    assert list(result.nominal) == [f"layer{i}.0/DropBlock2d" for i in (2, 3, 4)]
    variance = np.array([share_variance(p) for p in formula]) / (100 * 32)
    for key, nominal in result.nominal.items():
        assert nominal == pytest.approx(formula, rel=1e-12)
        realized = np.array(result.realized[key], dtype=float)
        assert realized[0] == 0
        z = (realized[1:] - formula[1:]) / np.sqrt(variance[1:])
        assert abs(z).max() < 4.5
    [row] = summarize([Run("ramp", config, result)], "ramp")
    assert row.nominal == pytest.approx(0.25)
    assert abs(row.realized - 0.25) / np.sqrt(variance.sum() / 3 / 40**2) < 4


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("epochs", 0, "epochs must be at least 1, got 0"),
        ("threads", -1, "threads must be at least 1, got -1"),
        ("label_noise", 1.5, r"label_noise must be in \[0, 1\], got 1.5"),
        ("label_noise", float("nan"), "label_noise must be .* got nan"),
        ("max_lr", 0.0, "max_lr must be positive, got 0.0"),
        ("weight_decay", -1.0, "weight_decay must be 0 or more, got -1.0"),
        ("model", "resnet81", "model must be one that timm knows, got 'resnet81'"),
        ("spec", {"layer4.0": {"DropBlok2d": {"p": 0.1}}}, "DropBlock2d"),
    ],
)
def test_bad_config_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **{field: value})


def test_what_does_not_fit_the_model_is_refused_before_training():
    with pytest.raises(SpecError, match="layer9"):
        train(replace(TINY, spec={"layer9.0": {"Dropout2d": {"p": 0.5}}}))
    with pytest.raises(ValueError, match=r"model_args do not fit resnet18: .*chanels"):
        train(replace(TINY, model_args={"chanels": [8]}))


def test_divergence_is_told():
    with pytest.raises(FloatingPointError, match="smaller max_lr"):
        train(replace(TINY, max_lr=1e30))


class RightInEvaluation(nn.Module):
    """Classifies by the value of the first pixel, and in training mode everything as 0."""

    def forward(self, images: Tensor) -> Tensor:
        classes = images[:, 0, 0, 0].long() * (not self.training)
        return nn.functional.one_hot(classes, 10).float()


def test_evaluation_is_the_share_of_right_answers_in_evaluation_mode():
    labels = torch.arange(600) % 10
    images = labels.float().reshape(-1, 1, 1, 1)
    images[:150] += (labels[:150] < 9).reshape(-1, 1, 1, 1)  # 135 wrong ones
    split = Split(images[:1], labels[:1], images, labels)
    model = RightInEvaluation().train()
    assert evaluate(model, split) == pytest.approx(465 / 600)
