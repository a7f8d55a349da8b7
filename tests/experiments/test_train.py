"""A run: the loop that it says it is, paired with the others of its seed, rates as scheduled."""

import itertools
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from timm.models.resnet import ResNet
from torch import Tensor, nn

from dropblock_hooks import SpecError
from experiments.config import Config, Runtime
from experiments.data import load_data
from experiments.loaders import train_loader
from experiments.log import read_metrics
from experiments.models import prepare
from experiments.train import Stopped, train

SMALL = {"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8], "output_stride": 8}
TINY = Config(
    model_args=SMALL,
    data="fake",
    image_size=24,
    train_images=60,
    batch_size=20,
    epochs=3,
    label_noise=0.2,
    seed=5,
)
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
        if isinstance(module, ResNet) and module.training and args[0].any():  # no trial
            self.weights = self.weights or [p.detach().clone() for p in module.parameters()]
            self.batches.append(args[0].clone())


def watched(config: Config) -> tuple[Inputs, list[float]]:
    inputs = Inputs()
    handle = nn.modules.module.register_module_forward_pre_hook(inputs)
    try:
        return inputs, [epoch.loss for epoch in train(config).epochs]
    finally:
        handle.remove()


@pytest.fixture(scope="module")
def bare():
    """What the run without regularizers was given, and its losses; by augmentation."""
    return cache(lambda augmentation: watched(replace(TINY, augmentation=augmentation)))


@pytest.mark.parametrize(
    ("name", "augmentation"),
    [
        ("dropout", "none"),
        pytest.param("dropblock", "none", marks=pytest.mark.slow),
        pytest.param("dropblock", "crop-flip", marks=pytest.mark.slow),
    ],
)
def test_conditions_of_one_seed_are_paired(bare, name, augmentation):
    tiny = replace(TINY, augmentation=augmentation)
    bare, bare_loss = bare(augmentation)
    torch.rand(3)
    np.random.rand(3)
    other, other_loss = watched(replace(tiny, spec=SPECS[name]))
    assert len(bare.batches) == len(other.batches) == 9
    assert all(map(torch.equal, bare.batches, other.batches))
    assert all(map(torch.equal, bare.weights, other.weights))
    assert bare_loss[1:] != other_loss[1:]  # what was attached did something
    # the ramp starts at 0: until it rises, losses and so labels are the same to the bit
    assert (bare_loss[0] == other_loss[0]) == (name == "dropblock")


@pytest.mark.slow
def test_mixup_mixes_all_conditions_of_a_seed_alike(bare):
    tiny = replace(TINY, mixup=0.4, label_smoothing=0.1)
    mixed, mixed_loss = watched(tiny)
    np.random.rand(3)
    other, other_loss = watched(replace(tiny, spec=SPECS["dropblock"]))
    assert all(map(torch.equal, mixed.batches, other.batches))
    assert mixed_loss[0] == other_loss[0]
    plain, _ = bare("none")
    assert not torch.equal(plain.batches[0], mixed.batches[0])


def test_a_replica_has_the_same_split_and_noise_and_another_beginning_order_and_masks(bare):
    one, one_loss = bare("none")
    other, other_loss = watched(replace(TINY, replica=1))
    assert not torch.equal(one.weights[0], other.weights[0])
    assert not torch.equal(one.batches[0], other.batches[0])
    sums = [torch.cat(i.batches[:3]).flatten(1).sum(1).sort()[0] for i in (one, other)]
    assert torch.equal(*sums)
    data = [load_data(c, Path("data")) for c in (TINY, replace(TINY, replica=1))]
    labels = [d.train.__getitems__([(0, i) for i in range(60)])[1] for d in data]
    assert torch.equal(*labels)
    assert one_loss != other_loss


@pytest.mark.slow
def test_seeds_differ_in_everything(bare):
    one, _ = bare("none")
    other, _ = watched(replace(TINY, seed=6))
    assert not torch.equal(one.batches[0], other.batches[0])
    assert not torch.equal(one.weights[0], other.weights[0])


def timeless(result):
    """A result without what differs from run to run."""
    epochs = [replace(epoch, seconds=0) for epoch in result.epochs]
    return replace(result, seconds=0, memory=0, epochs=epochs)


def test_a_run_repeats_and_leaves_the_global_generators_alone():
    config = replace(TINY, spec=SPECS["dropout"], mixup=0.2, augmentation="flip", epochs=1)
    torch.manual_seed(1)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    one = train(config)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    torch.manual_seed(2)
    np.random.seed(2)
    assert timeless(train(config)) == timeless(one)


def test_the_loop_is_the_one_that_torch_users_write():
    """Weights after two epochs, to the bit, and the numbers of each epoch."""
    config = replace(TINY, epochs=2, clip_grad_norm=0.5, label_smoothing=0.0)
    result = train(config)

    data = load_data(config, Path("data"))
    model, _ = prepare(config, data)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 5e-4}],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 6)
    loader = train_loader(data, config, Runtime())
    model.train()
    for epoch in range(2):
        loader.begin(epoch, 0)
        losses, right, norms = [], 0, []
        for images, labels in loader:
            optimizer.zero_grad()
            scores = model(images)
            loss = nn.functional.cross_entropy(scores, labels)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            lr = optimizer.param_groups[0]["lr"]
            if len(losses) + 3 * epoch < 5:
                schedule.step()
            losses.append(loss.item())
            right += (scores.argmax(1) == labels).sum().item()
        told = result.epochs[epoch]
        assert told.loss == pytest.approx(sum(losses) / 3, rel=1e-12)
        assert told.accuracy == right / 60
        assert told.lr == lr
        assert told.grad_norm == pytest.approx(sum(norms) / 3, rel=1e-6)
        assert told.grad_norm_clipped == pytest.approx(sum(min(n, 0.5) for n in norms) / 3)
    model.eval()
    with torch.no_grad():
        images, labels = data.tests["clean"].__getitems__([(0, i) for i in range(64)])
        scores = model(images)
    assert result.scores["clean"] == (scores.argmax(1) == labels).double().mean().item()
    loss = nn.functional.cross_entropy(scores.double(), labels)
    assert result.test_loss == pytest.approx(loss.item(), rel=1e-5)
    assert list(result.scores) == ["clean", "occluded", "noisy"]


