"""What runs see: paired by the seed, the same however it is loaded, and damaged only as said."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from experiments.config import Config, Runtime
from experiments.data import (
    load_data,
    noisy_labels,
)
from experiments.datasets.corruption import add_noise, occlude
from experiments.datasets.sources import digits, scored_splits
from experiments.loaders import Batches, Loader, scoring_loader, train_loader
from experiments.seeds import derive_seed, own_generator

NOWHERE = Path("no such folder")
AUGMENTATIONS = ("none", "flip", "crop-flip", "resized-crop-flip")


def make(**fields):
    config = Config(**{"train_images": 60, "batch_size": 16, "augmentation": "crop-flip", **fields})
    return config, load_data(config, NOWHERE)


def epoch_of(config, data, epoch=0, first_batch=0, workers=0, **place):
    loader = train_loader(data, config, Runtime(loader_workers=workers), **place)
    loader.begin(epoch, first_batch)
    return list(loader)


def whole_test(config, data, split, **place):
    images, labels = zip(
        *scoring_loader(data.tests[split], config, Runtime(), **place), strict=True
    )
    return torch.cat(images), torch.cat(labels)


def same(some, others):
    assert len(some) == len(others)
    return all(
        torch.equal(one, other)
        for batch, another in zip(some, others, strict=True)
        for one, other in zip(batch, another, strict=True)
    )


def draw_from_everything():
    torch.rand(17)
    np.random.rand(3)
    random.random()


def global_states():
    numpy = np.random.get_state()
    return torch.get_rng_state().tolist(), numpy[1].tolist(), numpy[2], random.getstate()


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
def test_conditions_of_one_seed_see_the_same(augmentation):
    spec = {"layer4": {"Dropout2d": {"p": 0.5}}}
    config, data = make(label_noise=0.4, augmentation=augmentation)
    one = [batch for epoch in (0, 1) for batch in epoch_of(config, data, epoch)]
    draw_from_everything()
    config, data = make(label_noise=0.4, augmentation=augmentation, spec=spec, lr=0.3)
    loader, other = train_loader(data, config, Runtime()), []
    for epoch in (0, 1):
        loader.begin(epoch)
        for batch in loader:
            draw_from_everything()
            other.append(batch)
    assert same(one, other)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_loading_draws_from_no_global_generator(workers, monkeypatch):
    def moved(seed):
        pytest.fail("the generators of GPUs make masks, too")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", moved)
    before = global_states()
    config, data = make(label_noise=0.4)
    epoch_of(config, data, workers=workers)
    for images in data.tests.values():
        list(scoring_loader(images, config, Runtime(loader_workers=workers)))
    assert global_states() == before


def test_replica_changes_order_and_augmentation_alone():
    config, data = make(label_noise=0.4)
    other_config, other = make(label_noise=0.4, replica=1)
    assert torch.equal(data.train.numbers, other.train.numbers)
    assert torch.equal(data.train.labels, other.train.labels)
    assert not same(epoch_of(config, data), epoch_of(other_config, other))
    draws = [(0, index) for index in range(60)]  # in one order, so that augmentation is alone
    assert not torch.equal(data.train.__getitems__(draws)[0], other.train.__getitems__(draws)[0])
    plain, plain_data = make(augmentation="none")
    twin, twin_data = make(augmentation="none", replica=1)
    assert torch.equal(*(d.train.__getitems__(draws)[0] for d in (plain_data, twin_data)))
    assert not same(epoch_of(plain, plain_data), epoch_of(twin, twin_data))


def test_the_seed_changes_everything():
    _, one = make(label_noise=0.4)
    _, other = make(label_noise=0.4, seed=1)
    assert not torch.equal(one.train.numbers, other.train.numbers)


def test_epochs_differ_in_order_and_augmentation():
    config, data = make(augmentation="none")
    assert not same(epoch_of(config, data, 0), epoch_of(config, data, 1))
    _, data = make()
    first, second = (data.train.__getitems__([(e, i) for i in range(60)])[0] for e in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "augmentation", [pytest.param("none", marks=pytest.mark.slow), "resized-crop-flip"]
)
def test_loader_workers_change_nothing(augmentation):
    config, data = make(augmentation=augmentation, label_noise=0.4)
    assert same(epoch_of(config, data, 3), epoch_of(config, data, 3, workers=2))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_where_it_was_left(workers):
    config, data = make()
    loader = train_loader(data, config, Runtime(loader_workers=workers))
    assert len(loader) == 4
    loader.begin(5)
    whole = list(loader)
    assert [len(labels) for _, labels in whole] == [16, 16, 16, 12]
    loader.begin(6)
    next(iter(loader))  # left in the middle
    for first in (0, 1, 3, 4):
        loader.begin(5, first)
        assert same(list(loader), whole[first:])
    with pytest.raises(ValueError, match="first_batch must be between 0 and 4, got 5"):
        loader.begin(5, 5)


def test_batches_that_are_skipped_are_not_loaded():
    config, data = make()
    loaded = []

    class Counting:
        def __len__(self):
            return len(data.train)

        def __getitems__(self, draws):
            loaded.append(len(draws))
            return data.train.__getitems__(draws)

    batches = Batches(60, config, 0, 1)
    loader = Loader(Counting(), batches, config, Runtime())
    loader.begin(0, 3)
    list(loader)
    assert loaded == [12]


def test_every_image_is_seen_once_in_an_epoch():
    _, data = make()
    batches = Batches(60, Config(batch_size=16), 0, 1)
    batches.epoch = 2
    assert sorted(draw for batch in batches for draw in batch) == [(2, i) for i in range(60)]
    assert len(data.train) == 60


def test_processes_share_a_batch():
    config, data = make(devices=2, train_images=61)
    whole = epoch_of(config, data)
    slices = [epoch_of(config, data, rank=rank, processes=2) for rank in (0, 1)]
    for both, batch in zip(zip(*slices, strict=True), whole, strict=True):
        images, labels = (torch.cat(part) for part in zip(*both, strict=True))
        assert len(both[0][1]) == len(both[1][1])
        assert torch.equal(images[: len(batch[1])], batch[0])
        assert torch.equal(labels[: len(batch[1])], batch[1])
    assert len(images) == 14  # the last 13, filled up with the first image of the epoch
    assert torch.equal(images[13], whole[0][0][0])


def test_a_tiny_data_set_still_fills_every_process():
    batches = [list(Batches(1, Config(batch_size=8), rank, 4)) for rank in range(4)]
    assert batches == [[[(0, 0)]]] * 4


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_the_test(processes):
    config, data = make(data="fake")
    images, labels = whole_test(config, data, "clean")
    assert len(labels) == 64
    for rank in range(processes):
        part = whole_test(config, data, "clean", rank=rank, processes=processes)
        assert torch.equal(part[0], images[rank::processes])
        assert torch.equal(part[1], labels[rank::processes])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_stop_that_reaches_the_loading_processes_does_not_end_them(number):
    config, data = make()
    loader = train_loader(data, config, Runtime(loader_workers=2))
    whole = list(loader)
    batches = iter(loader)
    taken = [next(batches)]
    for worker in loader._loader._iterator._workers:
        assert os.getpgid(worker.pid) != os.getpgid(0)
        os.kill(worker.pid, number)
    assert same([*taken, *batches], whole)


def rows(images):
    return sorted(image.numpy().tobytes() for image in images)


def test_split_has_every_digit_once_with_its_label():
    config, data = make(train_images=500, augmentation="none")
    everything = digits(32).train
    assert everything.images.shape == (1797, 1, 32, 32)
    assert everything.images.min() == 0
    assert everything.images.max() == 1
    parts = [
        data.train.__getitems__([(0, i) for i in range(500)]),
        whole_test(config, data, "clean"),
    ]
    images, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    assert rows(images) == rows(everything.images)
    keys = [image.numpy().tobytes() for image in everything.images]
    label_of = dict(zip(keys, everything.labels.tolist(), strict=True))
    assert [label_of[image.numpy().tobytes()] for image in images] == labels.tolist()


def test_digits_are_those_of_scikit_learn():
    pixels = torch.from_numpy(load_digits().images).float() / 16
    assert torch.equal(digits(8).train.images[:, 0], pixels)


def test_resized_crops_differ_in_scale_and_place():
    """On a ramp from left to right, the slope tells how much is shown, the mean from where."""
    config = Config(data="fake", augmentation="resized-crop-flip")
    data = load_data(config, NOWHERE)
    ramp = torch.linspace(0, 1, 32).expand(3, 32, 32)
    data.train.pictures = ramp.expand(512, 3, 32, 32)
    images, _ = data.train.__getitems__([(0, index) for index in range(200)])
    shown = (images[:, 0, 0, -1] - images[:, 0, 0, 0]).abs()
    assert 0.15 < shown.min() < 0.35  # the least area, .08, at the ratios 3/4 and 4/3
    assert shown.max() > 0.9
    assert images.mean((1, 2, 3)).std() > 0.05


@pytest.mark.parametrize(("name", "train", "test"), [("digits", 1000, 797), ("fake", 512, 64)])
def test_sizes_unless_asked(name, train, test):
    config = Config(data=name)
    data = load_data(config, NOWHERE)
    assert data.name == name
    assert (len(data.train), len(data.tests["clean"])) == (train, test)
    assert list(data.tests) == ["clean", "occluded", "noisy"]
    assert scored_splits(name) == (*data.tests,)
    images, labels = data.train.__getitems__([(0, 3), (0, 1)])
    assert images.shape == (2, data.channels, data.image_size, data.image_size)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert (data.classes, data.image_size) == (10, 32)


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
@pytest.mark.parametrize("name", ["digits", "fake"])
def test_any_size_with_any_augmentation(name, augmentation):
    config = Config(data=name, image_size=20, augmentation=augmentation, train_images=50)
    data = load_data(config, NOWHERE)
    for images, _ in (*epoch_of(config, data), whole_test(config, data, "occluded")):
        assert images.shape[1:] == (data.channels, 20, 20)
        assert images.min() >= 0
        assert images.max() <= 1


def test_augmentations_do_what_they_say():
    draws = [(0, index) for index in range(60)]
    _, plain = make(augmentation="none")
    original, _ = plain.train.__getitems__(draws)
    _, flip = make(augmentation="flip")
    flipped = 0
    for image, changed in zip(original, flip.train.__getitems__(draws)[0], strict=True):
        assert torch.equal(changed, image) or torch.equal(changed, image.flip(2))
        flipped += not torch.equal(changed, image)
    assert 15 <= flipped <= 45  # of 60 with a half each: 4 standard deviations
    _, crop = make(augmentation="crop-flip")
    moved = 0
    for image, changed in zip(original, crop.train.__getitems__(draws)[0], strict=True):
        padded = torch.nn.functional.pad(image[0], (4, 4, 4, 4))
        windows = padded.unfold(0, 32, 1).unfold(1, 32, 1).flatten(2)
        assert any((windows == way.flatten()).all(2).any() for way in (changed, changed.flip(2)))
        moved += not (torch.equal(changed, image) or torch.equal(changed, image.flip(2)))
    assert moved >= 54  # one place in 81 is where the image was


@pytest.mark.parametrize(
    ("name", "count", "most"), [("digits", 1797, 1796), ("digits", 5000, 1796), ("fake", 513, 512)]
)
def test_more_images_than_there_are(name, count, most):
    with pytest.raises(ValueError, match=f"between 1 and {most} for {name}.*, got {count}$"):
        load_data(Config(data=name, train_images=count), NOWHERE)


@pytest.mark.parametrize("name", ["digits", "fake"])
@pytest.mark.parametrize("share", [0.0, 0.333, 1.0])
def test_noise_changes_the_count_asked_for(name, share):
    clean, noisy = (
        load_data(Config(data=name, train_images=100, label_noise=s, seed=3), NOWHERE)
        for s in (0.0, share)
    )
    assert (clean.train.labels != noisy.train.labels).sum() == round(share * 100)
    assert torch.equal(clean.train.numbers, noisy.train.numbers)
    assert torch.equal(clean.tests["clean"].labels, noisy.tests["clean"].labels)


def test_noise_is_uniform_over_the_other_classes():
    labels = torch.zeros(90_000, dtype=torch.long)
    counts = noisy_labels(labels, 1.0, 10, own_generator(0, "noise")).bincount(minlength=10)
    assert counts[0] == 0
    z = (counts[1:] - 10_000) / (90_000 * (1 / 9) * (8 / 9)) ** 0.5
    assert z.abs().max() < 4


def test_noise_needs_two_classes():
    with pytest.raises(ValueError, match="label_noise needs at least 2 classes, the data have 1"):
        noisy_labels(torch.zeros(4, dtype=torch.long), 0.5, 1, own_generator(0, "noise"))


def test_purposes_have_unrelated_seeds():
    purposes = ("split", "noise", "weights", "order", "masks")
    seeds = {derive_seed(s, p, r) for s in range(20) for p in purposes for r in range(3)}
    assert len(seeds) == 300


def test_the_patch_is_a_quarter_in_mid_gray_anywhere():
    images = torch.rand(600, 3, 8, 8)
    hidden = occlude(images, range(600))
    changed = (hidden != images).all(1)
    assert (hidden[(hidden != images)] == 0.5).all()
    assert (changed.flatten(1).sum(1) == 16).all()
    places = {tuple(mask.nonzero()[0].tolist()) for mask in changed}
    assert places == {(top, left) for top in range(5) for left in range(5)}
    for mask in changed:
        top, left = mask.nonzero()[0]
        assert mask[top : top + 4, left : left + 4].all()


def test_the_noise_has_the_deviation_asked_for():
    gray = torch.full((50, 1, 32, 32), 0.5)
    added = add_noise(gray, range(50), 0.1) - gray
    # of 51,200 values: the deviation's own deviation is .1 / sqrt(2 n), the mean's .1 / sqrt(n)
    assert abs(added.std() - 0.1) < 4 * 0.1 / (2 * 51_200) ** 0.5
    assert abs(added.mean()) < 4 * 0.1 / 51_200**0.5
    assert not torch.equal(added[0], added[1])
    clipped = add_noise(gray, range(50), 5.0)
    assert (clipped.min(), clipped.max()) == (0, 1)


@pytest.mark.parametrize("name", ["digits", "fake"])
def test_damage_is_the_same_for_all_seeds(name):
    """The same picture (by its undamaged pixels) is damaged alike, whatever the seed."""
    damaged = {}
    for seed, replica in ((0, 0), (1, 2)):
        config = Config(data=name, train_images=100, seed=seed, replica=replica)
        data = load_data(config, NOWHERE)
        splits = {split: whole_test(config, data, split) for split in data.tests}
        for split in ("occluded", "noisy"):
            assert torch.equal(splits[split][1], splits["clean"][1])
            assert not torch.equal(splits[split][0], splits["clean"][0])
            damaged[seed, split] = dict(
                zip(data.tests[split].numbers.tolist(), splits[split][0], strict=True)
            )
    for split in ("occluded", "noisy"):
        both = damaged[0, split].keys() & damaged[1, split].keys()
        assert len(both) >= {"digits": 201, "fake": 64}[name]
        assert all(torch.equal(damaged[0, split][i], damaged[1, split][i]) for i in both)


def test_damage_does_not_depend_on_the_batch():
    images = torch.rand(5, 1, 8, 8)
    for corruption in (occlude, add_noise):
        whole = corruption(images, range(5), 0.2)
        assert torch.equal(whole[3:4], corruption(images[3:4], [3], 0.2))


def test_fake_images_are_the_same_every_time():
    one, other = (load_data(Config(data="fake", seed=seed), NOWHERE) for seed in (0, 1))
    assert torch.equal(one.tests["clean"].pictures, other.tests["clean"].pictures)
    assert len(set(rows(one.tests["clean"].pictures))) == 64
    assert one.train.labels.bincount().tolist() == [52, 52] + [51] * 8
