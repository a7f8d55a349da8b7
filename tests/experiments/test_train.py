"""One run: pairing by seed, bit-exact resume, scores, divergence."""

import random
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from experiments import train as module
from experiments.config import Run
from experiments.data import load_data
from experiments.loading import Seeded, batches
from experiments.metrics import Metric
from experiments.models import make_model
from experiments.train import moved, train

SPEC = {"conv": {"Dropout2d": {"p": 0.5}}}


def make(**fields):
    return Run(
        **{"model": "mine:net", "data": "mine:stripes", "epochs": 3, "batch_size": 8, **fields}
    )


def weights_of(run):
    model, _ = make_model(run, load_data(run))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def seen_by(run, epoch=0):
    return [x for x, _ in batches(load_data(run).train, run, epoch)]


def test_conditions_of_a_seed_share_weights_order_and_augmentation(folder):
    bare, dropped = make(seed=3), make(seed=3, spec=SPEC)
    assert torch.equal(weights_of(bare), weights_of(dropped))
    torch.manual_seed(11)  # as if masks had been drawn
    first = seen_by(bare, 1)
    torch.rand(1000)
    assert all(map(torch.equal, first, seen_by(dropped, 1)))


@pytest.mark.parametrize("change", [{"seed": 4}, {"replica": 1}], ids=["seed", "replica"])
def test_another_seed_or_replica_changes_them(folder, change):
    run, other = make(seed=3), make(**{"seed": 3, **change})
    assert not torch.equal(weights_of(run), weights_of(other))
    assert not torch.equal(seen_by(run)[0], seen_by(other)[0])
    assert not torch.equal(seen_by(run)[0], seen_by(run, 1)[0])


def test_masks_move_nothing_else(folder):
    """With a rate of 0 a regularizer draws masks or not, and the training is that without it."""
    bare = train(make(seed=1))
    off = train(make(seed=1, spec={"conv": {"Dropout2d": {"p": 0.0}}}))
    assert [row["loss"] for row in bare.epochs] == [row["loss"] for row in off.epochs]
    assert bare.scores == off.scores
    dropped = train(make(seed=1, spec=SPEC))
    assert dropped.epochs[0]["loss"] != bare.epochs[0]["loss"]
    assert dropped.epochs[0]["realized"] == pytest.approx(0.5, abs=0.25)


