"""Scores over the epochs: they leave no trace in the training, and the best epoch is kept."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments import data as data_module
from experiments.config import Config, Runtime
from experiments.data import load_data
from experiments.datasets.sources import Pool, digits, fake
from experiments.log import read_metrics
from experiments.running.directories import read_result, seal
from experiments.running.progress import Shown, describe_run
from experiments.scoring import Scorer
from experiments.train import train

from .test_checkpoint import in_parts, tensors
from .test_train import SPECS, TINY, timeless

NOWHERE = Path("no such folder")
HELD = replace(TINY, train_images=120, validation=0.5)  # trained on the 60 images of TINY
LEARNS = replace(  # scores go up and down
    TINY, data="digits", image_size=16, train_images=200, validation=0.3, epochs=4, seed=1, lr=0.3,
    lr_schedule="constant",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    """400 digits in all: those not trained on are the test, three times."""

    def few(size):
        every = digits(size)
        return replace(every, train=Pool(every.train.images[:400], every.train.labels[:400]))

    monkeypatch.setattr("experiments.datasets.sources.digits", few)


def unscored(result):
    """A result without times, and without what validation and test say of the epochs."""
    epochs = [
        replace(epoch, validation=None, validation_loss=None, test=None)
        for epoch in timeless(result).epochs
    ]
    return replace(timeless(result), epochs=epochs, best=None)


RUNS = {
    "dropblock": {"spec": SPECS["dropblock"]},
    "active in evaluation, mixup, average": {
        "spec": {"layer[34].0": "Dropout2d(p=0.5, active='always')"},
        "mixup": 0.4,
        "ema": 0.9,
    },
    "gradients, augmentation": {
        "spec": {"layer4.0": ["GaussianNoise(std=0.1)", "ClipGradNorm(max_norm=0.01)"]},
        "augmentation": "crop-flip",
    },
    "half": {"spec": SPECS["dropout"], "precision": "bf16-true", "ema": 0.9},
    "compiled": {"spec": {"layer4.0": "Dropout2d(p=0.5)"}, "compile": True, "epochs": 2},
}
QUICK = ("dropblock", "active in evaluation, mixup, average")


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(fields, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, fields in RUNS.items()
    ],
)
def test_training_is_the_same_with_and_without_scores_over_epochs(tmp_path, fields):
    fields = {"label_noise": 0.0, **fields}
    plain = train(replace(TINY, **fields), out=tmp_path / "plain")
    scored = train(replace(HELD, **fields, test_epochs=True), out=tmp_path / "scored")
    assert unscored(scored) == timeless(plain)
    assert all(None not in (e.validation, e.validation_loss, e.test) for e in scored.epochs)
    one, other = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("plain", "scored")
    )
    for state in (one, other):  # weights, averages, random states, and what sites have counted
        for process in state["processes"]:
            process["totals"].pop("seconds")
        state["plain"] = repr([process["attached"] for process in state["processes"]])
    assert one["plain"] == other["plain"]
    found = dict(tensors(other))
    assert all(torch.equal(found[name], value) for name, value in tensors(one))


def test_the_best_epoch_is_the_first_of_the_highest_and_its_weights_are_tested():
    result = train(replace(LEARNS, test_epochs=True))
    curve = [epoch.validation for epoch in result.epochs]
    best = result.best
    assert (best.epoch, best.validation) == (curve.index(max(curve)), max(curve))
    assert 0 < best.epoch < 3  # so that it is neither where training began nor ended
    tests = [epoch.test for epoch in result.epochs]
    assert best.scores["clean"] == tests[best.epoch] != tests[-1] == result.scores["clean"]
    assert list(best.scores) == ["clean", "occluded", "noisy"]


@pytest.mark.parametrize(
    ("curve", "chosen"),
    [
        ([0.5, 0.7, 0.7], 1),
        ([0.7, 0.5, 0.7], 0),
        ([0.1, 0.2, 0.3], 2),
        ([0.0, 0.0, 0.0], 0),
        ([(0.9, math.nan), 0.1, (0.9, math.inf)], 1),
    ],
)
def test_of_equal_epochs_the_first_is_the_best(curve, chosen, monkeypatch):
    told = iter(entry if isinstance(entry, tuple) else (entry, 1.0) for entry in curve)
    real = Scorer.score

    def score(self, model, images, name):
        return next(told) if name == "validation" else real(self, model, images, name)

    monkeypatch.setattr(Scorer, "score", score)
    result = train(HELD)
    assert result.best.epoch == chosen
    assert (result.best.scores == result.scores) or chosen < 2
    losses = [epoch.validation_loss for epoch in result.epochs]
    assert losses == [None if isinstance(entry, tuple) else 1.0 for entry in curve]


@pytest.mark.parametrize(
    "fields",
    [{"spec": SPECS["dropblock"]}, pytest.param({"ema": 0.3}, marks=pytest.mark.slow)],
    ids=["dropblock", "average"],
)
@pytest.mark.parametrize("batches", [5, pytest.param(7, marks=pytest.mark.slow)])
def test_a_run_that_was_stopped_has_the_same_best_epoch(tmp_path, fields, batches):
    config = replace(LEARNS, **fields)  # 7 batches an epoch: after it, or within
    whole = train(config, out=tmp_path / "whole")
    parts, stops = in_parts(config, tmp_path / "parts", batches)
    assert stops > 3
    assert whole.best.epoch < 3
    assert timeless(parts) == timeless(whole)
    one, other = (
        dict(tensors(torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)))
        for name in ("whole", "parts")
    )
    assert one.keys() == other.keys()
    assert any(name.startswith("/best/weights") for name in one)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert timeless(train(config, out=tmp_path / "whole")) == timeless(whole)  # killed at the end


def test_the_average_of_the_weights_is_what_is_scored():
    config = replace(HELD, data="digits", epochs=2)
    plain = train(config)
    assert timeless(train(replace(config, ema=0.0))) == timeless(plain)
    still = train(replace(config, ema=0.999999))
    first, second = (epoch.validation_loss for epoch in still.epochs)
    assert first == pytest.approx(second, abs=1e-3) != plain.epochs[1].validation_loss


def test_without_validation_nothing_is_chosen(tmp_path):
    result = train(replace(TINY, epochs=1), out=tmp_path)
    assert result.best is None
    assert result.epochs == [replace(result.epochs[0], validation=None, test=None)]
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["best"] is None
    tested = train(replace(TINY, epochs=1, test_epochs=True))
    assert (tested.best, tested.epochs[0].validation) == (None, None)
    assert tested.epochs[0].test == tested.scores["clean"] == result.scores["clean"]


def test_a_run_that_diverged_has_no_best_epoch(tmp_path):
    result = train(replace(HELD, lr=1e30), out=tmp_path)
    assert (result.status, result.best) == ("diverged", None)
    steep = {"lr_schedule": "step", "lr_schedule_args": {"decay_epochs": 1, "decay_rate": 1e30}}
    after = train(replace(HELD, **steep))  # the first epoch is a good one
    assert (after.status, after.best, len(after.epochs)) == ("diverged", None, 1)
    assert math.isfinite(after.epochs[0].validation_loss)
    late = train(replace(HELD, lr=1e30, epochs=1, batch_size=60))
    assert (late.status, late.best, late.epochs[0].validation_loss) == ("diverged", None, None)


def test_scores_over_epochs_are_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = train(replace(LEARNS, test_epochs=True), Runtime(log="tensorboard"), tmp_path)
    assert read_metrics(tmp_path / "metrics.jsonl") == result.epochs
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["validation"] for line in lines] == [e.validation for e in result.epochs]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    curves = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in ("validation/accuracy", "validation/loss", "test/accuracy_clean")
    }
    for tag, name in zip(curves, ("validation", "validation_loss", "test"), strict=True):
        steps, values = zip(*curves[tag][:4], strict=True)
        assert steps == (0, 1, 2, 3)
        assert values == pytest.approx([getattr(epoch, name) for epoch in result.epochs])
    [best], [epoch] = (events.Scalars(f"best/{name}") for name in ("accuracy_noisy", "epoch"))
    assert best.value == pytest.approx(result.best.scores["noisy"])
    assert (best.step, epoch.value) == (4, result.best.epoch)


def test_progress_tells_the_scores_of_the_last_epoch(tmp_path):
    train(replace(HELD, epochs=2, test_epochs=True), out=tmp_path)
    run = Shown("none, seed 1", tmp_path, 2)
    run.look()
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    end = f", validation {100 * last.validation:.2f} %, test {100 * last.test:.2f} %"
    assert describe_run(run) == f"  none, seed 1: epoch 2/2, loss {last.loss:.3f}{end}"


def test_the_best_epoch_is_read_back_and_older_results_have_none(tmp_path):
    result = train(HELD)
    for path, sealed in (("new", result), ("old", replace(result, best=None))):
        (tmp_path / path).mkdir()
        for name in ("config.yaml", "environment.json"):
            (tmp_path / path / name).touch()
        seal(tmp_path / path, "run", sealed)
        assert read_result(tmp_path / path, "run") == sealed
    assert result.best is not None


@pytest.mark.parametrize("name", ["digits", "fake"])
@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_validation_images_are_a_part_of_those_drawn_wrong_labels_included(name, noise):
    whole, split = (
        load_data(
            Config(data=name, train_images=200, label_noise=noise, validation=share, seed=4),
            NOWHERE,
        )
        for share in (0.0, 0.25)
    )
    assert (len(split.train), len(split.validation)) == (150, 50)
    numbers = torch.cat([split.train.numbers, split.validation.numbers])
    assert torch.equal(numbers, whole.train.numbers)
    labels = torch.cat([split.train.labels, split.validation.labels])
    assert torch.equal(labels, whole.train.labels)
    assert torch.equal(split.tests["clean"].numbers, whole.tests["clean"].numbers)
    images, given = split.validation.__getitems__([(0, 7)])
    expected, _ = whole.train.__getitems__([(0, 157)])
    assert torch.equal(images, expected)
    assert given.item() == whole.train.labels[157]
    assert whole.validation is None


def test_another_seed_holds_out_other_images_and_a_replica_the_same():
    held = [
        load_data(replace(HELD, **fields), NOWHERE).validation.numbers
        for fields in ({}, {"replica": 1}, {"seed": 6})
    ]
    assert torch.equal(held[0], held[1])
    assert not torch.equal(held[0], held[2])


@pytest.mark.parametrize(
    ("share", "part", "count"),
    [(0.9, "training", 12), (0.1, "validation", 12), (0.001, "validation", 0)],
)
def test_a_share_that_leaves_a_class_empty_is_refused(share, part, count):
    with pytest.raises(
        ValueError,
        match=rf"^validation must leave images of every class .*, got {share} of 120 images: class "
        rf"\d has none of the {count} in {part}; take another share, or more train_images$",
    ):
        load_data(replace(HELD, validation=share), NOWHERE)


def test_the_class_that_is_named_is_the_empty_one(monkeypatch):
    def of_nine(size):
        source = fake(size)
        labels = source.train.labels.clone()
        labels[labels == 7] = 6
        return replace(source, train=Pool(source.train.images, labels))

    monkeypatch.setattr("experiments.datasets.sources.fake", of_nine)
    with pytest.raises(ValueError, match="class 7 has none of the 60 in training"):
        load_data(replace(HELD, label_noise=0.0), NOWHERE)


@pytest.mark.parametrize("share", [-0.1, 1.0, math.nan])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match=r"validation must be in \[0, 1\), got"):
        Config(validation=share)


def test_a_source_that_is_split_already_keeps_its_split(monkeypatch):
    source = fake(24)
    train, test = (
        Pool(part.images[:count], part.labels[:count])
        for part, count in ((source.train, 60), (source.test, 30))
    )
    own = replace(source, train=train, validation=test)
    monkeypatch.setattr(data_module, "load_source", lambda *_: own)
    data = load_data(replace(TINY, validation=0.5, label_noise=0.2), NOWHERE)
    assert (len(data.train), len(data.validation)) == (60, 30)
    assert (data.validation.labels != own.validation.labels).sum() == 6
    clean = load_data(replace(TINY, validation=0.5, label_noise=0.0), NOWHERE)
    assert torch.equal(clean.validation.labels, own.validation.labels)