@pytest.mark.slow
def test_masks_follow_from_seed_and_replica_alone():
    def dropped(**fields):
        spec = {"layer[34].0": {"DropBlock2d": {"p": 0.25, "block_size": 3}}}
        return [epoch.realized for epoch in train(replace(TINY, spec=spec, **fields)).epochs]

    assert dropped() == dropped(lr=0.01, label_noise=0.5, augmentation="flip")
    assert dropped() != dropped(seed=6)
    assert dropped() != dropped(replica=1)


@pytest.mark.slow
def test_the_average_of_the_weights_is_what_is_tested():
    learning = replace(TINY, data="digits", label_noise=0.0, train_images=200, epochs=8)
    untrained, _ = prepare(learning, data := load_data(learning, Path("data")))
    untrained.eval()
    images, labels = data.tests["clean"].__getitems__([(0, i) for i in range(1597)])
    with torch.no_grad():
        first = nn.functional.cross_entropy(untrained(images), labels).item()
    last = train(learning).test_loss
    assert last < first - 0.1
    frozen = train(replace(learning, ema=0.999999))  # stays all but where the weights began
    assert frozen.test_loss == pytest.approx(first, abs=1e-2)
    assert train(replace(learning, ema=0.0)).test_loss == last


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("64-true", marks=pytest.mark.slow),
        pytest.param("bf16-true", marks=pytest.mark.slow),
        "bf16-mixed",
    ],
)
def test_the_average_is_tested_in_the_precision_of_the_training(precision):
    config = replace(TINY, precision=precision, epochs=2)
    assert train(replace(config, ema=0.0)).test_loss == train(config).test_loss


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "adamw", "lr": 1e-3, "lr_schedule": "cosine", "warmup_epochs": 1},
        {"lr_schedule": "step", "lr_schedule_args": {"decay_epochs": 1, "decay_rate": 0.5}},
        {"precision": "bf16-mixed", "spec": SPECS["dropblock"]},
        pytest.param(
            {"model": "torchvision:squeezenet1_1", "model_args": {}, "lr": 0.01, "image_size": 40},
            marks=pytest.mark.slow,
        ),
        {"model": "vit_tiny_patch16_224", "model_args": {"img_size": 24, "depth": 1}, "lr": 0.01},
        pytest.param({"data": "digits"}, marks=pytest.mark.slow),
        {"train_images": 41},  # a batch of one image: its maps have more than one value
    ],
    ids=["adamw", "step", "bfloat16", "torchvision", "vit", "digits", "one image"],
)
def test_what_timm_and_torchvision_have_can_be_trained(fields):
    result = train(replace(TINY, epochs=2, **fields))
    assert result.status == "finished"
    assert [epoch.epoch for epoch in result.epochs] == [0, 1]