def test_an_item_draws_from_its_own_seed_and_puts_the_generators_back(folder):
    class Draws:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return torch.rand(1).item(), random.random(), np.random.rand()

    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    seeded = Seeded(Draws(), seed=1, epoch=2)
    first = seeded[1]
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
    assert seeded[1] == first
    assert seeded[2] != first != Seeded(Draws(), 1, 3)[1]
    assert torch.equal(seeded.batch([1])[0], default_collate([first])[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_that_load_change_nothing(folder, workers):
    data = load_data(make())
    got = [x for x, _ in batches(data.train, make(), 0, workers)]
    assert all(map(torch.equal, got, seen_by(make())))


@pytest.mark.parametrize("schedule", ["onecycle", "cosine", "constant"])
def test_a_run_that_was_interrupted_ends_the_same(folder, schedule, tmp_path):
    run = make(seed=5, schedule=schedule, spec={"conv": {"Dropout2d": {"p": 0.5}}})
    whole = train(run)

    class Killed(Exception):
        pass

    def kill(row):
        raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            train(run, tmp_path / "run", kill)
    rest = train(run, tmp_path / "run")
    for name in ("loss", "lr", "nominal", "realized"):
        assert [row[name] for row in rest.epochs] == [row[name] for row in whole.epochs]
    assert rest.scores == whole.scores


def test_learning_rates_follow_the_schedule(folder):
    rates = {
        s: [row["lr"] for row in train(make(schedule=s, lr=0.2)).epochs]
        for s in ("cosine", "constant")
    }
    assert rates["constant"] == [0.2] * 3
    steps = [2, 5, 8]  # the last of each epoch of three steps
    cosine = [0.1 * (1 + np.cos(np.pi * step / 9)) for step in steps]
    assert rates["cosine"] == pytest.approx(cosine)


def test_schedules_of_a_spec_take_their_length_from_the_run(folder):
    run = make(epochs=3, spec={"conv": "Dropout2d(p=LinearSchedule(0, 0.4))"})
    assert [row["nominal"] for row in train(run).epochs] == pytest.approx([0.0, 0.2, 0.4])


def test_own_loss_and_metrics(folder):
    once, twice = train(make()), train(make(loss="mine:loss", loss_args={"weight": 2.0}))
    assert twice.epochs[0]["loss"] > 1.5 * once.epochs[0]["loss"]
    pytest.importorskip("torchmetrics")
    args = {"task": "multiclass", "num_classes": 3, "average": "macro"}
    run = make(metric="torchmetrics:Accuracy", metric_args=args)
    assert train(run).scores == pytest.approx(train(make(metric="mine:recall")).scores)


def test_scores_are_those_of_a_plain_loop(folder):
    run, kept = make(seed=2), {}
    original = module.make_model

    def keep(*args):
        kept["model"], attached = original(*args)
        return kept["model"], attached

    module.make_model = keep
    try:
        result = train(run)
    finally:
        module.make_model = original
    data = load_data(run)
    for name, test in {**data.tests, "validation": data.validation}.items():
        seeded = Seeded(test, run.seed, -1)
        x, y = default_collate([seeded[index] for index in range(len(test))])
        right = (kept["model"].eval()(x).argmax(1) == y).double().mean().item()
        assert result.scores[name] == pytest.approx(right, abs=1e-12)
    assert result.chance == pytest.approx(1 / 3)
    assert set(train(run, tests=False).scores) == {"validation"}


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("accuracy", 1 / 3), ("mine:recall", 1 / 3), ("mine:refusing_metric", None)],
)
def test_chance_is_the_metric_of_the_most_frequent_class(folder, metric, expected):
    outputs, targets = torch.randn(15, 3), torch.arange(15) % 3
    metric = Metric(make(metric=metric))
    metric.add(outputs, targets)
    assert metric.chance() == (None if expected is None else pytest.approx(expected))


def test_targets_that_are_no_classes_have_no_chance(folder):
    metric = Metric(make(metric="torch.nn:MSELoss"))
    metric.add(torch.ones(4, 1), torch.zeros(4, 1))
    assert (metric.value("clean"), metric.chance()) == (1.0, None)


def test_a_run_that_diverges_says_so(folder):
    result = train(make(lr=1e30, schedule="constant"))
    assert result.status == "diverged"
    assert result.scores == {}


def test_tensors_in_containers_are_moved_and_the_containers_keep_their_types():
    class Boxes(NamedTuple):
        corners: torch.Tensor
        label: str

    x = torch.zeros(2)
    batch = OrderedDict(images=[x, (x, 3)], boxes=Boxes(x, "cat"), scale=None)
    meta = moved(batch, torch.device("meta"))
    assert isinstance(meta, OrderedDict)
    assert list(meta) == ["images", "boxes", "scale"]
    first, (second, number) = meta["images"]
    assert [first.device.type, second.device.type, number] == ["meta", "meta", 3]
    assert isinstance(meta["boxes"], Boxes)
    assert (meta["boxes"].corners.device.type, meta["boxes"].label) == ("meta", "cat")
    assert batch["images"][0] is x  # the batch itself stays


def test_the_generators_of_the_caller_stay(folder):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    train(make(spec=SPEC, epochs=1))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_and_clipping_are_near_float32(folder, precision):
    fields = {"seed": 2, "clip_grad_norm": 0.5, "lr": 0.02}
    full, mixed = train(make(**fields)), train(make(precision=precision, **fields))
    expected = [row["loss"] for row in full.epochs]
    assert [row["loss"] for row in mixed.epochs] == pytest.approx(expected, rel=0.05)