def test_learning_rates_of_timm_move_with_every_step():
    schedule = {"lr_schedule": "cosine", "warmup_epochs": 1}
    rates = [epoch.lr for epoch in train(replace(TINY, epochs=4, **schedule)).epochs]
    # 3 steps an epoch: warm from 1e-5 to .1 over 3, then half a cosine over 12 steps
    steps = [
        1e-5 + 2 * (0.1 - 1e-5) / 3,
        *(0.05 * (1 + math.cos(math.pi * s / 12)) for s in (5, 8, 11)),
    ]
    assert rates == pytest.approx(steps, rel=1e-6)


def test_metrics_and_tensorboard_are_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = replace(TINY, spec=SPECS["dropblock"], clip_grad_norm=0.1)
    heard = []
    result = train(config, Runtime(log="tensorboard"), tmp_path, on_epoch=heard.append)
    assert heard == result.epochs == read_metrics(tmp_path / "metrics.jsonl")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = events.Tags()["scalars"]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(
        [epoch.loss for epoch in result.epochs]
    )
    key = "reg/layer3.0/DropBlock2d"
    assert [e.value for e in events.Scalars(f"{key}/p")] == pytest.approx([0, 0.25, 0.5])
    assert f"{key}/realized_rate" in tags
    assert {"train/lr", "train/accuracy", "train/grad_norm", "train/grad_norm_clipped"} <= set(tags)
    assert {"test/accuracy_clean", "test/accuracy_occluded", "test/accuracy_noisy"} <= set(tags)


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


def test_rates_follow_their_schedule():
    """Nominal rates equal the formula; realized ones lie within z = 4.5, of 57, or 4, of one."""
    ramp = {"LinearSchedule": {"start": 0.0, "stop": 0.5, "epochs": 20}}
    spec = {"layer[234].0": {"DropBlock2d": {"p": ramp, "block_size": 3}}}
    small = {**SMALL, "channels": [8, 32, 32, 32]}
    result = train(Config(spec, model_args=small, data="fake", train_images=50, epochs=20))
    formula = np.array([0.5 * epoch / 19 for epoch in range(20)])
    variance = np.array([share_variance(p) for p in formula]) / (50 * 32)
    everything = []
    for key in (f"layer{i}.0/DropBlock2d" for i in (2, 3, 4)):
        nominal = [epoch.nominal[key] for epoch in result.epochs]
        assert nominal == pytest.approx(formula, rel=1e-12)
        realized = np.array([epoch.realized[key] for epoch in result.epochs], dtype=float)
        assert realized[0] == 0
        z = (realized[1:] - formula[1:]) / np.sqrt(variance[1:])
        assert abs(z).max() < 4.5
        everything.append(realized.mean())
    assert abs(np.mean(everything) - 0.25) / np.sqrt(variance.sum() / 3 / 20**2) < 4


def test_a_site_without_a_probability_has_no_nominal_rate():
    result = train(
        replace(TINY, epochs=1, spec={"layer4.0": {"ClampGrad": {"max": 1.0, "min": -1.0}}})
    )
    assert list(result.epochs[0].nominal.values()) == [None]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_args": {"chanels": [8]}}, r"model_args do not fit resnet18: .*chanels"),
        ({"optimizer_args": {"epsilon": 1}}, "optimizer_args do not fit sgd: .*epsilon"),
        ({"lr_schedule_args": {"cycles": 1}}, "lr_schedule onecycle can't be made: .*cycles"),
        ({"mixup": 0.2, "batch_size": 15}, "mixup takes batches of an even number"),
        ({"mixup": 0.2, "train_images": 25}, "mixup takes batches of an even number"),
        ({"model": "vit_tiny_patch16_224", "model_args": {}}, "fails on a 24x24 image: "),
        (
            {"model_args": {"layers": [1, 1, 1, 1]}, "train_images": 41},
            r"a 24x24 image that is alone in a batch \(20 of 41 images\): .*more than 1 value",
        ),
        ({"train_images": 513}, "train_images must be"),
    ],
)
def test_what_does_not_fit_is_told_before_training(fields, message):
    with pytest.raises(ValueError, match=message):
        train(replace(TINY, **fields))


def test_a_spec_that_does_not_fit_the_model_is_told_before_training():
    with pytest.raises(SpecError, match="layer9"):
        train(replace(TINY, spec={"layer9.0": {"Dropout2d": {"p": 0.5}}}))


def test_divergence_is_a_result(tmp_path):
    result = train(replace(TINY, lr=1e30), out=tmp_path)
    assert (result.status, result.scores, result.test_loss) == ("diverged", {}, None)
    assert read_metrics(tmp_path / "metrics.jsonl") == result.epochs == []


@pytest.mark.slow
def test_a_compiled_model_trains_with_the_same_batches_and_counts(tmp_path):
    config = replace(TINY, spec=SPECS["dropblock"], compile=True)
    result = train(config, out=tmp_path)
    eager = train(replace(config, compile=False))
    assert result.epochs[0].loss == pytest.approx(eager.epochs[0].loss, rel=1e-4)  # the rate is 0
    for epoch in result.epochs[1:]:
        for key, asked in epoch.nominal.items():
            assert epoch.realized[key] == pytest.approx(asked, rel=0.2)
    assert result.status == "finished"
    weights = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"]
    assert not any(name.startswith("_orig_mod") for name in weights)


@pytest.mark.slow
def test_a_compiled_run_is_the_same_whatever_the_process_compiled_before(tmp_path):
    config = replace(TINY, spec=SPECS["dropout"], compile=True, ema=0.9)
    config = replace(config, train_images=50, batch_size=16, epochs=2)  # a last batch of 2
    first = train(config)
    assert timeless(train(config)) == timeless(first)
    asked = iter([False, False, False, False, False, True])
    with pytest.raises(Stopped):
        train(config, out=tmp_path, stop=asked.__next__)
    assert timeless(train(config, out=tmp_path)) == timeless(first)


def test_a_run_whose_last_step_was_too_far_diverged():
    result = train(replace(TINY, lr=1e30, epochs=1, train_images=20))
    assert (result.status, result.scores, result.test_loss) == ("diverged", {}, None)
    assert math.isfinite(result.epochs[0].loss)


def test_a_model_with_other_outputs_in_training_is_told():
    with pytest.raises(ValueError, match="googlenet gives no scores alone while it trains"):
        train(replace(TINY, model="torchvision:googlenet", model_args={"init_weights": False}))
